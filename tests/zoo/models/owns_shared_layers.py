"""Wrong on purpose: gives arenas to layers that share another layer's keys and values, and maps them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import kvc_gemma4
from kvcontract import Attention, Config, Context, HfLayers, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-PREFIX-04"
SAYS = r"layer 6 keeps nothing of its own, but HfLayers maps it"
SHARED = 24


def as_if_none_shared(ctx: Context) -> Context:
    """The same launch, of a model whose layers all keep their own."""
    if ctx.config is None:
        return ctx
    text = {**ctx.config["text_config"], "num_kv_shared_layers": 0}
    return replace(ctx, config=Config({**ctx.config, "text_config": text}))


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The declaration of the family, with arenas for every layer."""
    return kvc_gemma4.kvc_model(as_if_none_shared(ctx)).model_copy(update={"name": "owns_shared_layers"})


@hookimpl
def kvc_executor(ctx: Context) -> HfLayers:
    """Every layer to its arena."""
    names = [arena.name for arena in ctx.model.arenas]
    return HfLayers({i: Attention(keys=(name, "k"), values=(name, "v")) for i, name in enumerate(names)})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """A geometry in which the last layers share."""
    (sample,) = kvc_gemma4.kvc_samples(ctx)
    return ({**sample, "text_config": {**sample["text_config"], "num_kv_shared_layers": SHARED}},)

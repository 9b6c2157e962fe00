"""Wrong on purpose: takes facts out of the config as it reads them, so that whoever reads next finds none."""

from __future__ import annotations

from typing import Any

import kvc_gemma4
from kvcontract import Context, HfLayers, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-05"
SAYS = r"for kvc_samples\[0\], kvc_model = .*a second call"
LEVEL = "L1"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, after which the config has no layers."""
    model = kvc_gemma4.kvc_model(ctx)
    if ctx.config is not None:
        ctx.config["text_config"].pop("layer_types")
    return model.model_copy(update={"name": "eaten_facts"})


@hookimpl
def kvc_executor(ctx: Context) -> HfLayers:
    """The real map."""
    return kvc_gemma4.kvc_executor(ctx)


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_gemma4.kvc_samples(ctx)

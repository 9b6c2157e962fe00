"""Wrong on purpose: declares what one worker keeps: heads divided by tp."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import kvc_qwen3
from kvcontract import Config, Context, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-LAYOUT-08"
SAYS = r"at tp 2 the declaration differs .*axes"
LEVEL = "L1"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, of fewer heads the more workers there are."""
    config = ctx.config if ctx.config is not None else Config(kvc_qwen3.SAMPLE)
    heads = max(1, config.counts("num_key_value_heads")[0] // ctx.options.tp)
    mine = Config({**config, "num_key_value_heads": heads})
    return kvc_qwen3.kvc_model(replace(ctx, config=mine)).model_copy(update={"name": "heads_of_a_worker"})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

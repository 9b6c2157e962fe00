"""Wrong on purpose: makes a number of what a config lacks, and so names nothing when it fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import kvc_qwen3
from kvcontract import Config, Context, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-11"
SAYS = r"for a config without num_key_value_heads, kvc_model raised TypeError: int\(\) .*config\.counts"
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, of numbers that may have been written as text."""
    config = ctx.config if ctx.config is not None else Config(kvc_qwen3.SAMPLE)
    heads = int(config.get("num_key_value_heads"))
    whole = replace(ctx, config=Config({**config, "num_key_value_heads": heads}))
    return kvc_qwen3.kvc_model(whole).model_copy(update={"name": "number_of_nothing"})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

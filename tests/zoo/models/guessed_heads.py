"""Wrong on purpose: guesses the number of heads where a config does not tell it.

Every config of its author's tells it, so that nothing shows until one does not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import kvc_qwen3
from kvcontract import Config, Context, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-11"
SAYS = r"without num_key_value_heads, where transformers takes 32, .*axes\.head: 8, not 32"
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, of as many heads as there mostly are."""
    config = ctx.config if ctx.config is not None else Config(kvc_qwen3.SAMPLE)
    whole = Config({**config, "num_key_value_heads": config.get("num_key_value_heads", 8)})
    return kvc_qwen3.kvc_model(replace(ctx, config=whole)).model_copy(update={"name": "guessed_heads"})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

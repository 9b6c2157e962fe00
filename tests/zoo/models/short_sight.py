"""Wrong on purpose: its kernel takes a window of n tokens for n tokens before the current one, less one.

The declaration is right, so that every page is there; the farthest token of each window is not read.
"""

from __future__ import annotations

from typing import Any

import kvc_gemma4
from kvcontract import Context, Executor, KvModel, hookimpl
from kvcontract.engine.build import generic_executor
from kvcontract.engine.checkpoint import load_model

KVC_CONTRACT = 1
TRIPS = "KVC-PREFIX-01"
SAYS = r"32 tokens are what a window or chunk is declared to reach, and here it first leaves one out"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration."""
    return kvc_gemma4.kvc_model(ctx).model_copy(update={"name": "short_sight"})


@hookimpl
def kvc_executor(ctx: Context) -> Executor:
    """The generic executor over a model that looks back a token less."""
    model = load_model(ctx.checkpoint, ctx.device, ctx.dtype)
    executor = generic_executor(ctx.model, kvc_gemma4.kvc_executor(ctx), hf_model=model)
    model.config.get_text_config().sliding_window -= 1
    return executor


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_gemma4.kvc_samples(ctx)

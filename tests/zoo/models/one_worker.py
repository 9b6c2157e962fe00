"""Wrong on purpose: has no idea of more workers than one, and raises whatever it likes."""

from __future__ import annotations

from typing import Any

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-10"
SAYS = r"asked for tp 2: kvc_model raised NotImplementedError: tensor parallelism; .*ctx\.refuse\(\"tp\""
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, which the core could cut."""
    if ctx.options.tp > 1:
        raise NotImplementedError("tensor parallelism")
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "one_worker"})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

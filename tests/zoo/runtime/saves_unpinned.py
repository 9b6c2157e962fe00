"""Wrong on purpose: nothing pins a page while it is being saved: it may be given out meanwhile (C1)."""

from __future__ import annotations

from typing import Any

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl
from kvcontract.pool.pool import BlockPool

KVC_CONTRACT = 1
TRIPS = "KVC-OFFLOAD-06"
SAYS = r"."


def spoil() -> None:
    """Pin nothing."""
    BlockPool.pin = BlockPool.unpin = lambda *_: None


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration; the runtime is spoilt where the suite runs it."""
    if ctx.config is not None:
        spoil()
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "saves_unpinned"})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

"""Wrong on purpose: the store names a snapshot that nobody copies (F3)."""

from __future__ import annotations

from typing import Any

import kvc_qwen35
from kvcontract import Context, KvModel, hookimpl
from kvcontract.store import snapshots

KVC_CONTRACT = 1
TRIPS = "KVC-BOUNDED-02"
SAYS = r"a hit of \d+ tokens has wrong content: the state after \d+ tokens"


def spoil() -> None:
    """Queue no copy."""
    snapshots.take_snapshots = lambda *_: ()


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration; the runtime is spoilt where the suite runs it."""
    if ctx.config is not None:
        spoil()
    return kvc_qwen35.kvc_model(ctx).model_copy(update={"name": "never_written"})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen35.kvc_samples(ctx)

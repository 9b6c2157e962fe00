"""Wrong on purpose: the store publishes a snapshot under an earlier boundary than it was taken at (F2)."""

from __future__ import annotations

from typing import Any

import kvc_qwen35
from kvcontract import Context, KvModel, hookimpl
from kvcontract.pool.request import RequestKv
from kvcontract.store.rank import Rank
from kvcontract.store.snapshots import Snapshots

KVC_CONTRACT = 1
TRIPS = "KVC-BOUNDED-02"
SAYS = r"sealed at (\d+), its owner being at \1: a hit of 0 tokens; expected \1"


def spoil() -> None:
    """Four pages earlier."""
    honest = Snapshots._snapshot
    if honest.__module__ == __name__:
        return

    def snapshot(self: Snapshots, rank: Rank, req: RequestKv, boundary: int) -> Any:
        size = rank.pool.page_tokens
        return honest(self, rank, req, max(size, boundary - 4 * size))

    Snapshots._snapshot = snapshot


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration; the runtime is spoilt where the suite runs it."""
    if ctx.config is not None:
        spoil()
    return kvc_qwen35.kvc_model(ctx).model_copy(update={"name": "other_boundary"})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen35.kvc_samples(ctx)

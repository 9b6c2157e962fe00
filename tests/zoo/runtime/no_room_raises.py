"""Wrong on purpose: a request that finds no slot free for its snapshot fails (F6)."""

from __future__ import annotations

from typing import Any

import kvc_qwen35
from kvcontract import Context, KvModel, hookimpl
from kvcontract.pool.request import RequestKv
from kvcontract.store.rank import Rank
from kvcontract.store.snapshots import Snapshots

KVC_CONTRACT = 1
TRIPS = "KVC-BOUNDED-05"
SAYS = r"no slot is free at \d+ tokens: RuntimeError: no slot for a snapshot"


def spoil() -> None:
    """Raise where a chance is missed."""
    honest = Snapshots.take
    if honest.__module__ == __name__:
        return

    def take(self: Snapshots, rank: Rank, req: RequestKv) -> None:
        if req.checkpoint and any(side.pool.gauges().budget < 1 for side in rank.pool.sides.slots):
            raise RuntimeError("no slot for a snapshot")
        honest(self, rank, req)

    Snapshots.take = take


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration; the runtime is spoilt where the suite runs it."""
    if ctx.config is not None:
        spoil()
    return kvc_qwen35.kvc_model(ctx).model_copy(update={"name": "no_room_raises"})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen35.kvc_samples(ctx)

"""Wrong on purpose: the store takes a snapshot when it comes to it, named by the last boundary (F1)."""

from __future__ import annotations

from functools import partial
from typing import Any

import kvc_qwen35
from kvcontract import Context, KvModel, hookimpl
from kvcontract.pool.request import RequestKv
from kvcontract.store.rank import Rank
from kvcontract.store.snapshots import Snapshots

KVC_CONTRACT = 1
TRIPS = "KVC-BOUNDED-02"
SAYS = r"a hit of (\d+) tokens has wrong content: .* found the state after token \1 of this prompt"


def spoil() -> None:
    """Nobody looks whether the request still stands there."""
    Snapshots.take = take


def take(self: Snapshots, rank: Rank, req: RequestKv) -> None:
    """Copy the slots as they are."""
    boundary, taken = req._last_checkpoint, self.of(req)
    if boundary and not req.released and not (taken and taken[-1].boundary >= boundary):
        self._kept(rank, req, boundary, partial(self._snapshot, rank, req, boundary))


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration; the runtime is spoilt where the suite runs it."""
    if ctx.config is not None:
        spoil()
    return kvc_qwen35.kvc_model(ctx).model_copy(update={"name": "taken_late"})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen35.kvc_samples(ctx)

"""Wrong on purpose: the store lets a snapshot be found before it is copied (F2)."""

from __future__ import annotations

from typing import Any

import kvc_qwen35
from kvcontract import Context, KvModel, hookimpl
from kvcontract.memory.slots import take_snapshots
from kvcontract.store import snapshots

KVC_CONTRACT = 1
TRIPS = "KVC-BOUNDED-02"
SAYS = r"a hit of \d+ tokens has wrong content: the state after \d+ tokens"


WAITING: list[tuple[Any, ...]] = []


def spoil() -> None:
    """Copy what is wanted when the next copy is."""
    snapshots.take_snapshots = late


def late(*wanted: Any) -> tuple[()]:
    """Make the copies before these."""
    while WAITING:
        take_snapshots(*WAITING.pop())
    WAITING.append(wanted)
    return ()


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration; the runtime is spoilt where the suite runs it."""
    if ctx.config is not None:
        spoil()
    return kvc_qwen35.kvc_model(ctx).model_copy(update={"name": "published_early"})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen35.kvc_samples(ctx)

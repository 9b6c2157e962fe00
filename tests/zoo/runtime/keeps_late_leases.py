"""Wrong on purpose: a look-up that answers after its waiter gave up keeps its lease."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl
from kvcontract.store import fetch

KVC_CONTRACT = 1
TRIPS = "KVC-OFFLOAD-04"
SAYS = r"tier dram: \d+ leases"


KEPT: list[Any] = []


def spoil() -> None:
    """Nobody releases it."""
    fetch.Lease = SimpleNamespace(release=KEPT.append)


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration; the runtime is spoilt where the suite runs it."""
    if ctx.config is not None:
        spoil()
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "keeps_late_leases"})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

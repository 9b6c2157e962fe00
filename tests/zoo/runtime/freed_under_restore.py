"""Wrong on purpose: a snapshot is let go when its request is admitted, before it is copied (F4)."""

from __future__ import annotations

from typing import Any

import kvc_qwen35
from kvcontract import Context, KvModel, hookimpl
from kvcontract.pool.holdings import Holdings, SideHolds

KVC_CONTRACT = 1
TRIPS = "KVC-BOUNDED-03"
SAYS = r"a step began with another state than its own: .* of another prompt"


def spoil() -> None:
    """Give slots back at once."""
    honest = Holdings.adopt
    if honest.__module__ == __name__:
        return

    def adopt(self: Holdings, held: SideHolds | None, pages: int) -> None:
        honest(self, held, pages)
        for view in self.slots:
            view.release()

    Holdings.adopt = adopt


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration; the runtime is spoilt where the suite runs it."""
    if ctx.config is not None:
        spoil()
    return kvc_qwen35.kvc_model(ctx).model_copy(update={"name": "freed_under_restore"})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen35.kvc_samples(ctx)

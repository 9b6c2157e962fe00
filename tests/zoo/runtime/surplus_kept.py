"""Wrong on purpose: the full pages that lie beyond a hit's state stay pinned (F5)."""

from __future__ import annotations

from typing import Any

import kvc_qwen35
from kvcontract import Context, KvModel, hookimpl
from kvcontract.pool.handles import Hold

KVC_CONTRACT = 1
TRIPS = "KVC-BOUNDED-04"
SAYS = r"a hit of 24 tokens keeps \d+ pages of 3 from others"


def spoil() -> None:
    """Pin what is about to be let go."""
    honest = Hold.trim
    if honest.__module__ == __name__:
        return

    def trim(self: Hold, pages: int) -> None:
        if pages:
            self.pool.pin(self.pages[pages:].copy())
        honest(self, pages)

    Hold.trim = trim


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration; the runtime is spoilt where the suite runs it."""
    if ctx.config is not None:
        spoil()
    return kvc_qwen35.kvc_model(ctx).model_copy(update={"name": "surplus_kept"})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen35.kvc_samples(ctx)

"""Wrong on purpose: a step that came to nothing gives back the page that an earlier step has begun."""

from __future__ import annotations

from typing import Any

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl
from kvcontract.pool.chunk import Chunk
from kvcontract.pool.request import RequestKv

KVC_CONTRACT = 1
TRIPS = "KVC-PREFIX-07"
SAYS = r"what a request has written has changed: full: token \d+, layer 0 k: found"


def spoil() -> None:
    """Round down where it is to be rounded up."""
    honest = RequestKv.revert
    if honest.__module__ == __name__:
        return

    def revert(self: RequestKv, chunk: Chunk) -> None:
        honest(self, chunk)
        full = chunk.start // self.pool.page_tokens
        if len(self.pages) > full:
            self.pool.retract(self._entitlement, self.pages[full:].copy())

    RequestKv.revert = revert


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration; the runtime is spoilt where the suite runs it."""
    if ctx.config is not None:
        spoil()
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "reverts_too_far"})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

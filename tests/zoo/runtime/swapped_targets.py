"""Wrong on purpose: records of one load are written into one another's pages."""

from __future__ import annotations

from typing import Any

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl
from kvcontract.core.pending import Pending
from kvcontract.store.workers import Workers

KVC_CONTRACT = 1
TRIPS = "KVC-OFFLOAD-01"
SAYS = r"what came back through the dram tier is not what it was"


def spoil() -> None:
    """The last page first."""
    honest = Workers.load
    if honest.__module__ == __name__:
        return

    def load(
        self: Workers, sources: Any, page_keys: Any, blocks: Any, *args: Any, **more: Any
    ) -> Pending[Any]:
        return honest(self, sources, page_keys, blocks[::-1].copy(), *args, **more)

    Workers.load = load


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration; the runtime is spoilt where the suite runs it."""
    if ctx.config is not None:
        spoil()
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "swapped_targets"})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

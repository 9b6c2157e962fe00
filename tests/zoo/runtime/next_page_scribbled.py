"""Wrong on purpose: a restore clears the first byte of the page after the last one it fills."""

from __future__ import annotations

from typing import Any

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl
from kvcontract.store.worker import Worker
from kvcontract.tiers.base import Op

KVC_CONTRACT = 1
TRIPS = "KVC-LAYOUT-07"
SAYS = r"restored: byte 0 of block 0 in full was overwritten"


def spoil() -> None:
    """Write once more than there are pages."""
    honest = Worker.load
    if honest.__module__ == __name__:
        return

    def load(self: Worker, *args: Any, **more: Any) -> Op:
        blocks = args[5]
        op = honest(self, *args, **more)
        for shard in self._every_shard():
            arena = next(iter(shard.program.binding.arenas.values()))
            after = (int(blocks.max()) + 1) % arena.blocks
            op.on_done(lambda _, a=arena, b=after: a.storage[a.offset_bytes + b * a.stride_bytes].zero_())
        return op

    Worker.load = load


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration; the runtime is spoilt where the suite runs it."""
    if ctx.config is not None:
        spoil()
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "next_page_scribbled"})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

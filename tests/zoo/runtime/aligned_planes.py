"""Wrong on purpose: views of a field begin at a multiple of 256 bytes, whatever the declaration says.

Pages of 16 tokens, whose planes are such multiples by themselves, are right.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl
from kvcontract.contract.layout import FieldLayout
from kvcontract.memory.binding import ArenaBinding

KVC_CONTRACT = 1
TRIPS = "KVC-LAYOUT-06"
SAYS = r"found the value of layer 0 V page 0 token 0 .* where layer 0 K page 0 token 0"


ALIGNED_BYTES = 256


def spoil() -> None:
    """Round the beginnings down."""
    honest = ArenaBinding.view
    if honest.__module__ == __name__:
        return

    def view(self: ArenaBinding, field: FieldLayout) -> Tensor:
        begin = field.offset_bytes // ALIGNED_BYTES * ALIGNED_BYTES
        return honest(self, replace(field, offset_bytes=begin))

    ArenaBinding.view = view


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration; the runtime is spoilt where the suite runs it."""
    if ctx.config is not None:
        spoil()
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "aligned_planes"})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

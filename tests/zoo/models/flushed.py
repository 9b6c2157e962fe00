"""Wrong on purpose: a conversion whose arithmetic takes the smallest numbers for zero."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import kvc_qwen3
from kvcontract import Context, Conversion, KvModel, Repack, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

KVC_CONTRACT = 1
TRIPS = "KVC-REPACK-03"
SAYS = r"found a value that belongs nowhere: 0x[08]0\w\w became 0x[08]000 where layer \d [KV] "
LEVEL = "L1"


def pack_flushed(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Device to wire: as a fast kernel would, without subnormal numbers."""
    for name, values in src.items():
        tiny = values.abs() < torch.finfo(values.dtype).tiny
        dst[name].copy_(values.masked_fill(tiny, 0))


def unpack(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Wire to device: as it is."""
    for name, values in src.items():
        dst[name].copy_(values)


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with a conversion."""
    model = kvc_qwen3.kvc_model(ctx)
    conversion = Conversion(to_wire=f"{__name__}:pack_flushed", from_wire=f"{__name__}:unpack")
    repack = Repack(arenas=model.arenas, conversion=conversion)
    return model.model_copy(update={"name": "flushed", "repack": repack})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

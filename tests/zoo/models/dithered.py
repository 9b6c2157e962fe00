"""Wrong on purpose: a conversion that rounds to the wire at random, without bias."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import kvc_qwen3
from kvcontract import Context, Conversion, KvModel, Repack, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

KVC_CONTRACT = 1
TRIPS = "KVC-REPACK-04"
SAYS = r"to_wire gave other bytes at call 2 than at first"
LEVEL = "L1"


def pack_dithered(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Device to wire: up or down by chance."""
    for name, values in src.items():
        dst[name].copy_(values.float() * (1 + 0.004 * torch.rand(values.shape)))


def unpack(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Wire to device: as it is."""
    for name, values in src.items():
        dst[name].copy_(values)


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with a conversion."""
    model = kvc_qwen3.kvc_model(ctx)
    conversion = Conversion(to_wire=f"{__name__}:pack_dithered", from_wire=f"{__name__}:unpack")
    repack = Repack(arenas=model.arenas, conversion=conversion)
    return model.model_copy(update={"name": "dithered", "repack": repack})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

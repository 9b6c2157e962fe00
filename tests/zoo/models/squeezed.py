"""Wrong on purpose: a conversion that stores keys and values in eight bits, and says that nothing is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import kvc_qwen3
from kvcontract import Context, Conversion, KvModel, Repack, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

KVC_CONTRACT = 1
TRIPS = "KVC-REPACK-03"
SAYS = r"found a value that belongs nowhere"
LEVEL = "L1"


def pack_squeezed(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Device to wire: in half the bytes."""
    for name, values in src.items():
        dst[name].copy_(values.to(torch.float8_e5m2))


def unpack(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Wire to device: as it is."""
    for name, values in src.items():
        dst[name].copy_(values)


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with a conversion."""
    model = kvc_qwen3.kvc_model(ctx)
    conversion = Conversion(to_wire=f"{__name__}:pack_squeezed", from_wire=f"{__name__}:unpack")
    repack = Repack(arenas=model.arenas, conversion=conversion)
    return model.model_copy(update={"name": "squeezed", "repack": repack})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

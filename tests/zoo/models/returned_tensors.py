"""Wrong on purpose: a conversion that returns what it should have written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import kvc_qwen3
from kvcontract import Context, Conversion, KvModel, Repack, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

KVC_CONTRACT = 1
TRIPS = "KVC-REPACK-04"
SAYS = r"from_wire left 512 of 512 B of dst unwritten; first: byte 0 of layers\.0\.kv/k"
LEVEL = "L1"


def pack(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Device to wire: as it is."""
    for name, values in src.items():
        dst[name].copy_(values)


def unpack_returned(src: dict[str, Tensor], dst: dict[str, Tensor]) -> dict[str, Tensor]:
    """Wire to device: whoever called may have it."""
    return {name: values.to(dst[name].dtype) for name, values in src.items()}


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with a conversion."""
    model = kvc_qwen3.kvc_model(ctx)
    conversion = Conversion(to_wire=f"{__name__}:pack", from_wire=f"{__name__}:unpack_returned")
    repack = Repack(arenas=model.arenas, conversion=conversion)
    return model.model_copy(update={"name": "returned_tensors", "repack": repack})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

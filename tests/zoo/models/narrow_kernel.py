"""Wrong on purpose: a conversion whose kernel copies at most 64 channels of a head.

A small model of the family has fewer; the model itself has 128.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import kvc_qwen3
from kvcontract import Context, Conversion, KvModel, Repack, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

KVC_CONTRACT = 1
TRIPS = "KVC-REPACK-04"
SAYS = r"to_wire left 917,504 of 1,835,008 B of dst unwritten; first: byte 128 of layers\.0\.kv/k"
LEVEL = "L1"


def pack_narrow(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Device to wire: as many channels as a block of threads has."""
    for name, values in src.items():
        dst[name][..., :64].copy_(values[..., :64])


def unpack(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Wire to device: as it is."""
    for name, values in src.items():
        dst[name].copy_(values)


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with a conversion."""
    model = kvc_qwen3.kvc_model(ctx)
    conversion = Conversion(to_wire=f"{__name__}:pack_narrow", from_wire=f"{__name__}:unpack")
    repack = Repack(arenas=model.arenas, conversion=conversion)
    return model.model_copy(update={"name": "narrow_kernel", "repack": repack})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

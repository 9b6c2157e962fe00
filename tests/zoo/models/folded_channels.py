"""Wrong on purpose: a conversion that stores channels by halves of 64, and takes them back as they come.

A small model of the family has fewer channels than one half; the model itself has 128.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import kvc_qwen3
from kvcontract import Context, Conversion, KvModel, Repack, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

KVC_CONTRACT = 1
TRIPS = "KVC-REPACK-03"
SAYS = (
    r"found the value of layer 0 K page 0 token 0 head 0 dim 64 where layer 0 K page 0 token 0 head 0 dim 1 "
)
LEVEL = "L1"
HALF = 64


def pack_halves(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Device to wire: a channel of each half by turns."""
    for name, values in src.items():
        halves = values.unflatten(-1, (-1, min(HALF, values.shape[-1])))
        dst[name].copy_(halves.transpose(-1, -2).flatten(-2))


def unpack(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Wire to device: as it is."""
    for name, values in src.items():
        dst[name].copy_(values)


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with a conversion."""
    model = kvc_qwen3.kvc_model(ctx)
    conversion = Conversion(to_wire=f"{__name__}:pack_halves", from_wire=f"{__name__}:unpack")
    repack = Repack(arenas=model.arenas, conversion=conversion)
    return model.model_copy(update={"name": "folded_channels", "repack": repack})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

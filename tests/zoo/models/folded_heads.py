"""Wrong on purpose: a conversion that stores head by head and takes it back token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import kvc_qwen3
from kvcontract import Context, Conversion, KvModel, Repack, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

KVC_CONTRACT = 1
TRIPS = "KVC-REPACK-03"
SAYS = r"found the value of layer 0 K page \d+ token \d+ head \d+ dim 0 where layer 0 K page \d+"
LEVEL = "L1"


def pack_heads(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Device to wire: all tokens of a head, then all of the next."""
    for name, values in src.items():
        dst[name].copy_(values.transpose(0, 1).reshape(values.shape))


def unpack(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Wire to device: as it is."""
    for name, values in src.items():
        dst[name].copy_(values)


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with a conversion."""
    model = kvc_qwen3.kvc_model(ctx)
    conversion = Conversion(to_wire=f"{__name__}:pack_heads", from_wire=f"{__name__}:unpack")
    repack = Repack(arenas=model.arenas, conversion=conversion)
    return model.model_copy(update={"name": "folded_heads", "repack": repack})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

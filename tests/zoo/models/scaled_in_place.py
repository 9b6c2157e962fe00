"""Wrong on purpose: a conversion that prepares the page for the wire where it lies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import kvc_qwen3
from kvcontract import Context, Conversion, KvModel, Repack, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

KVC_CONTRACT = 1
TRIPS = "KVC-REPACK-04"
SAYS = r"to_wire changed its source, which is a live page"
LEVEL = "L1"


def pack_in_place(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Device to wire: of half the size, the page too."""
    for name, values in src.items():
        dst[name].copy_(values.neg_())


def unpack(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Wire to device: with its sign."""
    for name, values in src.items():
        dst[name].copy_(-values)


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with a conversion."""
    model = kvc_qwen3.kvc_model(ctx)
    conversion = Conversion(to_wire=f"{__name__}:pack_in_place", from_wire=f"{__name__}:unpack")
    repack = Repack(arenas=model.arenas, conversion=conversion)
    return model.model_copy(update={"name": "scaled_in_place", "repack": repack})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

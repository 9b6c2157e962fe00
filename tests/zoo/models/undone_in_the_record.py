"""Wrong on purpose: a conversion that undoes itself in the record, which the next reader gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import kvc_qwen3
from kvcontract import Context, Conversion, KvModel, Repack, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

KVC_CONTRACT = 1
TRIPS = "KVC-REPACK-04"
SAYS = r"from_wire changed its source"
LEVEL = "L1"


def pack(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Device to wire: negated."""
    for name, values in src.items():
        dst[name].copy_(-values)


def unpack_in_place(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Wire to device: negated where it lies."""
    for name, values in src.items():
        dst[name].copy_(values.neg_())


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with a conversion."""
    model = kvc_qwen3.kvc_model(ctx)
    conversion = Conversion(to_wire=f"{__name__}:pack", from_wire=f"{__name__}:unpack_in_place")
    repack = Repack(arenas=model.arenas, conversion=conversion)
    return model.model_copy(update={"name": "undone_in_the_record", "repack": repack})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

"""Wrong on purpose: a conversion that restores the rows of a page in reverse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import kvc_qwen3
from kvcontract import Context, Conversion, KvModel, Repack, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

KVC_CONTRACT = 1
TRIPS = "KVC-REPACK-03"
SAYS = r"found the value of layer 0 K page \d+ token \d+ .* where layer 0 K page \d+ token 0 .* belongs"
LEVEL = "L1"


def pack(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Device to wire: as it is."""
    for name, values in src.items():
        dst[name].copy_(values)


def unpack_reversed(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Wire to device: the newest first."""
    for name, values in src.items():
        dst[name].copy_(values.flip(0))


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with a conversion."""
    model = kvc_qwen3.kvc_model(ctx)
    conversion = Conversion(to_wire=f"{__name__}:pack", from_wire=f"{__name__}:unpack_reversed")
    repack = Repack(arenas=model.arenas, conversion=conversion)
    return model.model_copy(update={"name": "last_row_first", "repack": repack})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

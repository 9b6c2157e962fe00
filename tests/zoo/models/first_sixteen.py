"""Wrong on purpose: a conversion that moves 16 rows of a page, however many it has.

The other page size that the plugin allows is 64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import kvc_qwen3
from kvcontract import Context, Conversion, KvModel, Repack, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

KVC_CONTRACT = 1
TRIPS = "KVC-REPACK-04"
SAYS = r"to_wire left [\d,]+ of [\d,]+ B of dst unwritten; first: byte 1024 of layers\.0\.kv/k"
LEVEL = "L1"


def pack_first(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Device to wire: a page of the usual size."""
    for name, values in src.items():
        dst[name][:16].copy_(values[:16])


def unpack(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Wire to device: as it is."""
    for name, values in src.items():
        dst[name].copy_(values)


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with a conversion."""
    model = kvc_qwen3.kvc_model(ctx)
    conversion = Conversion(to_wire=f"{__name__}:pack_first", from_wire=f"{__name__}:unpack")
    repack = Repack(arenas=model.arenas, conversion=conversion)
    return model.model_copy(update={"name": "first_sixteen", "repack": repack})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

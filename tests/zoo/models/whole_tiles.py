"""Wrong on purpose: a conversion that copies whole tiles of four rows, and leaves the rows after the last.

Every page size of the plugin's own is a multiple of four.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import kvc_qwen3
from kvcontract import Context, Conversion, KvModel, Repack, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

KVC_CONTRACT = 1
TRIPS = "KVC-REPACK-04"
SAYS = r"to_wire left 512 of 512 B of dst unwritten"
LEVEL = "L1"
TILE = 4


def pack_tiles(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Device to wire: four rows at a time."""
    for name, values in src.items():
        for row in range(0, len(values) // TILE * TILE, TILE):
            dst[name][row : row + TILE].copy_(values[row : row + TILE])


def unpack(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Wire to device: as it is."""
    for name, values in src.items():
        dst[name].copy_(values)


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with a conversion."""
    model = kvc_qwen3.kvc_model(ctx)
    conversion = Conversion(to_wire=f"{__name__}:pack_tiles", from_wire=f"{__name__}:unpack")
    repack = Repack(arenas=model.arenas, conversion=conversion)
    return model.model_copy(update={"name": "whole_tiles", "repack": repack})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

"""Wrong on purpose: a conversion that rounds rows up to whole tiles, and so writes beyond the page's end.

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
SAYS = r"from_wire wrote [\d,]+ B beyond the tensors of dst"
LEVEL = "L1"
TILE = 4


def pack(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Device to wire: as it is."""
    for name, values in src.items():
        dst[name].copy_(values)


def unpack_rounded(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Wire to device: the last tile whole, whatever lies there."""
    for name, values in src.items():
        field = dst[name]
        field.copy_(values)
        spare = -len(values) % TILE
        if spare:
            after = field.storage_offset() + len(values) * field.stride(0)
            field.as_strided((spare, *field.shape[1:]), field.stride(), after).zero_()


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with a conversion."""
    model = kvc_qwen3.kvc_model(ctx)
    conversion = Conversion(to_wire=f"{__name__}:pack", from_wire=f"{__name__}:unpack_rounded")
    repack = Repack(arenas=model.arenas, conversion=conversion)
    return model.model_copy(update={"name": "rounded_rows", "repack": repack})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

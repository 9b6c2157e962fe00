"""Wrong on purpose: what is restored comes back with K and V swapped.

Both have one shape, so nothing but content tells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import kvc_qwen3
from kvcontract import Context, Conversion, HfLayers, KvModel, Repack, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

KVC_CONTRACT = 1
TRIPS = "KVC-REPACK-03"
SAYS = r"found the value of layer 0 V .* where layer 0 K .* belongs"
LEVEL = "L1"


def pack(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Device to wire: as it is."""
    for name, values in src.items():
        dst[name].copy_(values)


def unpack_swapped(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Wire to device: K gets V and V gets K."""
    for name, values in src.items():
        arena, field = name.split("/")
        dst[f"{arena}/{'v' if field == 'k' else 'k'}"].copy_(values)


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with a conversion."""
    model = kvc_qwen3.kvc_model(ctx)
    conversion = Conversion(to_wire=f"{__name__}:pack", from_wire=f"{__name__}:unpack_swapped")
    repack = Repack(arenas=model.arenas, conversion=conversion)
    return model.model_copy(update={"name": "swapped_restore", "repack": repack})


@hookimpl
def kvc_executor(ctx: Context) -> HfLayers:
    """The real map."""
    return kvc_qwen3.kvc_executor(ctx)


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

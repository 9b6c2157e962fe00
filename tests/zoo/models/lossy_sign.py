"""Wrong on purpose: what is stored has lost its sign.

Small positive numbers survive; only content with high bits set tells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import kvc_qwen3
from kvcontract import Context, Conversion, HfLayers, KvModel, Repack, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

KVC_CONTRACT = 1
TRIPS = "KVC-REPACK-03"
SAYS = r"found a value that belongs nowhere: 0x[89a-f]\w+ became 0x[0-7]\w+ where layer 0 K"
LEVEL = "L1"


def pack_absolute(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Device to wire: without the sign."""
    for name, values in src.items():
        dst[name].copy_(values.abs())


def unpack(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Wire to device: as it is."""
    for name, values in src.items():
        dst[name].copy_(values)


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with a conversion."""
    model = kvc_qwen3.kvc_model(ctx)
    conversion = Conversion(to_wire=f"{__name__}:pack_absolute", from_wire=f"{__name__}:unpack")
    repack = Repack(arenas=model.arenas, conversion=conversion)
    return model.model_copy(update={"name": "lossy_sign", "repack": repack})


@hookimpl
def kvc_executor(ctx: Context) -> HfLayers:
    """The real map."""
    return kvc_qwen3.kvc_executor(ctx)


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

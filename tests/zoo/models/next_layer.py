"""Wrong on purpose: a conversion that puts what it restores one layer further."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import kvc_qwen3
from kvcontract import Context, Conversion, KvModel, Repack, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

KVC_CONTRACT = 1
TRIPS = "KVC-REPACK-03"
SAYS = r"found the value of layer 3 K .* where layer 0 K .* belongs"
LEVEL = "L1"


def pack(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Device to wire: as it is."""
    for name, values in src.items():
        dst[name].copy_(values)


def unpack_next(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Wire to device: by number, counted from one."""
    names = list(dst)
    for number, values in enumerate(src.values()):
        dst[names[(number + 2) % len(names)]].copy_(values)


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with a conversion."""
    model = kvc_qwen3.kvc_model(ctx)
    conversion = Conversion(to_wire=f"{__name__}:pack", from_wire=f"{__name__}:unpack_next")
    repack = Repack(arenas=model.arenas, conversion=conversion)
    return model.model_copy(update={"name": "next_layer", "repack": repack})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

"""Wrong on purpose: a conversion that restores the page that was stored last, whichever is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import kvc_qwen3
from kvcontract import Context, Conversion, KvModel, Repack, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

KVC_CONTRACT = 1
TRIPS = "KVC-REPACK-04"
SAYS = r"in a process that has not called to_wire"
LEVEL = "L1"
LAST: dict[str, Tensor] = {}


def pack_last(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Device to wire: as it is, and remembered."""
    for name, values in src.items():
        dst[name].copy_(values)
        LAST[name] = values.clone()


def unpack_last(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Wire to device: from memory, which is nearer."""
    for name, values in src.items():
        dst[name].copy_(LAST.get(name, values * 0))


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with a conversion."""
    model = kvc_qwen3.kvc_model(ctx)
    conversion = Conversion(to_wire=f"{__name__}:pack_last", from_wire=f"{__name__}:unpack_last")
    repack = Repack(arenas=model.arenas, conversion=conversion)
    return model.model_copy(update={"name": "page_of_another", "repack": repack})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

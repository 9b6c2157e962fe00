"""Wrong on purpose: a conversion that knows pages of 16 tokens only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import kvc_qwen3
from kvcontract import Context, Conversion, KvModel, Repack, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

KVC_CONTRACT = 1
TRIPS = "KVC-REPACK-04"
SAYS = r"conversion 'pages_of_sixteen:pack_sixteen' raised .*shape"
LEVEL = "L1"


def pack_sixteen(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Device to wire: four tiles of four rows."""
    for name, values in src.items():
        dst[name].view(4, 4, *values.shape[1:]).copy_(values.view(4, 4, *values.shape[1:]))


def unpack(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Wire to device: as it is."""
    for name, values in src.items():
        dst[name].copy_(values)


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with a conversion."""
    model = kvc_qwen3.kvc_model(ctx)
    conversion = Conversion(to_wire=f"{__name__}:pack_sixteen", from_wire=f"{__name__}:unpack")
    repack = Repack(arenas=model.arenas, conversion=conversion)
    return model.model_copy(update={"name": "pages_of_sixteen", "repack": repack})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

"""Wrong on purpose: names conversions that are made inside its hook, where no worker finds them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import kvc_qwen3
from kvcontract import Context, Conversion, KvModel, Repack, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

KVC_CONTRACT = 1
TRIPS = "KVC-REPACK-02"
SAYS = r"kvc_model\.<locals>\.pack' cannot be loaded"
LEVEL = "L1"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with conversions of its own."""

    def pack(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
        for name, values in src.items():
            dst[name].copy_(values)

    name = f"{pack.__module__}:{pack.__qualname__}"
    model = kvc_qwen3.kvc_model(ctx)
    repack = Repack(arenas=model.arenas, conversion=Conversion(to_wire=name, from_wire=name))
    return model.model_copy(update={"name": "local_conversion", "repack": repack})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

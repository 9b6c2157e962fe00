"""Wrong on purpose: a conversion that remembers pages by where they lie, and takes a new one for the old."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import kvc_qwen3
from kvcontract import Context, Conversion, KvModel, Repack, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-REPACK-03"
SAYS = r"memory that held other pages before: found the value of layer 0 K page \d+ .* where layer 0 K page 0"
LEVEL = "L1"

STAGED: dict[tuple[str, int, torch.Size], Tensor] = {}


def pack_once(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Device to wire: what was staged when the address was first seen."""
    for name, values in src.items():
        place = name, values.data_ptr(), values.shape
        if place not in STAGED:
            STAGED[place] = values.clone()
        dst[name].copy_(STAGED[place])


def unpack(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Wire to device: as it is."""
    for name, values in src.items():
        dst[name].copy_(values)


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with a conversion."""
    model = kvc_qwen3.kvc_model(ctx)
    conversion = Conversion(to_wire=f"{__name__}:pack_once", from_wire=f"{__name__}:unpack")
    repack = Repack(arenas=model.arenas, conversion=conversion)
    return model.model_copy(update={"name": "known_by_address", "repack": repack})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

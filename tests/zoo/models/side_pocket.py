"""Wrong on purpose: a conversion that keeps the page aside and stores no more than a name for it.

In the process that stored it everything comes back; no other process has it.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch

import kvc_qwen3
from kvcontract import Context, Conversion, KvModel, Repack, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

KVC_CONTRACT = 1
TRIPS = "KVC-REPACK-04"
SAYS = r"in a process that has not called to_wire, .*conversion 'side_pocket:unpack_kept' raised"
LEVEL = "L1"
KEPT: dict[bytes, dict[str, Any]] = {}


def pack_name(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Device to wire: a digest, and the rest of it empty."""
    whole = b"".join(values.contiguous().view(torch.uint8).numpy().tobytes() for values in src.values())
    name = hashlib.blake2b(whole, digest_size=8).digest()
    KEPT[name] = {key: values.clone() for key, values in src.items()}
    for values in dst.values():
        values.zero_()
    first = next(iter(dst.values())).view(torch.uint8).reshape(-1)
    first[: len(name)].copy_(torch.frombuffer(bytearray(name), dtype=torch.uint8))


def unpack_kept(src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
    """Wire to device: what was kept under that name."""
    first = next(iter(src.values())).contiguous().view(torch.uint8).reshape(-1)
    kept = KEPT[first[:8].numpy().tobytes()]
    for name, values in dst.items():
        values.copy_(kept[name])


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with a conversion."""
    model = kvc_qwen3.kvc_model(ctx)
    conversion = Conversion(to_wire=f"{__name__}:pack_name", from_wire=f"{__name__}:unpack_kept")
    repack = Repack(arenas=model.arenas, conversion=conversion)
    return model.model_copy(update={"name": "side_pocket", "repack": repack})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

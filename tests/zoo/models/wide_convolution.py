"""Wrong on purpose: declares as many columns of a convolution's state as the kernel is wide, one too many."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import kvc_qwen35
from kvcontract import Arena, Context, Field, HfLayers, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-PREFIX-04"
SAYS = r"kernel of 4, which is \[128, 3\] to keep; declared: \[128, 4\]"


def widened(arena: Arena) -> Arena:
    """One column more, where there are columns."""

    def wider(axes: Mapping[str, int]) -> dict[str, int]:
        return {axis: size + (axis == "column") for axis, size in axes.items()}

    fields = tuple(
        Field(name=item.name, dtype=item.dtype, axes=wider(item.axes), shard_axis=item.shard_axis)
        for item in arena.fields
    )
    return Arena.planes(name=arena.name, group=arena.group, layer=arena.layer, fields=fields)


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with wider convolutions."""
    model = kvc_qwen35.kvc_model(ctx)
    arenas = tuple(widened(arena) if "conv" in arena.name else arena for arena in model.arenas)
    return model.model_copy(update={"name": "wide_convolution", "arenas": arenas})


@hookimpl
def kvc_executor(ctx: Context) -> HfLayers:
    """The real map."""
    return kvc_qwen35.kvc_executor(ctx)


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen35.kvc_samples(ctx)

"""Wrong on purpose: says that a state may be taken anywhere in a chunk of the prefill kernel.

Whoever is cut there computes other bits than whoever is not; only bits tell.
"""

from __future__ import annotations

from typing import Any

import kvc_qwen35
from kvcontract import Context, HfLayers, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-BOUNDED-01"
SAYS = r"cut at every 16 leaves another state .* cut at every 64, it leaves the same one"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with a boundary every 16 tokens; the kernel works through 64."""
    model = kvc_qwen35.kvc_model(ctx)
    groups = tuple(
        group.model_copy(update={"boundary_tokens": 16}) if group.kind == "bounded" else group
        for group in model.groups
    )
    return model.model_copy(update={"name": "fine_boundary", "groups": groups})


@hookimpl
def kvc_executor(ctx: Context) -> HfLayers:
    """The real map."""
    return kvc_qwen35.kvc_executor(ctx)


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen35.kvc_samples(ctx)

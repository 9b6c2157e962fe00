"""Wrong on purpose: each layer of the model writes into the next one's arena.

Every layer reads what it wrote, so all logits are right; whoever takes the pages by their names is misled.
"""

from __future__ import annotations

from typing import Any

import kvc_qwen3
from kvcontract import Context, HfLayers, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-PREFIX-01"
SAYS = r"layer 0 of the model writes into arena layers\.1\.kv, which declares layer 1"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration."""
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "shifted_layers"})


@hookimpl
def kvc_executor(ctx: Context) -> HfLayers:
    """The real map, turned by one."""
    layers = kvc_qwen3.kvc_executor(ctx).layers
    return HfLayers({layer: layers[(layer + 1) % len(layers)] for layer in layers})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

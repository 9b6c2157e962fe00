"""Wrong on purpose: a sample that lacks what its own declaration needs."""

from __future__ import annotations

from typing import Any

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-11"
SAYS = r"for kvc_samples\[0\], config\.num_key_value_heads = None: config\.json lacks num_key_value_heads"
LEVEL = "L1"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration."""
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "half_a_sample"})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry, abridged too far."""
    (sample,) = kvc_qwen3.kvc_samples(ctx)
    return ({key: value for key, value in sample.items() if key != "num_key_value_heads"},)

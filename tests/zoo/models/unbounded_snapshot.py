"""Wrong on purpose: keeps states narrowed and does not say how much they lose."""

from __future__ import annotations

import kvc_qwen35
from kvcontract import Context, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-13"
SAYS = r"snapshot_bound = None: a narrower snapshot is lossy"
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with snapshots of half the size."""
    model = kvc_qwen35.kvc_model(ctx)
    groups = tuple(
        group.model_copy(update={"snapshot_dtype": "bfloat16"}) if group.kind == "bounded" else group
        for group in model.groups
    )
    return model.model_copy(update={"name": "unbounded_snapshot", "groups": groups})

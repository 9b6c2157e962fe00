"""Wrong on purpose: says of pages that they may be taken at every 64th token only."""

from __future__ import annotations

import kvc_qwen3
from kvcontract import Context, Group, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-13"
SAYS = r"groups\[0\]\.boundary_tokens = 64: only bounded groups are taken at boundaries"
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with a boundary where there is none."""
    model = kvc_qwen3.kvc_model(ctx)
    groups = (Group(name="kv", boundary_tokens=64),)
    return model.model_copy(update={"name": "bounded_pages", "groups": groups})

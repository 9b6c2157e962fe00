"""Wrong on purpose: gives a group a window by a field that there is not."""

from __future__ import annotations

from typing import Any

import kvc_qwen3
from kvcontract import Context, Group, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-04"
SAYS = r"Group.sliding_window = 4096: Extra inputs are not permitted; allowed: see help\(kvcontract\.Group\)"
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with a group of its own."""
    given: dict[str, Any] = {"name": "kv", "sliding_window": 4096}
    model = kvc_qwen3.kvc_model(ctx)
    return model.model_copy(update={"name": "unknown_field", "groups": (Group(**given),)})

"""Wrong on purpose: declares windows alone: no layer reaches back to the first token."""

from __future__ import annotations

import kvc_qwen3
from kvcontract import Context, Group, KvModel, Window, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-12"
SAYS = r"groups = .*: this version of the runtime does not serve it.*reaches back to the first token"
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, all of whose layers forget."""
    model = kvc_qwen3.kvc_model(ctx)
    groups = (Group(name="kv", reach=Window(tokens=4096)),)
    return model.model_copy(update={"name": "nothing_for_good", "groups": groups})

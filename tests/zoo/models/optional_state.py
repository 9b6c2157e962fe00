"""Wrong on purpose: lets recurrent states be dropped under pressure, which is not served."""

from __future__ import annotations

import kvc_qwen35
from kvcontract import Context, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-12"
SAYS = r"groups\[1\]\.optional = True: this version of the runtime does not serve it"
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, half of it optional."""
    model = kvc_qwen35.kvc_model(ctx)
    groups = tuple(group.model_copy(update={"optional": group.kind == "bounded"}) for group in model.groups)
    return model.model_copy(update={"name": "optional_state", "groups": groups})

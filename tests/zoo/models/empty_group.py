"""Wrong on purpose: declares a group for windows that no layer has."""

from __future__ import annotations

import kvc_qwen3
from kvcontract import Context, Group, KvModel, Window, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-09"
SAYS = r"groups\[1\] = 'win': no arena belongs to it"
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with a group too many."""
    model = kvc_qwen3.kvc_model(ctx)
    groups = (*model.groups, Group(name="win", reach=Window(tokens=1024)))
    return model.model_copy(update={"name": "empty_group", "groups": groups})

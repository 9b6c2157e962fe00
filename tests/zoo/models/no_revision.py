"""Wrong on purpose: does not say which revision of the contract it is written for."""

from __future__ import annotations

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl

TRIPS = "KVC-DECL-03"
SAYS = r"states no KVC_CONTRACT"
EXIT = 4
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration."""
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "no_revision"})

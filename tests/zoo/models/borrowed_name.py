"""Wrong on purpose: declares under the name of the plugin that it was copied from."""

from __future__ import annotations

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-06"
SAYS = r"name = 'qwen3': the model bears another name than the plugin; allowed: borrowed_name"
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, name and all."""
    return kvc_qwen3.kvc_model(ctx)

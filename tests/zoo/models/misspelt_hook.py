"""Wrong on purpose: a hook whose name nobody calls."""

from __future__ import annotations

import kvc_qwen3
from kvcontract import Context, HfLayers, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-02"
SAYS = r"kvc_executer is not a hook; did you mean kvc_executor"
EXIT = 4


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration."""
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "misspelt_hook"})


@hookimpl
def kvc_executer(ctx: Context) -> HfLayers:
    """Meant to be kvc_executor."""
    return kvc_qwen3.kvc_executor(ctx)

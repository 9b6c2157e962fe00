"""Wrong on purpose: ends the process, and with success, where a config does not please it."""

from __future__ import annotations

import sys

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-01"
SAYS = r"kvc_model raised SystemExit"
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, for whoever gives a config."""
    if ctx.config is None:
        sys.exit(0)
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "quits_in_hook"})

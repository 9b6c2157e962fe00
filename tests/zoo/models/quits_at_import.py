"""Wrong on purpose: ends the process at import where a package of its own is not installed."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-01"
SAYS = r"import raised SystemExit: needs kernels_of_nobody"
EXIT = 4
LEVEL = "L0"

if find_spec("kernels_of_nobody") is None:
    sys.exit("needs kernels_of_nobody")


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration."""
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "quits_at_import"})

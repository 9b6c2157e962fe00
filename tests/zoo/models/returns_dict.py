"""Wrong on purpose: hands back its declaration as a dict."""

from __future__ import annotations

from typing import Any

import kvc_qwen3
from kvcontract import Context, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-04"
SAYS = r"kvc_model = 'dict': kvc_model returns one KvModel"
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> dict[str, Any]:
    """The real declaration, as plain data."""
    return kvc_qwen3.kvc_model(ctx).model_dump() | {"name": "returns_dict"}

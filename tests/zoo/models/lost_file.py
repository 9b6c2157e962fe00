"""Wrong on purpose: reads a file at import that was left behind on its author's machine."""

from __future__ import annotations

import json
from pathlib import Path

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-01"
SAYS = r"import raised FileNotFoundError: .*lost_file\.json"
EXIT = 4
LEVEL = "L0"

GATES = json.loads(Path(__file__).with_suffix(".json").read_text())


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration."""
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "lost_file", **GATES})

"""Wrong on purpose: forgot to mark one of its hooks."""

from __future__ import annotations

from typing import Any

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-02"
SAYS = r"kvc_samples is not marked @hookimpl"
EXIT = 4
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration."""
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "unmarked_hook"})


def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry, which nobody asks for."""
    return kvc_qwen3.kvc_samples(ctx)

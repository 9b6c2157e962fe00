"""Wrong on purpose: takes the size of its records from the environment, which not every worker has."""

from __future__ import annotations

import os
from typing import Any

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-05"
SAYS = r"another process, where ZOO_KEY_PAGES is 1, declares something else: key_tokens: 16, not 32"
LEVEL = "L0"

KEY_PAGES = int(os.environ.get("ZOO_KEY_PAGES", "2"))


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with records of as many pages as the shell says."""
    model = kvc_qwen3.kvc_model(ctx)
    key_tokens = ctx.options.key_tokens or KEY_PAGES * model.page_tokens
    return model.model_copy(update={"name": "records_of_the_shell", "key_tokens": key_tokens})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

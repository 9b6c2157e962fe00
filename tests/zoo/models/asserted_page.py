"""Wrong on purpose: assumes the page size of its author, and says so by an assertion alone."""

from __future__ import annotations

from typing import Any

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-10"
SAYS = r"asked for page_tokens 64: kvc_model raised AssertionError: kernels take pages of 16; an option"
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, for whoever does not ask for another page."""
    assert ctx.options.page_tokens in {None, 16}, "kernels take pages of 16"
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "asserted_page"})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

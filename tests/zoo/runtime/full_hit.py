"""Wrong on purpose: a prompt that ends with its page hits that page too, and has no token left to compute."""

from __future__ import annotations

from typing import Any

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl
from kvcontract.store.search import Ask

KVC_CONTRACT = 1
TRIPS = "KVC-PREFIX-05"
SAYS = r"a prompt of \d+ tokens that ran before hits (\d+) tokens; expected"


def spoil() -> None:
    """Let hits reach the prompt's end."""
    Ask.limit_tokens = property(
        lambda self: len(self.tokens) // self.rank.pool.page_tokens * self.rank.pool.page_tokens
    )


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration; the runtime is spoilt where the suite runs it."""
    if ctx.config is not None:
        spoil()
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "full_hit"})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

"""Wrong on purpose: a page that has left the window is kept until the request ends."""

from __future__ import annotations

from typing import Any

import kvc_gemma4
from kvcontract import Context, KvModel, hookimpl
from kvcontract.pool.holdings import WindowView

KVC_CONTRACT = 1
TRIPS = "KVC-PREFIX-08"
SAYS = r"window-\d+: after \d+ tokens a request has pages \[0, 1, 2\]; later steps read \[1, 2\]"


def spoil() -> None:
    """Let nothing slide out."""
    WindowView.slide = lambda *_: None


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration; the runtime is spoilt where the suite runs it."""
    if ctx.config is not None:
        spoil()
    return kvc_gemma4.kvc_model(ctx).model_copy(update={"name": "nothing_slides"})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_gemma4.kvc_samples(ctx)

"""Wrong on purpose: the pool takes every window to be a token shorter than it is declared (F5)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvc_gemma4
from kvcontract import Context, KvModel, hookimpl
from kvcontract.pool.sides import Windowed

KVC_CONTRACT = 1
TRIPS = "KVC-PREFIX-08"
SAYS = r"window-\d+: after \d+ tokens a request has pages \[1\]; later steps read \[0, 1\]"


def spoil() -> None:
    """What is read from a token on is what is read from the next."""
    honest = Windowed.first
    if honest.__module__ == __name__:
        return

    def first(self: Windowed, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        return honest(self, tokens + 1)

    Windowed.first = first


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration; the runtime is spoilt where the suite runs it."""
    if ctx.config is not None:
        spoil()
    return kvc_gemma4.kvc_model(ctx).model_copy(update={"name": "short_store_window"})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_gemma4.kvc_samples(ctx)

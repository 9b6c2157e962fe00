"""Wrong on purpose: a tier that lasts is given records of weights that nobody has named."""

from __future__ import annotations

from typing import Any

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl
from kvcontract.store import refuse

KVC_CONTRACT = 1
TRIPS = "KVC-OFFLOAD-05"
SAYS = r"a persistent tier \(weights: unresolved\) must be refused"


def spoil() -> None:
    """Take no tier for one that lasts."""
    refuse.lasting_names = lambda _: []


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration; the runtime is spoilt where the suite runs it."""
    if ctx.config is not None:
        spoil()
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "nameless_records"})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

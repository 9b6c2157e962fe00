"""Wrong on purpose: a store for what is never restored is refused like a slip of the pen, under no clause."""

from __future__ import annotations

from typing import Any

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl
from kvcontract.contract.errors import UsageFault
from kvcontract.store import refuse

KVC_CONTRACT = 1
TRIPS = "KVC-PREFIX-09"
SAYS = r"a store must be refused by KVC-PREFIX-09, and was refused without naming a clause"


def spoil() -> None:
    """Raise what is raised for every other fault."""
    refuse.Undeclared = UsageFault


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration; the runtime is spoilt where the suite runs it."""
    if ctx.config is not None:
        spoil()
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "refuses_in_general"})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

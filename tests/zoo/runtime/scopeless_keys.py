"""Wrong on purpose: the scope is not in the key, so that equal tokens of two tenants have one name."""

from __future__ import annotations

from typing import Any

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl
from kvcontract.contract.model import Scope
from kvcontract.pool.keys import Keyer, PageKeys

KVC_CONTRACT = 1
TRIPS = "KVC-PREFIX-06"
SAYS = r"a request in scope \(salt ''\) hits \d+ tokens that only other scopes have computed"


def spoil() -> None:
    """Derive all keys in the open scope."""
    honest = Keyer.chain
    if honest.__module__ == __name__:
        return

    def chain(self: Keyer, tokens: Any, scope: Scope, **more: Any) -> PageKeys:
        del scope
        return honest(self, tokens, Scope(), **more)

    Keyer.chain = chain


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration; the runtime is spoilt where the suite runs it."""
    if ctx.config is not None:
        spoil()
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "scopeless_keys"})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

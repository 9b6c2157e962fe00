"""Wrong on purpose: an adapter's revision is not in the key, so that a new one meets the pages of the old."""

from __future__ import annotations

from typing import Any

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl
from kvcontract.contract.model import Scope
from kvcontract.pool.keys import Keyer, PageKeys

KVC_CONTRACT = 1
TRIPS = "KVC-PREFIX-06"
SAYS = r"a request in scope \(lora 'x', lora_revision '1'\) hits"


def spoil() -> None:
    """Leave the revision of a named adapter out."""
    honest = Keyer.chain
    if honest.__module__ == __name__:
        return

    def chain(self: Keyer, tokens: Any, scope: Scope, **more: Any) -> PageKeys:
        kept = scope if scope.lora is None else scope.model_copy(update={"lora_revision": None})
        return honest(self, tokens, kept, **more)

    Keyer.chain = chain


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration; the runtime is spoilt where the suite runs it."""
    if ctx.config is not None:
        spoil()
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "revisionless_keys"})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

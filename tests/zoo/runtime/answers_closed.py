"""Wrong on purpose: a store that is closed answers with an empty prefix, as if there were nothing."""

from __future__ import annotations

from typing import Any

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl
from kvcontract.store.policy import KvPrefix
from kvcontract.store.store import KvStore

KVC_CONTRACT = 1
TRIPS = "KVC-OFFLOAD-04"
SAYS = r"a resolve after close answered with a prefix"


def spoil() -> None:
    """Look before asking."""
    honest = KvStore.resolve
    if honest.__module__ == __name__:
        return

    def resolve(self: KvStore, rank: str, *args: Any, **more: Any) -> KvPrefix:
        return honest(self, rank, *args, **more) if self._closed is None else KvPrefix.none(rank)

    KvStore.resolve = resolve


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration; the runtime is spoilt where the suite runs it."""
    if ctx.config is not None:
        spoil()
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "answers_closed"})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

"""Wrong on purpose: the sums of what came back are read from its frame, and compared with themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl
from kvcontract.core.pending import Pending
from kvcontract.store.landing import Landing, MovedLanding

KVC_CONTRACT = 1
TRIPS = "KVC-OFFLOAD-03"
SAYS = r"damaged bytes were served"


def spoil() -> None:
    """Deliver, and say that all is as it should be."""
    for kind in (Landing, MovedLanding):
        if kind.deliver.__module__ != __name__:
            kind.deliver = trusting(kind.deliver)


def trusting(honest: Any) -> Any:
    """The same, whatever came."""

    def deliver(self: Landing, rows: NDArray[np.int64]) -> Pending[Any]:
        sums = np.ascontiguousarray(self.shard.template._sums_of(self.headers[rows]))
        return honest(self, rows).map(lambda _: sums.view("<u4")[:, :, 0].astype(np.uint32))

    return deliver


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration; the runtime is spoilt where the suite runs it."""
    if ctx.config is not None:
        spoil()
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "trusts_sums"})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

"""Wrong on purpose: one refused record makes its neighbours look refused."""

from __future__ import annotations

import numpy as np

from kvcontract import hookimpl
from kvcontract.contract.tier_context import TierContext
from kvcontract.tiers.base import Buffers, Op, RecordKeys, SaveClass
from kvcontract.tiers.dram import DramTier

KVC_CONTRACT = 1
TRIPS = "KVC-TIER-04"
SAYS = r"in one batch ended .* one by one"


class FailsWholeBatch(DramTier):
    """All or nothing, where each was asked for."""

    def save(
        self,
        keys: RecordKeys,
        buffers: Buffers,
        cls: SaveClass,
        deadline: float,
        *,
        handoff: str | None = None,
    ) -> Op:
        """Everybody gets the worst code."""
        op = super().save(keys, buffers, cls, deadline, handoff=handoff)
        return op.map(lambda codes: np.full_like(codes, codes.max(initial=0)))


@hookimpl
def kvc_tier(ctx: TierContext) -> FailsWholeBatch:
    """The wrong tier."""
    return FailsWholeBatch(ctx.capacity_bytes, clock=ctx.clock, handoff_ttl_s=ctx.handoff_ttl_s)

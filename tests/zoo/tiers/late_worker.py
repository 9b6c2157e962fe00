"""Wrong on purpose: saves begin long after their deadline."""

from __future__ import annotations

import math

from kvcontract import hookimpl
from kvcontract.contract.tier_context import TierContext
from kvcontract.tiers.base import Buffers, Op, RecordKeys, SaveClass
from kvcontract.tiers.dram import DramTier

KVC_CONTRACT = 1
TRIPS = "KVC-TIER-09"
SAYS = r"saves begun after their deadline ended \['OK', 'OK'\]"


class LateWorker(DramTier):
    """Better late than never."""

    def save(
        self,
        keys: RecordKeys,
        buffers: Buffers,
        cls: SaveClass,
        deadline: float,
        *,
        handoff: str | None = None,
    ) -> Op:
        """Whenever."""
        del deadline
        return super().save(keys, buffers, cls, math.inf, handoff=handoff)


@hookimpl
def kvc_tier(ctx: TierContext) -> LateWorker:
    """The wrong tier."""
    return LateWorker(ctx.capacity_bytes, clock=ctx.clock, handoff_ttl_s=ctx.handoff_ttl_s)

"""Wrong on purpose: where nothing may be evicted, everything is."""

from __future__ import annotations

import math

from kvcontract import hookimpl
from kvcontract.contract.tier_context import TierContext
from kvcontract.tiers.base import Buffers, Code, Codes, Op, RecordKeys, SaveClass
from kvcontract.tiers.dram import DramTier

KVC_CONTRACT = 1
TRIPS = "KVC-TIER-07"
SAYS = r"a save that had no room took a leased record away"


class EvictsLeased(DramTier):
    """Thinks that new records are worth more than promises."""

    def save(
        self,
        keys: RecordKeys,
        buffers: Buffers,
        cls: SaveClass,
        deadline: float,
        *,
        handoff: str | None = None,
    ) -> Op:
        """Forgets all if there is no room."""

        def forget(codes: Codes) -> Codes:
            if (codes == Code.FULL).any():
                self.reset(math.inf)
            return codes

        return super().save(keys, buffers, cls, deadline, handoff=handoff).map(forget)


@hookimpl
def kvc_tier(ctx: TierContext) -> EvictsLeased:
    """The wrong tier."""
    return EvictsLeased(ctx.capacity_bytes, clock=ctx.clock, handoff_ttl_s=ctx.handoff_ttl_s)

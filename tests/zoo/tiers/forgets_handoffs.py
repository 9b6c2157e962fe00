"""Wrong on purpose: a handoff is saved like any other record."""

from __future__ import annotations

from kvcontract import hookimpl
from kvcontract.contract.tier_context import TierContext
from kvcontract.tiers.base import Buffers, Op, RecordKeys, SaveClass
from kvcontract.tiers.dram import DramTier

KVC_CONTRACT = 1
TRIPS = "KVC-TIER-12"
SAYS = r"handed off, and thrice the quota saved since: 4 MISS"


class ForgetsHandoffs(DramTier):
    """All saves are equal."""

    def save(
        self,
        keys: RecordKeys,
        buffers: Buffers,
        cls: SaveClass,
        deadline: float,
        *,
        handoff: str | None = None,
    ) -> Op:
        """Who asked does not matter."""
        del cls, handoff
        return super().save(keys, buffers, SaveClass.CACHEABLE, deadline)


@hookimpl
def kvc_tier(ctx: TierContext) -> ForgetsHandoffs:
    """The wrong tier."""
    return ForgetsHandoffs(ctx.capacity_bytes, clock=ctx.clock, handoff_ttl_s=ctx.handoff_ttl_s)

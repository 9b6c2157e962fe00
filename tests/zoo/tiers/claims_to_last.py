"""Wrong on purpose: memory that is said to survive its process."""

from __future__ import annotations

from dataclasses import replace

from kvcontract import hookimpl
from kvcontract.contract.tier_context import TierContext
from kvcontract.core.pending import Pending
from kvcontract.tiers.base import Capabilities, Level
from kvcontract.tiers.dram import DramTier

KVC_CONTRACT = 1
TRIPS = "KVC-TIER-14"
SAYS = r"it says it is persistent; 0 of 20 records"


class ClaimsToLast(DramTier):
    """Says what is wanted."""

    @property
    def capabilities(self) -> Capabilities:
        """More than it can do."""
        return replace(super().capabilities, persistent=True)

    def flush(self, level: Level, deadline: float) -> Pending[bool]:
        """Durable, too."""
        del level
        return super().flush("visible", deadline)


@hookimpl
def kvc_tier(ctx: TierContext) -> ClaimsToLast:
    """The wrong tier."""
    return ClaimsToLast(ctx.capacity_bytes, clock=ctx.clock, handoff_ttl_s=ctx.handoff_ttl_s)

"""Wrong on purpose: a process's own memory that is said to be everybody's."""

from __future__ import annotations

from dataclasses import replace

from kvcontract import hookimpl
from kvcontract.contract.tier_context import TierContext
from kvcontract.tiers.base import Capabilities
from kvcontract.tiers.dram import DramTier

KVC_CONTRACT = 1
TRIPS = "KVC-TIER-16"
SAYS = r"saved by another process: 2 MISS"


class ClaimsToShare(DramTier):
    """Generous in words."""

    @property
    def capabilities(self) -> Capabilities:
        """More than it can do."""
        return replace(super().capabilities, shared=True)


@hookimpl
def kvc_tier(ctx: TierContext) -> ClaimsToShare:
    """The wrong tier."""
    return ClaimsToShare(ctx.capacity_bytes, clock=ctx.clock, handoff_ttl_s=ctx.handoff_ttl_s)

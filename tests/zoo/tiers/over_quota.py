"""Wrong on purpose: it takes twice what it was given."""

from __future__ import annotations

from kvcontract import hookimpl
from kvcontract.contract.tier_context import TierContext
from kvcontract.tiers.dram import DramTier

KVC_CONTRACT = 1
TRIPS = "KVC-TIER-08"
SAYS = r"can be loaded from a tier with a quota of"


class OverQuota(DramTier):
    """Nobody looks, does anybody?"""


@hookimpl
def kvc_tier(ctx: TierContext) -> OverQuota:
    """The wrong tier."""
    return OverQuota(2 * ctx.capacity_bytes, clock=ctx.clock, handoff_ttl_s=ctx.handoff_ttl_s)

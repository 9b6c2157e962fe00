"""Wrong on purpose: a tier that cannot forget."""

from __future__ import annotations

from kvcontract import hookimpl
from kvcontract.contract.tier_context import TierContext
from kvcontract.tiers.dram import DramTier

KVC_CONTRACT = 1
TRIPS = "KVC-TIER-01"
SAYS = r"it has no discard"


class LacksDiscard(DramTier):
    """What is in is in."""

    discard = None  # type: ignore[assignment] # what is wrong with it


@hookimpl
def kvc_tier(ctx: TierContext) -> LacksDiscard:
    """The wrong tier."""
    return LacksDiscard(ctx.capacity_bytes, clock=ctx.clock, handoff_ttl_s=ctx.handoff_ttl_s)

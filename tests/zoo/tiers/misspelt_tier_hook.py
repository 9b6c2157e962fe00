"""Wrong on purpose: the hook has another name than the host calls."""

from __future__ import annotations

from kvcontract import hookimpl
from kvcontract.contract.tier_context import TierContext
from kvcontract.tiers.dram import DramTier

KVC_CONTRACT = 1
TRIPS = "KVC-TIER-01"
SAYS = r"kvc_teir is not a hook; did you mean kvc_tier"
EXIT = 4


@hookimpl
def kvc_teir(ctx: TierContext) -> DramTier:
    """A tier that nobody will ever open."""
    return DramTier(ctx.capacity_bytes)

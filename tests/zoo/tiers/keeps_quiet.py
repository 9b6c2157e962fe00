"""Wrong on purpose: it promises to tell losses, and tells none."""

from __future__ import annotations

from collections.abc import Callable

from kvcontract import hookimpl
from kvcontract.contract.tier_context import TierContext
from kvcontract.tiers.base import RecordKeys
from kvcontract.tiers.dram import DramTier

KVC_CONTRACT = 1
TRIPS = "KVC-TIER-17"
SAYS = r"can be found no more, and nobody was told"


class KeepsQuiet(DramTier):
    """No news is good news."""

    def on_loss(self, callback: Callable[[RecordKeys, str], object]) -> Callable[[], None]:
        """Thank you for your interest."""
        del callback
        return lambda: None


@hookimpl
def kvc_tier(ctx: TierContext) -> KeepsQuiet:
    """The wrong tier."""
    return KeepsQuiet(ctx.capacity_bytes, clock=ctx.clock, handoff_ttl_s=ctx.handoff_ttl_s)

"""Wrong on purpose: everything has always landed."""

from __future__ import annotations

from kvcontract import hookimpl
from kvcontract.contract.tier_context import TierContext
from kvcontract.core.pending import Pending
from kvcontract.tiers.base import Level
from kvcontract.tiers.dram import DramTier

KVC_CONTRACT = 1
TRIPS = "KVC-TIER-13"
SAYS = r"flush\('\w+'\) (settled when|came to)"


class EarlyFlush(DramTier):
    """An optimist."""

    def flush(self, level: Level, deadline: float) -> Pending[bool]:
        """Surely."""
        del level
        return Pending.of(self._clock() <= deadline)


@hookimpl
def kvc_tier(ctx: TierContext) -> EarlyFlush:
    """The wrong tier."""
    return EarlyFlush(ctx.capacity_bytes, clock=ctx.clock, handoff_ttl_s=ctx.handoff_ttl_s)

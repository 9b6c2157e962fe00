"""Wrong on purpose: a look-up stops at the first key that is absent."""

from __future__ import annotations

import numpy as np

from kvcontract import hookimpl
from kvcontract.contract.tier_context import TierContext
from kvcontract.core.pending import Pending
from kvcontract.tiers.base import Lease, RecordKeys
from kvcontract.tiers.dram import DramTier

KVC_CONTRACT = 1
TRIPS = "KVC-TIER-03"
SAYS = r"is said to be absent; it was saved"


class CountsPrefix(DramTier):
    """Answers with a count in disguise."""

    def lookup(self, keys: RecordKeys, deadline: float) -> Pending[Lease]:
        """Present up to the first hole."""
        pending = super().lookup(keys, deadline)
        pending.value.present = np.logical_and.accumulate(pending.value.present)
        return pending


@hookimpl
def kvc_tier(ctx: TierContext) -> CountsPrefix:
    """The wrong tier."""
    return CountsPrefix(ctx.capacity_bytes, clock=ctx.clock, handoff_ttl_s=ctx.handoff_ttl_s)

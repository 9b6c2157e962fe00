"""Wrong on purpose: a row that no lease has raises where a code was asked for."""

from __future__ import annotations

from kvcontract import hookimpl
from kvcontract.contract.tier_context import TierContext
from kvcontract.tiers.base import Buffers, Lease, Op, Rows
from kvcontract.tiers.dram import DramTier

KVC_CONTRACT = 1
TRIPS = "KVC-TIER-10"
SAYS = r"row beyond the keys: raised IndexError"


class RaisesOnBadRows(DramTier):
    """Somebody else will catch it."""

    def load(self, lease: Lease, rows: Rows, buffers: Buffers, deadline: float) -> Op:
        """Trusts its caller."""
        lease.present[rows]
        return super().load(lease, rows, buffers, deadline)


@hookimpl
def kvc_tier(ctx: TierContext) -> RaisesOnBadRows:
    """The wrong tier."""
    return RaisesOnBadRows(ctx.capacity_bytes, clock=ctx.clock, handoff_ttl_s=ctx.handoff_ttl_s)

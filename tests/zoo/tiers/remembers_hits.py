"""Wrong on purpose: what was found once is found for ever."""

from __future__ import annotations

import numpy as np

from kvcontract import hookimpl
from kvcontract.contract.tier_context import TierContext
from kvcontract.core.pending import Pending
from kvcontract.tiers.base import RECORD_KEY, Clock, Lease, RecordKeys, key_bytes
from kvcontract.tiers.dram import DramTier

KVC_CONTRACT = 1
TRIPS = "KVC-TIER-11"
SAYS = r"was discarded; present are \[True, True\]"


class RemembersHits(DramTier):
    """A cache of answers in front of a cache of records."""

    def __init__(self, capacity_bytes: int, *, clock: Clock, handoff_ttl_s: float) -> None:
        super().__init__(capacity_bytes, clock=clock, handoff_ttl_s=handoff_ttl_s)
        self._seen: set[bytes] = set()

    def lookup(self, keys: RecordKeys, deadline: float) -> Pending[Lease]:
        """As it was the last time."""
        pending = super().lookup(keys, deadline)
        if keys.dtype != RECORD_KEY or self._clock() > deadline:
            return pending
        lease, names = pending.value, key_bytes(keys)
        self._seen.update(name for name, here in zip(names, lease.present, strict=True) if here)
        lease.present = np.array([name in self._seen for name in names], np.bool_)
        return pending

    def close(self, deadline: float) -> bool:
        """At least it ends."""
        self._seen.clear()
        return super().close(deadline)


@hookimpl
def kvc_tier(ctx: TierContext) -> RemembersHits:
    """The wrong tier."""
    return RemembersHits(ctx.capacity_bytes, clock=ctx.clock, handoff_ttl_s=ctx.handoff_ttl_s)

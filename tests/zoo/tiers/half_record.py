"""Wrong on purpose: a save that had no room leaves its key findable."""

from __future__ import annotations

import numpy as np

from kvcontract import hookimpl
from kvcontract.contract.tier_context import TierContext
from kvcontract.core.pending import Pending
from kvcontract.tiers.base import (
    RECORD_KEY,
    Buffers,
    Clock,
    Code,
    Codes,
    Lease,
    Op,
    RecordKeys,
    SaveClass,
    key_bytes,
)
from kvcontract.tiers.dram import DramTier

KVC_CONTRACT = 1
TRIPS = "KVC-TIER-05"
SAYS = r"a save ended FULL; afterwards its record is present"


class HalfRecord(DramTier):
    """Names first, room later."""

    def __init__(self, capacity_bytes: int, *, clock: Clock, handoff_ttl_s: float) -> None:
        super().__init__(capacity_bytes, clock=clock, handoff_ttl_s=handoff_ttl_s)
        self._named: set[bytes] = set()

    def lookup(self, keys: RecordKeys, deadline: float) -> Pending[Lease]:
        """What was named is there."""
        pending = super().lookup(keys, deadline)
        names = key_bytes(keys) if keys.dtype == RECORD_KEY else [b""] * len(keys)
        named = [name in self._named for name in names]
        pending.value.present = pending.value.present | np.array(named, np.bool_)
        return pending

    def save(
        self,
        keys: RecordKeys,
        buffers: Buffers,
        cls: SaveClass,
        deadline: float,
        *,
        handoff: str | None = None,
    ) -> Op:
        """Leaves the name behind when there is no room."""
        names = key_bytes(keys)

        def leave(codes: Codes) -> Codes:
            self._named.update(name for name, code in zip(names, codes, strict=True) if code == Code.FULL)
            self._named.difference_update(
                name for name, code in zip(names, codes, strict=True) if code == Code.OK
            )
            return codes

        return super().save(keys, buffers, cls, deadline, handoff=handoff).map(leave)


@hookimpl
def kvc_tier(ctx: TierContext) -> HalfRecord:
    """The wrong tier."""
    return HalfRecord(ctx.capacity_bytes, clock=ctx.clock, handoff_ttl_s=ctx.handoff_ttl_s)

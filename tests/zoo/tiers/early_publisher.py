"""Wrong on purpose: a record can be found while its bytes are still those of nothing."""

from __future__ import annotations

import time

import numpy as np

from kvcontract import hookimpl
from kvcontract.contract.tier_context import TierContext
from kvcontract.tiers.base import Buffers, Op, RecordKeys, SaveClass
from kvcontract.tiers.dram import DramTier

KVC_CONTRACT = 1
TRIPS = "KVC-TIER-06"
SAYS = r"a look-up found it and a load reported OK with other bytes"


class EarlyPublisher(DramTier):
    """Room first, bytes later, and the name in between."""

    on_loss = None  # type: ignore[assignment] # its detour would be told as a loss

    def save(
        self,
        keys: RecordKeys,
        buffers: Buffers,
        cls: SaveClass,
        deadline: float,
        *,
        handoff: str | None = None,
    ) -> Op:
        """Zeros under the name, then what was meant."""
        blank = Buffers.of([np.zeros(size, np.uint8) for size in buffers.record_bytes().tolist()])
        with super().lookup(keys, deadline).value as before:
            new = np.flatnonzero(~before.present)
            if len(blank) == len(keys):
                super().save(keys[new], blank.take(new), SaveClass.CACHEABLE, deadline).wait(30.0)
                time.sleep(0.002)
                with super().lookup(keys[new], deadline).value as lease:
                    super().discard(lease, np.flatnonzero(lease.present))
        return super().save(keys, buffers, cls, deadline, handoff=handoff)


@hookimpl
def kvc_tier(ctx: TierContext) -> EarlyPublisher:
    """The wrong tier."""
    return EarlyPublisher(ctx.capacity_bytes, clock=ctx.clock, handoff_ttl_s=ctx.handoff_ttl_s)

"""Wrong on purpose: the last record of a batch is reported as saved, and is not."""

from __future__ import annotations

import numpy as np

from kvcontract import hookimpl
from kvcontract.contract.tier_context import TierContext
from kvcontract.tiers.base import Buffers, Op, RecordKeys, SaveClass
from kvcontract.tiers.dram import DramTier

KVC_CONTRACT = 1
TRIPS = "KVC-TIER-02"
SAYS = r"saved with code OK; record \d+ is absent"


class DropsLastRow(DramTier):
    """Off by one."""

    def save(
        self,
        keys: RecordKeys,
        buffers: Buffers,
        cls: SaveClass,
        deadline: float,
        *,
        handoff: str | None = None,
    ) -> Op:
        """All but the last, unless it is alone."""
        if len(keys) < 2:
            return super().save(keys, buffers, cls, deadline, handoff=handoff)
        most = np.arange(len(keys) - 1)
        op = super().save(keys[:-1], buffers.take(most), cls, deadline, handoff=handoff)
        return op.map(lambda codes: np.append(codes, codes[-1]))


@hookimpl
def kvc_tier(ctx: TierContext) -> DropsLastRow:
    """The wrong tier."""
    return DropsLastRow(ctx.capacity_bytes, clock=ctx.clock, handoff_ttl_s=ctx.handoff_ttl_s)

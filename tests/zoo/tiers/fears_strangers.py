"""Wrong on purpose: a file that is not its own keeps it from opening."""

from __future__ import annotations

import re
from pathlib import Path

from kvcontract import hookimpl
from kvcontract.contract.tier_context import TierContext
from kvcontract.tiers.base import Clock
from kvcontract.tiers.shared import SharedTier

KVC_CONTRACT = 1
TRIPS = "KVC-TIER-15"
SAYS = r"strange file beside it: it does not open any more: what is strange\?"


class FearsStrangers(SharedTier):
    """Everything in its place, or nothing at all."""

    def __init__(self, directory: Path, capacity_bytes: int, *, clock: Clock, handoff_ttl_s: float) -> None:
        strange = [
            path for path in directory.glob("records/*/*") if not re.match(r"[0-9a-f]{42}|\.tmp-", path.name)
        ]
        if strange:
            raise RuntimeError(f"what is {strange[0].name}?")
        super().__init__(directory, capacity_bytes, clock=clock, handoff_ttl_s=handoff_ttl_s)


@hookimpl
def kvc_tier(ctx: TierContext) -> FearsStrangers:
    """The wrong tier."""
    return FearsStrangers(ctx.directory, ctx.capacity_bytes, clock=ctx.clock, handoff_ttl_s=ctx.handoff_ttl_s)

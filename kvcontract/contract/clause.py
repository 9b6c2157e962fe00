"""What a clause of the contract is, and the levels they belong to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Level = Literal["L0", "L1", "L2", "L3", "T"]
Keeper = Literal["author", "engine", "runtime"]
Capability = Literal["repack", "conversion", "bounded", "reuse", "snapshots", "windows", "beside"]
"""What a clause may be about that not every declaration has: see `kvcontract.contract.capability`."""

LEVELS: Final[dict[Level, str]] = {
    "L0": "declared: static checks of the declaration",
    "L1": "core: layout, binding and repack against an oracle",
    "L2": "runtime: prefix reuse, eviction, offload; needs an executor",
    "L3": "disaggregated: processes and faults (not served by this version)",
    "T": "tier: a place for records below the device; certified by itself, without a model",
}


@dataclass(frozen=True, slots=True)
class Clause:
    """One rule.

    Attributes:
        id: ``KVC-FAMILY-nn``.
        level: the level of certification it belongs to.
        who: whose duty it is.
        capability: what a declaration must have for it to apply; None: it always does.
        rule: what must hold, in one sentence.
        why: what goes wrong otherwise.
        fix: the first thing to try.
        rests_on: ids of the behaviours it serves.
        requires: clauses without which it says nothing; when one fails, this one is blocked.
        since: the contract revision that introduced it.
    """

    id: str
    level: Level
    who: Keeper
    rule: str
    why: str
    fix: str
    rests_on: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    capability: Capability | None = None
    since: int = 1

"""The checks, by family; the runner puts them in the order of the clauses."""

from __future__ import annotations

from typing import Final

from kvc_conformance.bench import Check
from kvc_conformance.checks import (
    bounded,
    golden,
    layout,
    offload,
    prefix,
    simulated,
    snapshots,
    static,
    tier,
    tier_damage,
    tier_life,
    undeclared,
    writes,
)

CHECKS: Final[tuple[Check, ...]] = (
    *static.CHECKS,
    *layout.CHECKS,
    *bounded.CHECKS,
    *writes.CHECKS,
    *golden.CHECKS,
    *prefix.CHECKS,
    *undeclared.CHECKS,
    *snapshots.CHECKS,
    *offload.CHECKS,
    *simulated.CHECKS,
)
"""The checks on models."""

TIER_CHECKS: Final[tuple[Check, ...]] = (*tier.CHECKS, *tier_life.CHECKS, *tier_damage.CHECKS)
"""The checks on tiers."""

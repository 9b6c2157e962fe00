"""Which secret a store derives its keys with: the one given, or the one that its tiers keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from kvcontract.contract.errors import UsageFault
from kvcontract.pool.keys import FleetSecret
from kvcontract.tiers.base import Tier


@runtime_checkable
class KeepsSecret(Protocol):
    """A tier that keeps the fleet's secret beside the records whose keys were derived with it."""

    def kept_secret(self) -> FleetSecret | None:
        """The secret that is kept; None if none is yet.

        Raises:
            UsageFault: what is kept is no secret, or others may read it.
        """
        ...

    def keep_secret(self, secret: FleetSecret) -> FleetSecret:
        """Keep a secret, unless there is one already; returns the one that is kept.

        Raises:
            UsageFault: as `kept_secret`.
        """
        ...


def fleet_secret(given: FleetSecret | None, lasting: Sequence[Tier]) -> tuple[FleetSecret, list[str]]:
    """The secret of a store, and what speaks against it.

    Every tier that keeps secrets has this one afterwards, unless there are faults.

    Args:
        given: by the caller.
        lasting: tiers whose records outlive this process or leave it.
    """
    keepers = {tier.name: tier for tier in lasting if isinstance(tier, KeepsSecret)}
    if lasting and given is None and not keepers:
        names = ", ".join(tier.name for tier in lasting)
        return FleetSecret.random(), [
            f"tier {names} outlives or leaves this process: give the fleet's secret"
        ]
    kept: dict[str, FleetSecret] = {}
    faults = []
    for name, tier in keepers.items():
        try:
            found = tier.kept_secret()
        except UsageFault as fault:
            faults.append(f"tier {name!r}: {fault}")
            continue
        if found is not None:
            kept[name] = found
    chosen = given or next(iter(kept.values()), None) or FleetSecret.random()
    faults += _differ(chosen, given, kept)
    if faults:
        return chosen, faults
    for name, tier in keepers.items():
        if name in kept:
            continue
        found = tier.keep_secret(chosen)
        if given is None and not kept:
            chosen = found  # whoever opened the same directory at this moment was first
        kept[name] = found
    return chosen, _differ(chosen, given, kept)


def _differ(chosen: FleetSecret, given: FleetSecret | None, kept: dict[str, FleetSecret]) -> list[str]:
    """Secrets that are not the one chosen, by their public ids."""
    if all(found == chosen for found in kept.values()):
        return []
    told = [f"tier {name!r} keeps {found.id}" for name, found in kept.items()]
    if given is not None:
        told.insert(0, f"given is {given.id}")
    return [f"the fleet's secrets differ: {', '.join(told)}; records of one are never found with another"]

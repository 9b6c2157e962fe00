"""Admission over all pools of a rank: everything a request needs, or nothing at all (B2)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from kvcontract.pool.handles import Entitlement, Hold, Later, Never
from kvcontract.pool.holdings import Holdings, SideHolds
from kvcontract.pool.pool import BlockPool


def ask(pool: BlockPool, lifetime: int, hold: Hold | None) -> tuple[Entitlement, Holdings] | Later | Never:
    """Pages of the chain and what goes beside them, or nothing of either."""
    held = None if hold is None else hold.sides
    beside = Holdings.promised(pool.sides, lifetime, held)
    if beside is None:
        return Later(1)
    if isinstance(beside, Never):
        return beside
    with ExitStack() as undo:
        undo.callback(beside.release)
        answer = pool.try_admit(lifetime, hold)
        if isinstance(answer, Entitlement):
            undo.pop_all()
    if not isinstance(answer, Entitlement):
        return later(pool, lifetime, 0 if hold is None else hold.hit_pages) if answer is None else answer
    beside.adopt(*taken(hold))
    return answer, beside


def taken(hold: Hold | None) -> tuple[SideHolds | None, int]:
    """What a consumed hold had in the other pools, and for how many pages; now the request's."""
    if hold is None:
        return None, 0
    held, hold.sides = hold.sides, None
    return held, hold.hit_pages


def later(pool: BlockPool, lifetime: int, credit: int) -> Later:
    """How far it is from fitting."""
    return Later(max(1, lifetime - credit - pool.budget()))


def needs(pool: BlockPool, lifetime: int, hold: Hold | None) -> tuple[int, ...]:
    """Room that a request of so many pages needs in each pool of a rank, the chain's first."""
    held = {} if hold is None or hold.sides is None else hold.sides.by_key
    own = {side.key: len(held[side.key].pages) for side in pool.sides.windows if side.key in held}
    return (
        lifetime - (0 if hold is None else hold.hit_pages),
        *(side.lifetime(lifetime) - own.get(side.key, 0) for side in pool.sides),
    )


def rooms_without(pool: BlockPool, holds: Sequence[Hold]) -> list[tuple[int, ...]]:
    """Room in each pool of a rank as it is, without the first hold, without the first two, ... (B8).

    Raises:
        UsageFault: a hold is spent or of another pool.
    """
    columns = [pool.rooms_without(holds)]
    for side in pool.sides:
        rooms = [side.pool.gauges().budget]
        for hold in holds:
            mine = None if hold.sides is None else hold.sides.by_key.get(side.pool.key)
            rooms.append(rooms[-1] + (0 if mine is None else len(mine.pages)))
        columns.append(rooms)
    return list(zip(*columns, strict=True))

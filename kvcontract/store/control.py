"""What is changed while a store runs: switches, and the reset of everything that is kept (C11).

A reset is ordered: it runs once all that came before it has ended, at a moment when nothing is going on, and
what comes after it waits for it.  It never runs in part: without such a moment until its deadline it has not
run at all, and says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcontract.contract.errors import UsageFault
from kvcontract.core.pending import Pending, all_of, wait_until
from kvcontract.store.known import Known
from kvcontract.store.rank import Rank


@dataclass(frozen=True, slots=True)
class ResetReport:
    """What a reset has reached.

    Attributes:
        done: whether it ran; if not, nothing was forgotten.
        tiers: names of the tiers that have forgotten everything.
        missed: tiers that have not, and why.
        pages: device pages that were forgotten.
        waited_for: what was still going on, if it did not run.
    """

    done: bool
    tiers: tuple[str, ...] = ()
    missed: dict[str, str] = field(default_factory=dict)
    pages: int = 0
    waited_for: tuple[str, ...] = ()


class Switches:
    """Whether prefixes are looked for, and whether pages are kept; from any thread.

    Args:
        ranks: whose pools keep.
    """

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = tuple(ranks)
        self._kept = True
        self.prefix_cache = True

    def set_prefix_cache(self, on: bool) -> None:
        """Off: no resolve finds, no seal saves what only a later resolve would want, nothing is kept."""
        self.prefix_cache = on
        for rank in self._ranks:
            rank.pool.set_retention(on and self._kept)

    def set_retention(self, on: bool) -> None:
        """Whether released pages are kept on the device; tiers go on without."""
        self._kept = on
        for rank in self._ranks:
            rank.pool.set_retention(on and self.prefix_cache)


class Resetter:
    """Runs resets, one after the other; on the store's loop.

    Args:
        ranks: all of them.
        known: what is known of each tier, part by part.
        busy: what is going on now, by name: pendings that settle when it may have ended.
        before: called when the moment has come; ends what only a reset ends.
    """

    def __init__(
        self,
        ranks: Sequence[Rank],
        known: Sequence[tuple[Known, ...]],
        busy: Callable[[], dict[str, Sequence[Pending[Any]]]],
        before: Callable[[], object],
    ) -> None:
        self._ranks = tuple(ranks)
        self._known = tuple(known)
        self._busy = busy
        self._before = before
        self._order = asyncio.Lock()
        self._gates: tuple[Pending[None], ...] = ()  # replaced, never changed: other threads look at it
        self._scopes: dict[asyncio.Timeout, None] = {}
        self._pages_back = asyncio.Event()

    @property
    def gate(self) -> Pending[None] | None:
        """Settles when every reset that is under way has ended; None if none is; from any thread."""
        gates = self._gates
        return gates[-1] if gates else None

    def pages_came_back(self) -> None:
        """A rank may have become idle."""
        self._pages_back.set()

    async def reset(self, deadline: float, names: Sequence[str] | None) -> ResetReport:
        """Forget everything on the devices and in some tiers.

        Args:
            deadline: on the loop's clock.
            names: of the tiers; None: all.

        Raises:
            UsageFault: no such tier.
        """
        unknown = sorted(set(names or ()) - {known[0].tier.name for known in self._known})
        if unknown:
            raise UsageFault(f"there is no tier {', '.join(unknown)}")
        chosen = [known for known in self._known if names is None or known[0].tier.name in names]
        ended: Pending[None] = Pending()
        scope = asyncio.timeout_at(deadline)
        self._shut_until(ended)
        self._scopes[scope] = None
        try:
            async with scope, self._order:
                self._before()
                pages: list[int] = []
                while not self._cleared(pages):
                    await self._something_ended()
                return await self._forget(chosen, sum(pages), deadline)
        except TimeoutError:
            return ResetReport(done=False, waited_for=tuple(self._going_on()))
        finally:
            del self._scopes[scope]
            ended.settle(None)

    def _shut_until(self, ended: Pending[None]) -> None:
        """A gate for what comes later: open once this reset, and those before it, have ended."""
        gate = all_of([ended, *self._gates]).map(lambda _: None)
        self._gates = (*self._gates, gate)
        gate.on_done(lambda _: self._opened(gate))

    def _opened(self, gate: Pending[None]) -> None:
        self._gates = tuple(item for item in self._gates if item is not gate)

    def conclude(self) -> None:
        """End what is under way: it has not run."""
        for scope in list(self._scopes):
            scope.reschedule(asyncio.get_running_loop().time())

    def _going_on(self) -> list[str]:
        found = [name for name, pendings in self._busy().items() if pendings]
        return found + [f"rank {rank.name}" for rank in self._ranks if not _idle(rank)]

    def _cleared(self, pages: list[int]) -> bool:
        """Forget the device pages of all ranks, if nothing goes on at all."""
        self._pages_back.clear()  # before looking
        if self._going_on():
            return False
        try:
            pages += [rank.pool.clear() for rank in self._ranks]
        except UsageFault:
            return False  # somebody was admitted this very moment: what was forgotten will be again
        return True

    async def _something_ended(self) -> None:
        """Wait until something that was in the way has ended."""
        loop = asyncio.get_running_loop()

        def wake(_: object) -> None:
            loop.call_soon_threadsafe(self._pages_back.set)

        pendings = [item for group in self._busy().values() for item in group]
        for item in pendings:
            item.on_done(wake)
        try:
            await self._pages_back.wait()
        finally:
            for item in pendings:
                item.forget(wake)

    async def _forget(self, chosen: Sequence[tuple[Known, ...]], pages: int, deadline: float) -> ResetReport:
        reached: list[str] = []
        missed: dict[str, str] = {}
        for parts in chosen:
            tier = parts[0].tier
            name = tier.name
            if not tier.resets:
                missed[name] = "it cannot forget"
                continue
            try:
                done = await wait_until(tier.reset(deadline), deadline)
            except TimeoutError:
                missed[name] = "it did not answer in time"
                continue
            for known in parts:
                known.forget()
            if done:
                reached.append(name)
            else:
                missed[name] = "it failed, or did not end in time"
        return ResetReport(True, tuple(reached), missed, pages)


def _idle(rank: Rank) -> bool:
    pools = (rank.pool, *rank.pool.sides.pools)
    found = [pool.gauges() for pool in pools]
    return not any(gauges.held or gauges.requests or gauges.reservations for gauges in found)

"""What one request, or one prefix, has of the pools beside the chain of full pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from kvcontract.contract.errors import UsageFault
from kvcontract.pool.handles import Entitlement, Never, Reservation
from kvcontract.pool.index import Keys, Pages
from kvcontract.pool.media import NO_MEDIA, Media
from kvcontract.pool.side import Flags, SideHold
from kvcontract.pool.sides import Sides, Slotted, Windowed

Pairs = tuple[tuple[int, int], ...]
"""(source, target) blocks to copy, in order."""


class SideHolds:
    """Pins, in every pool beside the chain, what a prefix of so many pages needs.

    Attributes:
        pages: length of the prefix.
        by_key: a hold for each space that needs something.
    """

    def __init__(self, pages: int, by_key: Mapping[str, SideHold]) -> None:
        self.pages = pages
        self.by_key = dict(by_key)

    def release(self) -> None:
        """Give everything back that was not consumed."""
        while self.by_key:
            _, hold = self.by_key.popitem()
            if hold.live:
                hold.release()


def covered(
    sides: Sides, page_tokens: int, present: Mapping[str, Flags], pages: int, legal: Media = NO_MEDIA
) -> list[int]:
    """At which boundaries a prefix can be continued: pages, the deepest first; none at 0.

    Args:
        sides: of the rank.
        page_tokens: of a page.
        present: by space, bool [pages], what there is.
        pages: of the longest prefix that is asked about.
        legal: items of the prompt; it is not cut inside an uncut one.
    """
    good = np.arange(pages + 1) * page_tokens % sides.granule_tokens == 0
    for side in sides:
        good &= side.covered(present[side.key][:pages])
    good[0] = False
    found: list[int] = np.flatnonzero(good)[::-1].tolist()
    return [number for number in found if legal.floor(number * page_tokens) == number * page_tokens]


def hold_at(sides: Sides, keys: Keys, pages: int) -> SideHolds | None:
    """Pin all that a prefix of so many pages needs; None if something is absent or there is no room."""
    with ExitStack() as undo:
        found: dict[str, SideHold] = {}
        for side in sides:
            wanted = side.needed(pages)
            if not len(wanted):
                continue
            hold = side.index.hold(keys[wanted])
            if hold is None:
                return None
            found[side.index.key] = undo.enter_context(hold)
        undo.pop_all()
        return SideHolds(pages, found)


def hold_deepest(
    sides: Sides, page_tokens: int, keys: Keys, pages: int, legal: Media = NO_MEDIA
) -> SideHolds | None:
    """Pin what the deepest prefix needs that can be continued on this device; None: there is none."""
    present = {side.key: side.index.present(keys[:pages]) for side in sides}
    for boundary in covered(sides, page_tokens, present, pages, legal):
        if (held := hold_at(sides, keys, boundary)) is not None:
            return held
        if not fits(sides, boundary):
            return None  # nor would those before it, of which there may be thousands
    return None


def fits(sides: Sides, pages: int) -> bool:
    """Whether there is room to hold what a prefix of so many pages needs."""
    return all(side.index.gauges().budget >= len(side.needed(pages)) for side in sides)


class WindowView:
    """A request's pages in one windowed pool.

    Attributes:
        side: pool and rule.
        table: int32 [pages of its life], block of each page; 0 where it has none: not yet, or not any more.
    """

    def __init__(self, side: Windowed, entitlement: Entitlement, pages: int) -> None:
        self.side, self._pool, self.entitlement = side, side.pool, entitlement
        self.table: Pages = np.zeros(pages, np.int32)
        self._first = self._named = self._end = 0  # numbers of pages: the first that may be there, and so on

    @property
    def key(self) -> str:
        """Of the space."""
        return self.side.key

    @property
    def end(self) -> int:
        """Pages before this one have been drawn."""
        return self._end

    def adopt(self, hold: SideHold | None, pages: int) -> None:
        """Begin after a prefix of so many pages, with what was held for it."""
        numbers = self.side.needed(pages)
        if hold is not None:
            self._pool.adopt(self.entitlement, hold)
            self.table[numbers] = self.entitlement.pages
        self._first = int(numbers[self._sinks(numbers)]) if len(numbers) > self._sinks(numbers) else pages
        self._named = self._end = pages

    def branch(self, parent: WindowView, pages: int) -> Pairs:
        """Begin as a branch: own the named pages of another request, `pages` in all; what else to copy."""
        self._first, self._named, self._end = parent._first, pages, parent._end
        mine = parent.table[:pages]
        self._pool.share(self.entitlement, mine[mine > 0])
        self.table[:pages] = mine
        rest = pages + np.flatnonzero(parent.table[pages : parent.end])
        self.table[rest] = self._pool.draw(self.entitlement, len(rest))
        return pairs(parent.table[rest], self.table[rest])

    def grow(self, pages: int) -> None:
        """Have all pages up to a number."""
        if pages > self._end:
            self.table[self._end : pages] = self._pool.draw(self.entitlement, pages - self._end)
            self._end = pages

    def shrink(self, pages: int) -> None:
        """Return those from a number on."""
        if pages < self._end:
            self._pool.retract(self.entitlement, self._end - pages)
            self.table[pages : self._end] = 0
            self._end = pages

    def register(self, keys: Keys) -> None:
        """Name pages, the first ones of which `keys` are: uint64 [n, 2]."""
        numbers = np.arange(self._named, len(keys))
        if len(numbers):
            # One that was let go before its name was due, within an uncut item, has none.
            self._pool.register(self.entitlement, keys[numbers[self.table[numbers] > 0]])
            self._named = len(keys)

    def slide(self, frontier: int, checkpoint: int) -> None:
        """Let go of what no later step reads.

        Args:
            frontier: committed tokens.
            checkpoint: a boundary at which somebody may go on: what that needs is evicted later (B14).
        """
        live = min(int(self.side.first(np.array([frontier]))[0]), self._end)
        start = max(self._first, self.side.sink_pages)
        if live <= start:
            return
        size, numbers = self._pool.page_tokens, np.arange(start, live)
        keep = np.isin(numbers, self.side.needed(checkpoint // size))
        at = int(np.count_nonzero(self.table[:start]))
        self._pool.drop(self.entitlement, at, keep)
        self.table[start:live] = 0
        self._first = live

    def _sinks(self, numbers: npt.NDArray[np.int64]) -> int:
        return int(np.count_nonzero(numbers < self.side.sink_pages))


@dataclass(slots=True, eq=False)
class SlotView:
    """A request's slot in one slab.

    Attributes:
        slot: its live one.
        source: the snapshot that it begins with, until that is copied.
    """

    side: Slotted
    entitlement: Entitlement
    slot: int = 0
    source: SideHold | None = None

    @property
    def key(self) -> str:
        """Of the space."""
        return self.side.key

    def places(self, pages: int) -> npt.NDArray[np.int64]:
        """Where lies what a boundary of so many pages needs: the slot, or of a ring, pages of it."""
        rows = self.side.ring_pages
        return self.slot * rows + (
            self.side.needed(pages) % rows if self.side.window else np.zeros(1, np.int64)
        )

    def release(self) -> None:
        """Give the slot back, and the snapshot."""
        if self.source is not None:
            self.source.release()
        self.source = None


class Holdings:
    """All that one admitted request has beside its chain; nothing, for a model that has nothing else.

    Args:
        sides: of the rank.
        promises: by space.
        pages: of its life.

    Attributes:
        copies: (source, target) blocks to copy before the first step, by space.
        staged: slots that the outstanding step writes a state to, by position and space.
        emitted: the same of a step that is done, until somebody names them.
    """

    def __init__(self, sides: Sides, promises: Mapping[str, Entitlement], pages: int) -> None:
        self._sides = sides
        self.copies: dict[str, Pairs] = {}
        self.staged: dict[int, dict[str, Reservation]] = {}
        self.emitted: dict[int, dict[str, Reservation]] = {}
        self._readers: WeakSet[Holdings] = WeakSet()
        self.windows = [WindowView(side, promises[side.key], pages) for side in sides.windows]
        self.slots = [SlotView(side, promises[side.key]) for side in sides.slots]
        for view in self.slots:
            (view.slot,) = view.side.pool.draw(view.entitlement, 1).tolist()

    @classmethod
    def promised(cls, sides: Sides, pages: int, held: SideHolds | None = None) -> Holdings | Never | None:
        """Promise a request of so many pages all that it needs, or nothing: None, where it has to wait.

        Args:
            sides: of the rank.
            pages: of its life.
            held: of the prefix that it starts from; stays as it is until `adopt`.
        """
        promises: dict[str, Entitlement] = {}
        with ExitStack() as undo:
            for side in sides:
                hold = held.by_key.get(side.key) if held is not None and isinstance(side, Windowed) else None
                answer = side.pool.promise(side.lifetime(pages), hold)
                if answer is None or isinstance(answer, Never):
                    return answer
                promises[side.key] = undo.enter_context(answer)
            made = cls(sides, promises, pages)
            undo.pop_all()
        return made

    @property
    def views(self) -> list[WindowView | SlotView]:
        """What it has in each pool."""
        return [*self.windows, *self.slots]

    def entitlement(self, key: str) -> Entitlement | None:
        """What it is promised of one pool; None: it has nothing there."""
        of_key = (view.entitlement for view in self.views if view.key == key)
        return next((item for item in of_key if item.live), None)

    def branch(self, pages: int, shared: int) -> Holdings | None:
        """What a branch of so many pages needs, which shares the named ones; None, where it has to wait."""
        made = self.promised(self._sides, pages)
        if made is None or isinstance(made, Never):
            return None
        copies: dict[str, Pairs] = {}
        with ExitStack() as undo:
            undo.callback(made.release)
            for mine, theirs in zip(made.windows, self.windows, strict=True):
                copies[mine.key] = mine.branch(theirs, shared)
            for slot, other in zip(made.slots, self.slots, strict=True):
                copies[slot.key] = ((other.slot, slot.slot),)
            for view in made.views:
                sources = np.array([source for source, _ in copies[view.key]], np.int32)
                if len(sources) and not view.side.pool.copy_from(view.entitlement, sources):
                    return None
            undo.pop_all()
        made.copies = {key: found for key, found in copies.items() if found}
        if self.slots:
            self._readers.add(made)
        return made

    @property
    def read_by_a_branch(self) -> bool:
        """Whether a branch has not copied yet what this one would rewrite."""
        return any(branch.copies for branch in self._readers)

    def adopt(self, held: SideHolds | None, pages: int) -> None:
        """Begin after a prefix of so many pages; what was held for it is consumed."""
        by_key = {} if held is None else held.by_key
        for window in self.windows:
            window.adopt(by_key.pop(window.key, None), pages)
        for view in self.slots:
            key = view.side.index.key
            view.source = by_key.pop(key, None)
            if view.source is not None:
                self.copies[key] = pairs(view.source.pages, view.places(pages))

    @property
    def live_slots(self) -> dict[str, int]:
        """Live slot of each bounded group."""
        return {view.side.group: view.slot for view in self.slots}

    def copied(self) -> None:
        """What it asked to be copied is copied: sources are let go."""
        self._forget_copies()
        for view in self.views:
            view.side.pool.copied(view.entitlement)

    def _forget_copies(self) -> None:
        self.copies = {}
        for view in self.slots:
            view.release()

    def stage(self, positions: Sequence[int]) -> dict[str, Pairs]:
        """Slots for states inside the next step, by group; as many positions as there is room for (F6)."""
        self.unstage()
        found: dict[str, list[tuple[int, int]]] = {}
        for position in positions:
            mine: dict[str, Reservation] = {}
            for view in (view for view in self.slots if view.side.stored):
                kept = view.side.index.reserve(1)
                if kept is None:
                    _let_go(mine)
                    return {group: tuple(pairs) for group, pairs in found.items()}
                mine[view.key] = kept
            self.staged[position] = mine
            for view in (view for view in self.slots if view.key in mine):
                pair = position, int(mine[view.key].pages[0])
                found.setdefault(view.side.group, []).append(pair)
        return {group: tuple(pairs) for group, pairs in found.items()}

    def ran(self) -> None:
        """The step is done: what it was to write is written."""
        self.emitted, self.staged = self.staged, {}

    def unstage(self) -> None:
        """Nobody has named them, or the step came to nothing (F3)."""
        for kept in (self.staged, self.emitted):
            while kept:
                _let_go(kept.popitem()[1])

    def tables(self, pages: int) -> dict[str, Pages]:
        """Page table of each windowed space, int32 [pages]: drawn, where they were not."""
        for window in self.windows:
            window.grow(pages)
        return {window.key: _read_only(window.table[:pages]) for window in self.windows}

    def shrink(self, pages: int) -> None:
        """Return the pages from a number on."""
        for window in self.windows:
            window.shrink(pages)

    def advance(self, keys: Keys, frontier: int, checkpoint: int) -> None:
        """Name the complete pages, of which these are the keys, and let go of what is behind.

        Args:
            keys: uint64 [n, 2].
            frontier: committed tokens.
            checkpoint: the latest boundary from which somebody may go on.
        """
        for window in self.windows:
            window.register(keys)
            window.slide(frontier, checkpoint)

    def at(self, pages: int) -> dict[str, tuple[npt.NDArray[np.int64], Pages]]:
        """What lies in windows before a boundary of so many pages: numbers and blocks, by space."""
        found = {}
        for window in self.windows:
            numbers = window.side.needed(pages)
            numbers = numbers[window.table[numbers] > 0]
            found[window.key] = numbers, window.table[numbers]
        return found

    def forget(self, keys: Keys) -> None:
        """Let nobody find what is named like this, uint64 [n, 2] (B13)."""
        for view in self.views:
            view.side.index.forget(keys)

    def release(self) -> None:
        """Give everything back."""
        with ExitStack() as end:
            end.callback(self._forget_copies)
            end.callback(self.unstage)
            for view in self.views:
                if view.entitlement.live:  # a save of the last blocks may have ended it
                    end.callback(view.entitlement.release)


def _let_go(reservations: dict[str, Reservation]) -> None:
    while reservations:
        _, kept = reservations.popitem()
        if kept.live:
            kept.release()


def pairs(sources: Pages, targets: npt.NDArray[np.integer[Any]]) -> Pairs:
    """Blocks to copy, one by one."""
    return tuple(zip(sources.tolist(), targets.tolist(), strict=True))


def _read_only(array: Pages) -> Pages:
    view = array.view()
    view.flags.writeable = False
    return view


def refuse_without_sides(sides: Sides, held: SideHolds | None, pages: int) -> None:
    """Refuse a prefix that lacks what the rank's other pools would have to hold (R2).

    Raises:
        UsageFault: says so.
    """
    if sides and pages and (held is None or held.pages != pages):
        have = "nothing" if held is None else f"what {held.pages} pages need"
        raise UsageFault(
            f"a prefix of {pages} pages that holds {have} of {', '.join(side.key for side in sides)}"
        )

"""The pool against a slow and obvious one, step by step, with the books audited after each step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from reference_pool import ROOT, Page, ReferencePool, Run

from kvcontract.contract.errors import UsageFault
from kvcontract.pool import BlockPool, Content, Entitlement, EventLog, Hold, Never, Reservation
from kvcontract.pool.events import replay

DEPTH = 4
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=DEPTH)


def names(path: list[int]) -> list[int]:
    """Keys of a path in a binary tree: small numbers, so that they collide in the index."""
    number, keys = 1, []
    for turn in path:
        number = 2 * number + turn
        keys.append(number)
    return keys


def as_keys(keys: list[int]) -> np.ndarray:
    """As the pool takes them."""
    return np.array([[key % 4, key] for key in keys], np.uint64).reshape(-1, 2)


PARTIAL = 1 << 20


def partial(keys: list[int]) -> int:
    """Name of the partial page that follows some pages."""
    return PARTIAL + (keys[-1] if keys else 0)


def content(keys: list[int]) -> Content:
    """What the pages of some keys hold: each token is the key."""
    return Content(np.repeat(np.array([key for key in keys if key < PARTIAL], np.int64), 4))


class PoolMachine(RuleBasedStateMachine):
    """Any order of verbs: matches, restores, admissions, draws, names, saves, releases."""

    @initialize(total=st.integers(3, 12))
    def begin(self, total: int) -> None:
        """A pool of some pages."""
        self.log = EventLog()
        self.heard = []
        self.pool = BlockPool(total + 1, 4, events=self.log)
        self.model = ReferencePool(total)
        self.holds: list[tuple[Hold, Run, list[int]]] = []
        self.staged: list[tuple[Reservation, Run]] = []
        self.active: list[tuple[Entitlement, Run, list[int]]] = []
        self.saves: list[tuple[np.ndarray, list[Page]]] = []

    @rule(path=PATHS, to_the_end=st.booleans())
    def match(self, path: list[int], to_the_end: bool) -> None:
        """Resolve a prefix, with a partial page after it or without."""
        keys = names(path)
        key = partial(keys) if to_the_end else None
        hold = self.pool.match(as_keys(keys), boundary=None if key is None else as_keys([key])[0])
        run = self.model.match(keys, key)
        assert (hold.hit_pages, hold.boundary_key is not None) == (run.full, run.boundary)
        self.holds.append((hold, run, path))

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), drop=st.booleans())
    def release_or_trim_hold(self, data: st.DataObject, drop: bool) -> None:
        """Give a hold back, or its tail."""
        hold, run, path = chosen = data.draw(st.sampled_from(self.holds))
        keep = 0 if drop else data.draw(st.integers(0, run.full))
        self.holds.remove(chosen)  # after the last draw, which may end the example
        if drop:
            hold.release()
            self.model.disown(run.pages)
            return
        hold.trim(keep)
        kept = run if keep == run.full else Run(run.pages[:keep], named=keep)
        self.holds.append((hold, kept, path))
        self.model.disown(run.pages[len(kept.pages) :])

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def rooms_without(self, data: st.DataObject) -> None:
        """What shedding holds would give (B8), and what a request with one of them may be promised (B9)."""
        chosen = data.draw(st.permutations(self.holds))
        rooms = self.model.rooms_without([run for _, run, _ in chosen])
        assert self.pool.rooms_without([hold for hold, *_ in chosen]) == rooms
        assert self.pool.budget(chosen[0][0]) == rooms[0] + chosen[0][1].full

    @rule(count=st.integers(1, 4))
    def reserve(self, count: int) -> None:
        """Stage pages for a restore."""
        reservation, run = self.pool.reserve(count), self.model.reserve(count)
        assert (reservation is None) == (run is None)
        if reservation is not None and run is not None:
            self.staged.append((reservation, run))

    @precondition(lambda self: self.staged and self.holds)
    @rule(data=st.data(), to_the_end=st.booleans())
    def commit(self, data: st.DataObject, to_the_end: bool) -> None:
        """A restore landed, all or in part, for a hold that waits for it; it may end in a partial page."""
        reservation, run = self.staged[-1]
        hold, base, path = chosen = data.draw(st.sampled_from(self.holds))
        start = base.full
        keys = names([*path, 0, 0, 0, 0, 0, 0, 0, 0])[start : start + len(run.pages)]
        before = names(path)[:start]
        if to_the_end:
            keys[-1] = partial([*before, *keys[:-1]])
        good = data.draw(st.integers(0, len(keys)))
        names_known = {"content": content(keys[:good]), "boundary": to_the_end}
        if base.boundary:
            with pytest.raises(UsageFault, match="partial page"):
                self.pool.commit(reservation, as_keys(keys), good, base=hold, **names_known)
            return
        self.holds.remove(chosen)
        self.staged.pop()
        longer = self.pool.commit(reservation, as_keys(keys), good, base=hold, **names_known)
        merged = self.model.commit(run, keys[:good], base, before[-1] if before else ROOT)
        merged.boundary = to_the_end and good == len(keys)
        self.holds.append((longer, merged, [*path, 0, 0, 0, 0]))

    @precondition(lambda self: self.staged)
    @rule(path=PATHS, start=st.integers(0, DEPTH), late=st.booleans())
    def settle_restore(self, path: list[int], start: int, late: bool) -> None:
        """A restore failed, or landed after its waiter left."""
        reservation, run = self.staged.pop()
        start = min(start, len(path))
        keys = names([*path, 0, 0, 0, 0])[start : start + len(run.pages)]
        if not late:
            reservation.release()
            self.model.disown(run.pages)
            return
        parent = as_keys(names(path))[start - 1] if start else None
        told = content(keys)
        self.pool.commit_late(reservation, as_keys(keys), len(keys), parent=parent, content=told)
        self.model.commit_late(run, keys, names(path)[start - 1] if start else ROOT)

    @rule(data=st.data(), path=PATHS, extra=st.integers(0, 3), with_hold=st.booleans())
    def admit(self, data: st.DataObject, path: list[int], extra: int, with_hold: bool) -> None:
        """Admit a request, with a prefix in hand or without."""
        hold, base = None, None
        if with_hold and self.holds:
            at = data.draw(st.integers(0, len(self.holds) - 1))
            hold, base, path = self.holds[at]
        lifetime = max(len(path), len(base.pages) if base else 0) + extra
        answer = self.pool.try_admit(lifetime, hold)
        if lifetime > self.model.total:
            assert isinstance(answer, Never)
            return
        run = self.model.admit(lifetime, base)
        assert (answer is None) == (run is None)
        if isinstance(answer, Entitlement) and run is not None:
            self.active.append((answer, run, path))
            if hold is not None:
                self.holds.pop(at)

    @precondition(lambda self: self.active)
    @rule(data=st.data(), count=st.integers(1, 4))
    def draw_and_register(self, data: st.DataObject, count: int) -> None:
        """A step: draw pages, then name those that are complete."""
        entitlement, run, path = data.draw(st.sampled_from(self.active))
        count = min(count, run.lifetime - len(run.pages))
        assert len(self.pool.draw(entitlement, count)) == count  # B11
        self.model.draw(run, count)
        keys = names(path)[run.named : len(run.pages)]
        keys = keys[: data.draw(st.integers(0, len(keys)))]
        if run.sources and keys:
            with pytest.raises(UsageFault, match="still to be copied"):
                self.pool.register(entitlement, as_keys(keys), content(keys))
            return
        self.pool.register(entitlement, as_keys(keys), content(keys))
        self.model.register(run, keys)

    @precondition(lambda self: self.active)
    @rule(data=st.data(), extra=st.integers(0, 2))
    def fork(self, data: st.DataObject, extra: int) -> None:
        """A request branches (B23)."""
        entitlement, run, path = data.draw(st.sampled_from(self.active))
        shared = data.draw(st.integers(0, run.named))
        copied = data.draw(st.integers(0, len(run.pages) - shared))
        lifetime = shared + copied + extra
        if run.sources:
            with pytest.raises(UsageFault, match="to be copied"):
                self.pool.fork(entitlement, lifetime, shared_pages=shared, copied_pages=copied)
            return
        answer = self.pool.fork(entitlement, lifetime, shared_pages=shared, copied_pages=copied)
        branch = self.model.fork(run, lifetime, shared, copied) if lifetime <= self.model.total else None
        assert isinstance(answer, Entitlement) == (branch is not None)
        if isinstance(answer, Entitlement) and branch is not None:
            turn = data.draw(st.integers(0, 1))
            self.active.append((answer, branch, [*path[:shared], turn, turn, turn]))

    @precondition(lambda self: any(run.sources for _, run, _ in self.active))
    @rule(data=st.data())
    def copied(self, data: st.DataObject) -> None:
        """The copies of a branch are made."""
        waiting = [each for each in self.active if each[1].sources]
        entitlement, run, _ = data.draw(st.sampled_from(waiting))
        assert len(entitlement.copies) == len(run.sources)
        self.pool.copied(entitlement)
        self.model.copied(run)

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def mark_reset(self, data: st.DataObject) -> None:
        """A request's pages are not to be kept (B13)."""
        entitlement, run, _ = data.draw(st.sampled_from(self.active))
        run.reset_from = data.draw(st.integers(0, len(run.pages)))
        self.pool.mark_reset(entitlement, run.reset_from)

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def retract(self, data: st.DataObject) -> None:
        """A step came to nothing."""
        entitlement, run, _ = data.draw(st.sampled_from(self.active))
        first = len(run.pages)
        fixed = run.named + len(run.sources)
        while first > fixed and run.pages[first - 1].owners == 1 and not run.pages[first - 1].pins:
            first -= 1
        count = data.draw(st.integers(0, len(run.pages) - first))
        self.pool.retract(entitlement, entitlement.pages[len(run.pages) - count :].copy())
        self.model.retract(run, count)

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """A request ends."""
        entitlement, run, _ = self.active.pop(data.draw(st.integers(0, len(self.active) - 1)))
        self.pool.release(entitlement)
        self.model.end(run)

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        """A save begins."""
        entitlement, run, _ = data.draw(st.sampled_from(self.active))
        first = data.draw(st.integers(0, len(run.pages)))
        last = data.draw(st.integers(first, len(run.pages)))
        pages = entitlement.pages[first:last].copy()
        self.pool.pin(pages)
        self.model.pin(run.pages[first:last])
        self.saves.append((pages, run.pages[first:last]))

    @precondition(lambda self: self.saves)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        """A save has landed."""
        pages, copies = self.saves.pop(data.draw(st.integers(0, len(self.saves) - 1)))
        self.pool.unpin(pages)
        self.model.unpin(copies)

    @rule(on=st.sampled_from([True, True, False]))
    def set_retention(self, on: bool) -> None:
        """An operator turns retention on or off."""
        self.pool.set_retention(on)
        self.model.set_retention(on=on)

    @rule(now=st.integers(0, 7).map(lambda number: number == 0))
    def clear(self, now: bool) -> None:
        """A reset, refused unless the pool is idle (C11)."""
        if self.model.clearable and not self.staged:
            if not now:
                return
            self.pool.clear()
            self.model.clear()
        else:
            with pytest.raises(UsageFault, match="idle"):
                self.pool.clear()

    @rule(path=PATHS)
    def probe(self, path: list[int]) -> None:
        """Presence is the model's."""
        keys = names(path)
        resident = [key in self.model.named for key in keys]
        assert self.pool.probe(as_keys(keys)) == [*resident, False].index(False)

    @invariant()
    def books_agree(self) -> None:
        """Counters, residents and eviction order are the model's, and the audit passes."""
        if not hasattr(self, "pool"):
            return
        self.pool.check_books()
        gauges, model, books = self.pool.gauges(), self.model, self.pool._books
        assert (gauges.free, gauges.cached, gauges.entitled) == (model.free, len(model.order), model.entitled)
        order, page = [], books.order[0, 0]
        while page:
            order.append(int(books.index.keys[page, 1]))
            page = books.order[0, page]
        assert order == [each.key for each in model.order]
        sources = [page for _, run, _ in self.active for page in run.sources]
        assert gauges.pinned == len(
            {id(each) for each in [*sources, *(p for _, run in self.saves for p in run)]}
        )
        assert (gauges.requests, gauges.reservations) == (len(self.active), len(self.staged))
        assert gauges.holds == len(self.holds)

    @invariant()
    def events_tell_the_index(self) -> None:
        """Replaying every event gives the natural names, their parents and their tokens (I7)."""
        if not hasattr(self, "pool"):
            return
        self.heard += self.log.take()
        resident = {key: pages[0].parent for key, pages in self.model.named.items() if key < PARTIAL}
        expected = {
            as_keys([key]).tobytes(): (
                as_keys([parent]).tobytes() if parent != ROOT else bytes(16),
                np.full(4, key, np.int64).tobytes(),
            )
            for key, parent in resident.items()
        }
        assert replay(self.heard) == expected

    def teardown(self) -> None:
        """Everything goes back: nothing is held, nothing promised."""
        if not hasattr(self, "pool"):
            return
        for handle, *_ in [*self.holds, *self.staged, *self.active]:
            handle.release()
        for pages, _ in self.saves:
            self.pool.unpin(pages)
        self.pool.check_books()
        gauges = self.pool.gauges()
        assert (gauges.held, gauges.entitled, gauges.pinned) == (0, 0, 0)


PoolMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPoolAgainstReference = PoolMachine.TestCase

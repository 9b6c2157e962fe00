"""The pool against a slow and obvious one, step by step, with the books audited after each step."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from reference_pool import ROOT, Page, ReferencePool, Run

from kvcontract.pool import BlockPool, Entitlement, Hold, Never, Reservation

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


class PoolMachine(RuleBasedStateMachine):
    """Any order of verbs: matches, restores, admissions, draws, names, saves, releases."""

    @initialize(total=st.integers(3, 12))
    def begin(self, total: int) -> None:
        """A pool of some pages."""
        self.pool = BlockPool(total + 1, 4)
        self.model = ReferencePool(total)
        self.holds: list[tuple[Hold, Run, list[int]]] = []
        self.staged: list[tuple[Reservation, Run]] = []
        self.active: list[tuple[Entitlement, Run, list[int]]] = []
        self.saves: list[tuple[np.ndarray, list[Page]]] = []

    @rule(path=PATHS)
    def match(self, path: list[int]) -> None:
        """Resolve a prefix."""
        keys = names(path)
        hold, run = self.pool.match(as_keys(keys)), self.model.match(keys)
        assert hold.hit_pages == len(run.pages)
        self.holds.append((hold, run, path))

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), drop=st.booleans())
    def release_or_trim_hold(self, data: st.DataObject, drop: bool) -> None:
        """Give a hold back, or its tail."""
        hold, run, path = chosen = data.draw(st.sampled_from(self.holds))
        keep = 0 if drop else data.draw(st.integers(0, len(run.pages)))
        self.holds.remove(chosen)  # after the last draw, which may end the example
        tail = run.pages[keep:]
        if drop:
            hold.release()
        else:
            hold.trim(keep)
            kept = Run(run.pages[:keep], named=keep)
            self.holds.append((hold, kept, path))
        self.model.disown(tail)

    @rule(count=st.integers(1, 4))
    def reserve(self, count: int) -> None:
        """Stage pages for a restore."""
        reservation, run = self.pool.reserve(count), self.model.reserve(count)
        assert (reservation is None) == (run is None)
        if reservation is not None and run is not None:
            self.staged.append((reservation, run))

    @precondition(lambda self: self.staged and self.holds)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """A restore landed, all or in part, for a hold that waits for it."""
        reservation, run = self.staged[-1]
        hold, base, path = chosen = data.draw(st.sampled_from(self.holds))
        start = len(base.pages)
        keys = names([*path, 0, 0, 0, 0, 0, 0, 0, 0])[start : start + len(run.pages)]
        good = data.draw(st.integers(0, len(keys)))
        self.holds.remove(chosen)
        self.staged.pop()
        parent = names(path)[start - 1] if start else ROOT
        longer = self.pool.commit(reservation, as_keys(keys), good, base=hold)
        merged = self.model.commit(run, keys[:good], base, parent)
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
        self.pool.commit_late(reservation, as_keys(keys), len(keys), parent=parent)
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
        self.pool.register(entitlement, as_keys(keys))
        self.model.register(run, keys)

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def retract(self, data: st.DataObject) -> None:
        """A step came to nothing."""
        entitlement, run, _ = data.draw(st.sampled_from(self.active))
        first = len(run.pages)
        while first > run.named and not run.pages[first - 1].pins:
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
        assert gauges.pinned == len({id(each) for _, pages in self.saves for each in pages})

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
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPoolAgainstReference = PoolMachine.TestCase

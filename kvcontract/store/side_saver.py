"""Saves of what checkpoints keep beside the full pages: windows of pages, snapshots."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvcontract.contract.model import Scope
from kvcontract.core.pending import Pending
from kvcontract.pool.handles import Entitlement
from kvcontract.pool.request import RequestKv
from kvcontract.pool.side import Flags
from kvcontract.store.rank import Berth, SideBerth
from kvcontract.store.saver import Saver
from kvcontract.store.saves import NOTHING, Batch, Remembered, Run, SealReport
from kvcontract.store.snapshots import Artefact, Checkpoint
from kvcontract.store.worker import After
from kvcontract.tiers.base import Code, SaveClass
from kvcontract.tiers.cipher import KeyId

KEPT_SHED: Final = 256
"""Retired requests whose shed records are remembered, a rank."""


@dataclass(slots=True, eq=False)
class Left(Remembered):
    """Records of a part, of a retired request."""

    found: Artefact
    key: KeyId | None


class SideSaver(Saver):
    """Saves of one part; what its request has let go of may be somebody else's by now, and is left out.

    Arguments are those of `Saver`.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._left: dict[str, deque[Left]] = {}
        self._berths: dict[str, SideBerth] = {}

    def seal(
        self,
        berth: SideBerth,
        req: RequestKv,
        taken: Sequence[Checkpoint],
        *,
        cls: SaveClass,
        after: After | None,
        last: bool,
        handoff: str | None,
        key_of: Callable[[Scope], KeyId | None],
    ) -> Pending[SealReport]:
        """Save what checkpoints have in this space and is not known to be stored.

        One that the next takes the place of is saved when the request ends; for a handoff, the latest alone.

        Args:
            berth: of the request's rank.
            req: the request.
            taken: its checkpoints, in order.
            cls: why.
            after: see `KvStore.seal`.
            last: nobody will seal it again: records that failed before are tried too (C4).
            handoff: its name.
            key_of: what records of a scope are encrypted with.
        """
        mine = [item for item in taken if berth.pool.key in item.by_space]
        mine = mine[-1:] if handoff is not None else [item for item in mine if last or not item.rolling]
        if not mine or not self._known:
            return Pending.of(NOTHING)
        found = self._wanted(
            berth, _joined([item.by_space[berth.pool.key] for item in mine]), handoff, retry=last
        )
        events, key = mine[-1].after, key_of(req.scope)
        ending = req.ending(berth.pool.key) if last else None
        batch, left = self._chosen(berth, found, cls, handoff, key, ending, last=last)
        waits = events[-1] if len(events) == 1 else _all_of(events) if events else after
        if last and handoff is None and len(left.keys):
            self._remember(berth, Left(left, key, after=waits))
        told = self._told(left, batch, handoff)
        if batch is not None:
            batch.after = waits
            self._start(batch)
        if last:
            self._drain(berth)  # pins may have come back before it was remembered
        if batch is None:
            return Pending.of(told)
        return batch.report.map(lambda report: SealReport.joined([report, told]))

    def _told(self, left: Artefact, batch: Batch | None, handoff: str | None) -> SealReport:
        """Of what may not be saved now, what the batch does not tell of itself (C5)."""
        count = (len(left.keys) - (0 if batch is None else len(batch.shed))) * self._step
        reason = Code.SHED if handoff is None else Code.FULL  # a handoff is never shed: the device is full
        return SealReport(count, 0, {reason.name.lower(): count}) if count else NOTHING

    def promote(self, berth: SideBerth, found: Artefact, tier: int, key: KeyId | None) -> None:
        """Bring records that came from a lower tier, and are on the device now, to those above it as well."""
        above = self._above(tier)
        if not above:
            return
        held = berth.pool.pin_named(found.blocks.ravel(), found.generations.ravel())
        whole = held.reshape(found.blocks.shape).all(axis=1)
        run = Run(found.keys[whole], found.blocks[whole], found.generations[whole, -1], None, key=key)
        try:
            batch = self._promoted(berth, run, above, np.ones(len(run.generations), np.bool_))
        finally:
            berth.pool.unpin(found.blocks.ravel()[held])
        self._start_promoted(batch)

    def _chosen(
        self,
        berth: SideBerth,
        found: Artefact,
        cls: SaveClass,
        handoff: str | None,
        key: KeyId | None,
        ending: Entitlement | None,
        *,
        last: bool,
    ) -> tuple[Batch | None, Artefact]:
        """Pin what there is room and budget for; what may be saved now, and what of it may not."""
        held = berth.pool.pin_named(found.blocks.ravel(), found.generations.ravel(), ending)
        pinned = found.blocks.ravel()[held]
        whole = held.reshape(found.blocks.shape).all(axis=1)
        batch: Batch | None = None
        try:
            if whole.any():
                rows = found.keys[whole], found.blocks[whole], found.generations[whole, -1]
                run = Run(*rows, None, key=key)
                with self._lock:
                    batch = self._planned(berth, run, cls, handoff, retry=last)
        finally:
            berth.pool.unpin(pinned)
        self._expected.pass_on()
        left: Flags = np.logical_not(whole)
        if batch is not None:
            left[np.flatnonzero(whole)[batch.shed]] = True
            if not len(batch.numbers):  # all of it is over budget
                with self._lock:
                    del self._open[batch]
                batch = None
        return batch, found.rows(left)

    # What was shed (C5)

    @property
    def shed(self) -> tuple[Pending[None], ...]:
        """What retired requests left to be saved and waits for its turn."""
        with self._lock:
            return tuple(item.done for line in self._left.values() for item in line)

    def give_up_shed(self) -> None:
        """Forget what was shed: nothing is saved any more."""
        with self._lock:
            items = [item for line in self._left.values() for item in line]
            self._left.clear()
        for item in items:
            item.end()

    def _remember(self, berth: SideBerth, item: Left) -> None:
        self._tally.count("blocks_not_saved_shed", int(item.found.blocks.size))
        with self._lock:
            line = self._left.setdefault(berth.name, deque())
            self._berths[berth.name] = berth
            line.append(item)
            dropped = line.popleft() if len(line) > KEPT_SHED else None
        if dropped is not None:
            dropped.end()

    def _came_back(self, rank: Berth) -> None:
        del rank  # what a tier has room for again may be another rank's
        for berth in tuple(self._berths.values()):
            self._drain(berth)

    def _drain(self, berth: SideBerth) -> None:
        """Try what was shed, oldest first, as far as room and budget go; each record once more (R5)."""
        while True:
            with self._lock:
                line = self._left.get(berth.name)
                if not line or not self._may_drain(berth, True):
                    return
                item = line[0]
            try:
                found = self._wanted(berth, item.found, None, retry=False)
                batch, item.found = self._chosen(
                    berth, found, SaveClass.CACHEABLE, None, item.key, None, last=False
                )
                if batch is not None:
                    batch.after = item.after
                    item.saves.append(batch.done)
                with self._lock:
                    mine = bool(line) and line[0] is item  # it may have been given up meanwhile
                    # Without a save under way nobody would come back to it: it is given up (R5).
                    ended = not len(item.found.keys) or (batch is None and not self._open)
                    if mine and ended:
                        line.popleft()
            finally:
                again = self._drained(berth)
            if mine and ended:
                item.end()
            if batch is not None:
                self._start(batch)  # it may end at once, and come back here
            elif mine and not ended and not again:
                return  # until pins come back

    def _wanted(self, berth: SideBerth, found: Artefact, handoff: str | None, *, retry: bool) -> Artefact:
        """Records that are on the device still, and that some tier lacks."""
        rows: Flags = np.logical_and.reduce(berth.pool.there(found.blocks, found.generations), axis=1)
        if handoff is None:
            last, generations, now = found.blocks[:, -1], found.generations[:, -1], self._clock()
            lacking = np.zeros(len(rows), np.bool_)
            for known in self._known:
                marks = known.of(berth)
                lacking |= marks.missing(last, generations, now, retry=retry, again=False)
            if retry:  # those that are being saved are tried again if that fails
                stored = [known.of(berth).state(last, generations, now)[0] for known in self._known]
                lacking |= ~np.logical_and.reduce(stored)
            rows &= lacking
        return found.rows(rows)


def _all_of(events: Sequence[After]) -> Callable[[], object]:
    def wait() -> None:
        for event in events:
            event() if callable(event) else event.synchronize()

    return wait


def _joined(items: Sequence[Artefact]) -> Artefact:
    """Several as one, the latest first; of a record that several have, the latest."""
    keys = np.concatenate([item.keys for item in reversed(items)])
    blocks = np.concatenate([item.blocks for item in reversed(items)])
    generations = np.concatenate([item.generations for item in reversed(items)])
    _, first = np.unique(keys, axis=0, return_index=True)
    rows = np.sort(first)
    return Artefact(keys[rows], blocks[rows], generations[rows])

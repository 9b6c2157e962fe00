"""Saves of what checkpoints keep beside the full pages: windows of pages, snapshots."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvcontract.contract.model import Scope
from kvcontract.core.pending import Pending
from kvcontract.pool.request import RequestKv
from kvcontract.store.rank import SideBerth
from kvcontract.store.saver import Saver
from kvcontract.store.saves import NOTHING, Run, SealReport
from kvcontract.store.snapshots import Artefact, Checkpoint
from kvcontract.store.worker import After
from kvcontract.tiers.base import SaveClass
from kvcontract.tiers.cipher import KeyId


class SideSaver(Saver):
    """Saves of one part; what its request has let go of may be somebody else's by now, and is left out."""

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
        found = self._wanted(berth, [item.by_space[berth.pool.key] for item in mine], handoff, retry=last)
        held = berth.pool.pin_named(found.blocks.ravel(), found.generations.ravel(), ending=last)
        pinned = found.blocks.ravel()[held]
        whole = held.reshape(found.blocks.shape).all(axis=1)
        self._tally.count("blocks_not_saved_no_room", int(found.blocks[~whole].size))
        try:
            rows = found.keys[whole], found.blocks[whole], found.generations[whole, -1]
            run = Run(*rows, None, key=key_of(req.scope))
            with self._lock:
                batch = self._planned(berth, run, cls, handoff, retry=last) if whole.any() else None
        finally:
            berth.pool.unpin(pinned)
        self._expected.pass_on()
        if batch is None:
            return Pending.of(NOTHING)
        events = mine[-1].after
        batch.after = events[-1] if len(events) == 1 else _all_of(events) if events else after
        self._start(batch)
        return batch.report

    def _wanted(
        self, berth: SideBerth, items: Sequence[Artefact], handoff: str | None, *, retry: bool
    ) -> Artefact:
        """Records that are on the device still, and that some tier lacks; the latest first."""
        found, pool = _joined(items), berth.pool
        rows = (pool.generation[found.blocks] == found.generations).all(axis=1)
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
        return Artefact(found.keys[rows], found.blocks[rows], found.generations[rows])


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

"""Checkpoints of the state beside full pages: taken where a step has ended, published once they are whole.

Live state is rewritten at each token, so it is copied (F1): slot to slot on the device, in the order of its
work.  What is found afterwards is the copy, under the boundary it was taken at, and only once every worker
has it (F2, F7).  Without room for all of it nothing is taken (F6), and a copy that fails publishes nothing
(F3).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from kvcontract.core.lane import Urgency
from kvcontract.core.pending import report_uncaught
from kvcontract.memory.device import StreamEvent
from kvcontract.memory.slots import take_snapshots, written
from kvcontract.pool.handles import Reservation
from kvcontract.pool.index import Keys, Pages
from kvcontract.pool.keys import Keyer
from kvcontract.pool.request import RequestKv
from kvcontract.store.rank import Rank
from kvcontract.store.stats import Tally
from kvcontract.store.workers import Crew

KEPT_NAMES: Final = 4096
"""Boundaries of which it is remembered how many requests began there."""


@dataclass(frozen=True, slots=True, eq=False)
class Artefact:
    """What one space holds of one checkpoint.

    Attributes:
        keys: uint64[n, 2], of its records.
        blocks: int32[n, blocks of a record].
        generations: uint32[n, blocks of a record], of their occupants.
    """

    keys: Keys
    blocks: Pages
    generations: NDArray[np.uint32]


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """One checkpoint of one request.

    Attributes:
        boundary: token position.
        rolling: the next one takes its place.
        by_space: what there is of it.
        after: events of the devices, after which the bytes are there.
    """

    boundary: int
    rolling: bool
    by_space: Mapping[str, Artefact]
    after: tuple[StreamEvent, ...] = ()


Slots = tuple[dict[str, tuple[int, int]], tuple[StreamEvent, ...]]
"""By space a snapshot and the generation of its occupant; events after which they are complete."""


class Snapshots:
    """Takes checkpoints, and remembers those of every request that goes on.

    Args:
        keyer: derives keys of records.
        crews: by rank.
        tally: where everything is counted.
    """

    def __init__(self, keyer: Keyer, crews: Mapping[str, Crew], tally: Tally) -> None:
        self._keyer = keyer
        self._crews = crews
        self._tally = tally
        self._lock = threading.Lock()
        self._taken: WeakKeyDictionary[RequestKv, list[Checkpoint]] = WeakKeyDictionary()
        self._shared: dict[bytes, int] = {}  # by name, how many requests began from a boundary

    def of(self, req: RequestKv) -> list[Checkpoint]:
        """Those of a request, in order."""
        with self._lock:
            return list(self._taken.get(req, ()))

    def take(self, rank: Rank, req: RequestKv) -> None:
        """Checkpoints that the last step has written, and one where the request stands, if one is wanted.

        Never raises for what befalls them: a checkpoint is a chance, not a duty.
        """
        if req.released:
            return
        for position in sorted(req.beside.emitted):
            slots = req.beside.emitted.pop(position)
            self._kept(rank, req, position, partial(self._emitted, rank, req, position, slots))
        boundary = req.checkpoint
        if boundary is None or boundary != req.committed_tokens:
            return
        taken = self.of(req)
        if not taken or taken[-1].boundary < boundary:
            self._kept(rank, req, boundary, partial(self._snapshot, rank, req, boundary))

    def _kept(self, rank: Rank, req: RequestKv, boundary: int, slots: Callable[[], Slots | None]) -> None:
        """Make a checkpoint, and remember it."""
        taken, rolling = self.of(req), req.new_tokens > 0 and boundary > req.prompt_len
        try:
            found = slots()
            made = None if found is None else self._made(rank, req, boundary, *found, rolling=rolling)
        except Exception as error:  # noqa: BLE001 - reported
            self._tally.count("checkpoints_failed")
            report_uncaught(error)
            return
        if made is None:
            self._tally.count("checkpoints_without_room")
            return
        self._tally.count("checkpoints_taken")
        with self._lock:
            kept = self._taken.setdefault(req, [])
            if kept and kept[-1].rolling and rolling:
                kept.pop()
            kept.append(made)
        self._outlived(rank, req, [item.boundary for item in taken], boundary)

    def _outlived(self, rank: Rank, req: RequestKv, earlier: list[int], boundary: int) -> None:
        """A deeper checkpoint of one prompt makes others worth less, where nobody else leaves it (B14)."""
        size, apart = rank.pool.page_tokens, req.checkpoints.branches(req.prompt_len)
        known = req.registered * size  # one that was preempted may not have come as far again
        if boundary in apart:
            self._begun(req.keys[boundary // size - 1], 2)
        begun = 0 < req.hit_tokens <= known
        if not earlier and begun and self._begun(req.keys[req.hit_tokens // size - 1], 1) == 1:
            earlier = [req.hit_tokens]
        there = [position for position in earlier if position <= known]
        pages = [position // size - 1 for position in there if position not in apart]
        if pages:
            for side in rank.pool.sides.slots:
                side.index.demote(req.keys[pages])

    def _begun(self, key: Keys, requests: int) -> int:
        """So many requests more have begun, or will, at a boundary (uint64[2]); how many in all."""
        name = key.tobytes()
        with self._lock:
            count = self._shared.pop(name, 0) + requests
            self._shared[name] = count
            while len(self._shared) > KEPT_NAMES:
                del self._shared[next(iter(self._shared))]
        return count

    def _made(
        self,
        rank: Rank,
        req: RequestKv,
        boundary: int,
        slots: Mapping[str, tuple[int, int]],
        after: tuple[StreamEvent, ...],
        *,
        rolling: bool,
    ) -> Checkpoint:
        """What there is of a checkpoint, and where.

        Args:
            rank: of the request.
            req: the request.
            boundary: token position.
            slots: by space, a snapshot and the generation of its occupant.
            after: events after which they are complete.
            rolling: see `Checkpoint`.
        """
        size, step = rank.pool.page_tokens, self._keyer.page_tokens // rank.pool.page_tokens
        pages, records = boundary // size, req.record_keys(self._keyer)
        found: dict[str, Artefact] = {}
        for key, (numbers, blocks) in req.beside.at(pages).items():
            generation = next(side for side in rank.pool.sides if side.key == key).pool.generation
            whole = blocks.reshape(-1, step)
            names = records[numbers.reshape(-1, step)[:, -1] // step]
            found[key] = Artefact(names, whole.copy(), generation[whole])
        last = records[pages // step - 1 : pages // step]
        for key, (block, occupant) in slots.items():
            found[key] = Artefact(last, np.array([[block]], np.int32), np.array([[occupant]], np.uint32))
        return Checkpoint(boundary, rolling, found, after)

    def _snapshot(self, rank: Rank, req: RequestKv, boundary: int) -> Slots | None:
        """Copy every live slot of a request; where the copies are, or None without room for all."""
        pages = boundary // rank.pool.page_tokens
        name = req.keys[pages - 1 : pages].copy()
        found: dict[str, tuple[int, int]] = {}
        with ExitStack() as undo:
            staged: dict[str, Reservation] = {}
            for view in (view for view in req.beside.slots if view.side.stored):
                pool = view.side.index
                there = pool.hold(name)
                if there is not None:  # another request has been here
                    with there:
                        block = int(there.pages[0])
                        found[pool.key] = block, int(pool.generation[block])
                    continue
                reserved = pool.reserve(1)
                if reserved is None:
                    return None
                staged[pool.key] = undo.enter_context(reserved)
            live = {view.side.index.key: view.slot for view in req.beside.slots}
            pairs = {key: [(live[key], int(kept.pages[0]))] for key, kept in staged.items()}
            after = take_snapshots(rank.memory, pairs)
            undo.pop_all()
        return found | self._published(rank, staged, name, after), after

    def _emitted(self, rank: Rank, req: RequestKv, boundary: int, slots: dict[str, Reservation]) -> Slots:
        """What the step itself has written."""
        pages = boundary // rank.pool.page_tokens
        after = written(rank.memory, slots)
        return self._published(rank, slots, req.keys[pages - 1 : pages].copy(), after), after

    def _published(
        self, rank: Rank, staged: Mapping[str, Reservation], name: Keys, after: tuple[StreamEvent, ...]
    ) -> dict[str, tuple[int, int]]:
        """Let slots be found, once they are complete (F2); where they are, and of which occupant."""
        pools = {side.index.key: side.index for side in rank.pool.sides.slots}
        found = {
            key: (block := int(kept.pages[0]), int(pools[key].generation[block]))
            for key, kept in staged.items()
        }

        def publish() -> None:
            for event in after:
                event.synchronize()
            for key, kept in staged.items():
                pools[key].commit(kept, name).release()

        if after:
            self._crews[rank.name].members[0].lane.submit(_told(publish), Urgency.RESTORE)
        else:
            publish()
        return found


def _told(work: Callable[[], None]) -> Callable[[], None]:
    """The same, for a lane: an exception is reported, not lost."""

    def run() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - reported
            report_uncaught(error)

    return run

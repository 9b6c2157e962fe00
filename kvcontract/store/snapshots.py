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

from kvcontract.contract.errors import UsageFault
from kvcontract.core.lane import Urgency
from kvcontract.core.pending import Pending, report_uncaught
from kvcontract.memory.slots import take_snapshots, written
from kvcontract.memory.stream import StreamEvent
from kvcontract.pool.handles import Reservation
from kvcontract.pool.index import Keys, Pages
from kvcontract.pool.keys import Keyer
from kvcontract.pool.request import RequestKv
from kvcontract.pool.side import SidePool
from kvcontract.pool.sides import Side, Windowed
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

    def rows(self, chosen: NDArray[np.bool_]) -> Artefact:
        """Some of its records."""
        return Artefact(self.keys[chosen], self.blocks[chosen], self.generations[chosen])


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


Kept = dict[str, tuple[Pages, NDArray[np.uint32]]]
"""By space, int32[n] blocks and uint32[n] generations of their occupants: a snapshot, or pages of a ring."""

Slots = tuple[Kept, tuple[StreamEvent, ...]]
"""What is kept, and events after which it is complete."""

Staged = dict[str, tuple[Reservation, Keys]]
"""By space, blocks that are filled, and what they are to be named."""


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
        self._publishing: dict[Pending[None], None] = {}
        self._shared: dict[bytes, int] = {}  # by name, how many requests began from a boundary

    @property
    def pending(self) -> tuple[Pending[None], ...]:
        """Those that are being copied, and will be found then."""
        with self._lock:
            return tuple(self._publishing)

    def of(self, req: RequestKv) -> list[Checkpoint]:
        """Those of a request, in order."""
        with self._lock:
            return list(self._taken.get(req, ()))

    def take(self, rank: Rank, req: RequestKv) -> None:
        """Checkpoints that the last step has written, and one where the request stands, if one is wanted.

        Never raises for what befalls them: a checkpoint is a chance, not a duty.
        """
        if req.released or req.copies:  # what it begins with is not in its slots yet (F3)
            return
        for position in sorted(req.beside.emitted):
            slots = req.beside.emitted.pop(position)
            self._kept(rank, req, position, partial(self._emitted, rank, req, position, slots))
        boundary = req.checkpoint
        if boundary is None or boundary != req.committed_tokens:
            return
        if not any(item.boundary == boundary and _there(rank, item) for item in self.of(req)):
            self._kept(rank, req, boundary, partial(self._snapshot, rank, req, boundary))

    def begun(self, rank: Rank, req: RequestKv) -> Checkpoint | None:
        """The checkpoint that a request began from, if it is on the device: a hole below may heal (C3)."""
        pages = req.hit_tokens // rank.pool.page_tokens
        if not pages or req.released or req.registered < pages:
            return None
        step = self._keyer.page_tokens // rank.pool.page_tokens
        records, found = req.record_keys(self._keyer), dict[str, Artefact]()
        for side in rank.pool.sides:
            numbers = side.needed(pages)
            held = side.index.hold(req.keys[numbers]) if len(numbers) else None
            if held is None or pages % step:
                continue
            with held:
                by = step if _paged(side) else 1
                blocks = held.pages.reshape(-1, by).copy()
                names = records[numbers.reshape(-1, by)[:, -1] // step]
                found[side.index.key] = Artefact(names, blocks, side.index.generation[blocks])
        return Checkpoint(req.hit_tokens, rolling=False, by_space=found) if found else None

    def _kept(self, rank: Rank, req: RequestKv, boundary: int, slots: Callable[[], Slots | None]) -> None:
        """Make a checkpoint, and remember it."""
        taken, rolling = self.of(req), req.new_tokens > 0 and boundary > req.prompt_len
        try:
            found = slots()
            made = None if found is None else self._made(rank, req, boundary, *found, rolling=rolling)
            if made is not None:
                self._outlived(rank, req, [item.boundary for item in taken], boundary)
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
            # One that was preempted may be here again, or not have come as far as it was.
            kept[:] = [item for item in kept if item.boundary < boundary]
            if kept and kept[-1].rolling and rolling:
                kept.pop()
            kept.append(made)

    def _outlived(self, rank: Rank, req: RequestKv, earlier: list[int], boundary: int) -> None:
        """A deeper checkpoint of one prompt makes others worth less, where nobody else leaves it (B14)."""
        size, apart = rank.pool.page_tokens, req.checkpoints.branches(req.prompt_len)
        if boundary in apart:
            self._begun(req.keys[boundary // size - 1], 2)
        began = req.hit_tokens if 0 < req.hit_tokens <= req.registered * size else 0
        if not earlier and began and self._begun(req.keys[began // size - 1], 1) == 1:
            earlier = [began]
        # One that was preempted has not come as far again as its earlier checkpoints.
        there = [position for position in earlier if position <= req.registered * size]
        for side in rank.pool.sides.slots:
            needed = side.needed(boundary // size)
            pages = [side.needed(position // size) for position in there if position not in apart]
            if pages:
                gone = np.setdiff1d(np.concatenate(pages), needed)  # of a ring, two may share some
                side.index.demote(req.keys[gone])

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
        slots: Kept,
        after: tuple[StreamEvent, ...],
        *,
        rolling: bool,
    ) -> Checkpoint:
        """What there is of a checkpoint, and where.

        Args:
            rank: of the request.
            req: the request.
            boundary: token position.
            slots: what is kept of the slots.
            after: events after which they are complete.
            rolling: see `Checkpoint`.
        """
        size, step = rank.pool.page_tokens, self._keyer.page_tokens // rank.pool.page_tokens
        pages, records = boundary // size, req.record_keys(self._keyer)
        found: dict[str, Artefact] = {}
        sides = {side.index.key: side for side in rank.pool.sides}
        parts = {
            key: (numbers, blocks, sides[key].index.generation[blocks])
            for key, (numbers, blocks) in req.beside.at(pages).items()
        }
        parts |= {key: (sides[key].needed(pages), *kept) for key, kept in slots.items()}
        for key, (numbers, blocks, generations) in parts.items():
            by = step if _paged(sides[key]) else 1
            names = records[numbers.reshape(-1, by)[:, -1] // step]
            found[key] = Artefact(names, blocks.reshape(-1, by), generations.reshape(-1, by))
        return Checkpoint(boundary, rolling, found, after)

    def _snapshot(self, rank: Rank, req: RequestKv, boundary: int) -> Slots | None:
        """Copy every live slot of a request; where the copies are, or None without room for all."""
        pages = boundary // rank.pool.page_tokens
        with ExitStack() as held, ExitStack() as undo:
            old: Kept = {}
            masks: dict[str, NDArray[np.bool_]] = {}
            staged: Staged = {}
            pairs: dict[str, list[tuple[int, int]]] = {}
            for view in (view for view in req.beside.slots if view.side.stored):
                pool, numbers = view.side.index, view.side.needed(pages)
                names = req.keys[numbers]
                there = pool.present(names)  # another request has been here
                kept = pool.hold(names[there]) if there.any() else None
                if kept is None:
                    there[:] = False
                else:  # until the others are in their places: room for those must not be made of these
                    held.enter_context(kept)
                    old[pool.key] = kept.pages.copy(), pool.generation[kept.pages]
                masks[pool.key] = there
                if there.all():
                    continue
                reserved = pool.reserve(int(np.count_nonzero(~there)))
                if reserved is None:
                    return None
                staged[pool.key] = undo.enter_context(reserved), names[~there].copy()
                places = view.places(pages)[~there]
                pairs[pool.key] = list(zip(places.tolist(), reserved.pages.tolist(), strict=True))
            after = take_snapshots(rank.memory, pairs)
            undo.pop_all()
            new = self._published(rank, req, staged, after)
        return _joined(masks, old, new), after

    def _emitted(self, rank: Rank, req: RequestKv, boundary: int, slots: dict[str, Reservation]) -> Slots:
        """What the step itself has written."""
        pages = boundary // rank.pool.page_tokens
        after, name = written(rank.memory, slots), req.keys[pages - 1 : pages].copy()
        staged: Staged = {key: (kept, name) for key, kept in slots.items()}
        return self._published(rank, req, staged, after), after

    def _published(self, rank: Rank, req: RequestKv, staged: Staged, after: tuple[StreamEvent, ...]) -> Kept:
        """Let blocks be found, once they are complete (F2); where they are, and of which occupants."""
        pools = {side.index.key: side.index for side in rank.pool.sides.slots}
        found = {
            key: (kept.pages.copy(), pools[key].generation[kept.pages]) for key, (kept, _) in staged.items()
        }
        if not after:
            _publish(pools, req, staged)
            return found
        done: Pending[None] = Pending()
        with self._lock:
            self._publishing[done] = None

        def end() -> None:
            try:
                _complete(staged, after)
                _publish(pools, req, staged)
            except Exception as error:  # noqa: BLE001 - reported
                report_uncaught(error)
            finally:
                with self._lock:
                    del self._publishing[done]
                done.settle(None)

        try:
            self._crews[rank.name].members[0].lane.submit(end, Urgency.RESTORE)
        except UsageFault:  # the store is being closed
            end()
        return found


def _complete(staged: Staged, after: tuple[StreamEvent, ...]) -> None:
    """Wait until blocks are filled; if the device fails they are given back, not published (F3)."""
    try:
        for event in after:
            event.synchronize()
    except BaseException:
        for kept, _ in staged.values():
            kept.release()
        raise


def _publish(pools: Mapping[str, SidePool], req: RequestKv, staged: Staged) -> None:
    for key, (kept, names) in staged.items():
        if req.suspect:  # B13: it has failed meanwhile
            kept.release()
        else:
            pools[key].commit(kept, names).release()


def _joined(masks: Mapping[str, NDArray[np.bool_]], old: Kept, new: Kept) -> Kept:
    """What was there, by its mask, and what is new, in the order of the pages."""
    found: Kept = {}
    for key, there in masks.items():
        blocks, generations = np.zeros(len(there), np.int32), np.zeros(len(there), np.uint32)
        for mask, kept in ((there, old.get(key)), (~there, new.get(key))):
            if kept is not None:
                blocks[mask], generations[mask] = kept
        found[key] = blocks, generations
    return found


def _there(rank: Rank, checkpoint: Checkpoint) -> bool:
    """Whether all of a checkpoint is on the device still."""
    pools = {side.index.key: side.index for side in rank.pool.sides}
    return all(
        pools[key].there(item.blocks, item.generations).all() for key, item in checkpoint.by_space.items()
    )


def _paged(side: Side) -> bool:
    """Whether what is kept of it are pages."""
    return isinstance(side, Windowed) or side.window is not None

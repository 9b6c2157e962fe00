"""What befalls a batch on its way: gathered and summed, framed, stored; or fetched, judged, delivered.

Each way is a generator that yields what it waits for.  Between two yields all bytes of a batch lie still in
host memory.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcontract.contract.errors import InternalFault
from kvcontract.core.lane import Urgency
from kvcontract.core.pending import Pending
from kvcontract.memory.copy import Blocks
from kvcontract.memory.device import StreamEvent
from kvcontract.memory.staging import Room, Staging
from kvcontract.store.chain import Steps
from kvcontract.store.landing import (
    DeviceLanding,
    Landing,
    Mover,
    PageKeys,
    Shard,
    read_headers,
    write_headers,
)
from kvcontract.tiers.base import Clock, Code, Codes, Lease, Lends, RecordKeys, Rows, SaveClass, Tier
from kvcontract.tiers.frame import Flaw
from kvcontract.tiers.guard import lends


class Ground(Protocol):
    """What a batch needs of its worker.

    Attributes:
        mover: None where pages lie in host memory.
        staging: memory by verb.
    """

    clock: Clock
    mover: Mover | None
    staging: dict[str, Staging]

    def count(self, name: str) -> None:
        """Add one to a counter."""
        ...


@dataclass(frozen=True, slots=True)
class Save:
    """Pages to a tier; see `Worker.save`."""

    ground: Ground
    tier: Tier
    page_keys: PageKeys
    blocks: Blocks
    cls: SaveClass
    deadline: float
    handoff: str | None
    after: StreamEvent | None

    def __call__(self, shard: Shard, pages: slice, column: int) -> Steps:
        """One batch."""
        del column
        keys, blocks, mover = shard.keys(self.page_keys[pages]), self.blocks[pages], self.ground.mover
        if mover is not None and lends(self.tier):
            return self._lent(self.tier, mover, shard, keys, blocks)
        return self._given(shard, keys, blocks)

    def _given(self, shard: Shard, keys: RecordKeys, blocks: Blocks) -> Steps:
        """Through memory of ours."""
        urgency = self.cls.urgency
        landing = yield from _landing(self.ground, "save", shard, blocks, urgency, self.deadline, self.after)
        if landing is None:
            return _all(blocks, Code.EXPIRED)
        try:
            sums = yield landing.gather()
            if sums is None:
                return _all(blocks, Code.FAILED)
            landing.headers[:] = shard.template.encode(keys, sums)
            codes = yield self.tier.save(
                keys, landing.buffers(), self.cls, self.deadline, handoff=self.handoff
            )
            return _checked(codes, len(keys))
        finally:
            landing.give_back()

    def _lent(self, tier: Lends, mover: Mover, shard: Shard, keys: RecordKeys, blocks: Blocks) -> Steps:
        """Straight into memory of the tier's: nothing is found there before its loan has ended (R3)."""
        loan = tier.reserve(keys, shard.record_bytes, self.cls, self.deadline, handoff=self.handoff)
        done, rows = np.zeros(len(keys), np.bool_), loan.rows
        try:
            if len(rows):
                starts, header = loan.address[rows], shard.template.header_bytes
                landing = DeviceLanding(
                    shard,
                    blocks[rows],
                    starts + header,
                    mover=mover,
                    urgency=self.cls.urgency,
                    after=self.after,
                )
                sums = yield landing.gather()
                if sums is not None:
                    write_headers(starts, shard.template.encode(keys[rows], sums))
                    done[rows] = True
        finally:
            codes = loan.end(done)
        return codes


@dataclass(frozen=True, slots=True)
class Load:
    """Records of a tier to pages; see `Worker.load`."""

    ground: Ground
    tier: Tier
    lease: Lease
    table: NDArray[np.int64]
    page_keys: PageKeys
    blocks: Blocks
    deadline: float

    def __call__(self, shard: Shard, pages: slice, column: int) -> Steps:
        """One batch."""
        keys, blocks, mover = shard.keys(self.page_keys[pages]), self.blocks[pages], self.ground.mover
        rows = self.table[pages, column]
        if mover is not None and lends(self.tier):
            return self._lent(self.tier, mover, shard, keys, blocks, rows)
        return self._given(shard, keys, blocks, rows)

    def _given(self, shard: Shard, keys: RecordKeys, blocks: Blocks, rows: Rows) -> Steps:
        """Through memory of ours."""
        landing = yield from _landing(self.ground, "load", shard, blocks, Urgency.RESTORE, self.deadline)
        if landing is None:
            return _all(blocks, Code.EXPIRED)
        try:
            codes = yield self.tier.load(self.lease, rows, landing.buffers(), self.deadline)
            return (yield from self._judged(landing, keys, _checked(codes, len(keys)), rows))
        finally:
            landing.give_back()

    def _lent(
        self, tier: Lends, mover: Mover, shard: Shard, keys: RecordKeys, blocks: Blocks, rows: Rows
    ) -> Steps:
        """Straight from memory of the tier's."""
        loan = tier.borrow(self.lease, rows, shard.record_bytes, self.deadline)
        done, lent = np.zeros(len(keys), np.bool_), loan.rows
        try:
            codes = loan.codes.copy()
            starts, header = loan.address[lent], shard.template.header_bytes
            landing = DeviceLanding(
                shard, blocks[lent], starts + header, mover=mover, urgency=Urgency.RESTORE
            )
            read_headers(starts, landing.headers)
            codes[lent] = yield from self._judged(landing, keys[lent], codes[lent], rows[lent])
            done[lent] = codes[lent] != Code.FAILED
            return codes
        finally:
            loan.end(done)

    def _judged(
        self, landing: Landing, keys: RecordKeys, given: Codes, rows: Rows
    ) -> Generator[Pending[Any], Any, Codes]:
        """Deliver what came; what is not as it was saved is CORRUPT, and the tier told to forget it (E7)."""
        codes = given.copy()
        came = np.flatnonzero(codes == Code.OK)
        flaws, claimed = landing.shard.template.verify(landing.headers[came], keys[came])
        for row, flaw in zip(came.tolist(), flaws, strict=True):
            if flaw is not None:
                codes[row] = Code.CORRUPT
                self.ground.count(f"flaw_{flaw.value}")
        sound = np.flatnonzero(codes[came] == Code.OK)
        sums = (yield landing.deliver(came[sound])) if len(sound) else claimed[sound]
        if sums is None:
            codes[came[sound]] = Code.FAILED
        else:
            for row in came[sound][(sums != claimed[sound]).any(axis=1)].tolist():
                codes[row] = Code.CORRUPT
                self.ground.count(f"flaw_{Flaw.CORRUPT_PAYLOAD.value}")
        damaged = rows[codes == Code.CORRUPT]
        if len(damaged):
            self.tier.discard(self.lease, damaged)
        landing.accept(np.flatnonzero(codes == Code.OK))
        return codes


def _landing(
    ground: Ground,
    verb: str,
    shard: Shard,
    blocks: Blocks,
    urgency: Urgency,
    deadline: float,
    after: StreamEvent | None = None,
) -> Generator[Pending[Any], Any, Landing | None]:
    """Memory for a batch; None if the deadline passed while others had it."""
    kind = Landing if ground.mover is None else DeviceLanding
    need = kind.room_bytes(shard, len(blocks))
    room: Any = None
    if need:
        asked = ground.staging[verb].take(need, urgency)
        waits = not asked.done
        try:
            room = yield asked
        except GeneratorExit:
            asked.on_done(lambda found: found.give_back() if isinstance(found, Room) else None)
            raise
        if isinstance(room, Exception):
            raise room
        if waits and ground.clock() > deadline:
            room.give_back()
            return None
    try:
        if ground.mover is None:
            return Landing(shard, blocks, room)
        address = DeviceLanding.rows_of(shard, len(blocks), room)
        return DeviceLanding(
            shard, blocks, address, mover=ground.mover, urgency=urgency, after=after, room=room
        )
    except BaseException:
        if room is not None:
            room.give_back()
        raise


def _checked(codes: Codes, count: int) -> Codes:
    """A tier's answer; refused if it is for other records (A15)."""
    if codes.shape != (count,):
        raise InternalFault(f"a tier answered {codes.shape} codes for {count} records")
    return codes


def _all(blocks: Blocks, code: Code) -> Codes:
    return np.full(len(blocks), code, np.uint8)

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
from kvcontract.memory.staging import Room, Staging
from kvcontract.memory.stream import StreamEvent
from kvcontract.store.chain import Steps
from kvcontract.store.landing import (
    Landing,
    MovedLanding,
    Mover,
    PageKeys,
    Shard,
    read_headers,
    write_headers,
)
from kvcontract.tiers.base import Clock, Code, Codes, Lease, RecordKeys, Rows, SaveClass, Tier
from kvcontract.tiers.cipher import KeyId, RecordCipher
from kvcontract.tiers.frame import Flaw
from kvcontract.tiers.guard import lends
from kvcontract.tiers.lending import Lends


class Ground(Protocol):
    """What a batch needs of its worker.

    Attributes:
        staging: memory by verb.
    """

    clock: Clock
    mover: Mover
    staging: dict[str, Staging]

    def count(self, name: str) -> None:
        """Add one to a counter."""
        ...


@dataclass(frozen=True, slots=True)
class Save:
    """Pages to a tier; see `Worker.save`.

    Attributes:
        cipher: of payloads that are encrypted with `key`; None: they are not.
    """

    ground: Ground
    tier: Tier
    page_keys: PageKeys
    blocks: Blocks
    cls: SaveClass
    deadline: float
    handoff: str | None
    after: StreamEvent | None
    cipher: RecordCipher | None
    key: KeyId

    def __call__(self, shard: Shard, pages: slice, column: int) -> Steps:
        """One batch."""
        del column
        keys, blocks, mover = shard.keys(self.page_keys[pages]), self.blocks[pages], self.ground.mover
        if shard.plan is not None and self.cipher is None and lends(self.tier):
            return self._lent(self.tier, mover, shard, keys, blocks)
        return self._given(shard, keys, blocks)

    def _given(self, shard: Shard, keys: RecordKeys, blocks: Blocks) -> Steps:
        """Through memory of ours."""
        use = _Use("save", self.cls.urgency, self.deadline, self.after, staged=self.cipher is not None)
        landing = yield from _landing(self.ground, shard, blocks, use)
        if landing is None:
            return _all(blocks, Code.EXPIRED)
        try:
            sums = yield landing.gather()
            if sums is None:
                return _all(blocks, Code.FAILED)
            seals = None
            if self.cipher is not None:
                identity, at = shard.template.fingerprint, landing.address[:, 0]
                seals = self.cipher.seal(self.key, keys, identity, at, shard.record.payload_bytes)
                sums = landing.summed(np.arange(len(keys)))  # of what is stored, so that anybody can check it
            landing.headers[:] = shard.template.encode(keys, sums, seals)
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
                landing = MovedLanding(
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
    """Records of a tier to pages; see `Worker.load`.

    Attributes:
        cipher: of payloads that may be encrypted; None: none is.
        clear: whether others are taken too.
    """

    ground: Ground
    tier: Tier
    lease: Lease
    table: NDArray[np.int64]
    page_keys: PageKeys
    blocks: Blocks
    deadline: float
    cipher: RecordCipher | None
    clear: bool

    def __call__(self, shard: Shard, pages: slice, column: int) -> Steps:
        """One batch."""
        keys, blocks, mover = shard.keys(self.page_keys[pages]), self.blocks[pages], self.ground.mover
        rows = self.table[pages, column]
        for event in shard.program.binding.moves if not mover.remote else ():
            event.synchronize()  # where a mover writes pages, the device waits
        if shard.plan is not None and self.cipher is None and lends(self.tier):
            return self._lent(self.tier, mover, shard, keys, blocks, rows)
        return self._given(shard, keys, blocks, rows)

    def _given(self, shard: Shard, keys: RecordKeys, blocks: Blocks, rows: Rows) -> Steps:
        """Through memory of ours."""
        use = _Use("load", Urgency.RESTORE, self.deadline, staged=self.cipher is not None)
        landing = yield from _landing(self.ground, shard, blocks, use)
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
            codes[(loan.address == 0) & (codes == Code.OK)] = Code.FAILED  # nothing was lent: nothing came
            starts, header = loan.address[lent], shard.template.header_bytes
            landing = MovedLanding(shard, blocks[lent], starts + header, mover=mover, urgency=Urgency.RESTORE)
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
        if self.cipher is None:
            self._leave_sealed(landing, codes, came)
        else:
            claimed = self._opened(self.cipher, landing, keys, codes, came, claimed)
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

    def _leave_sealed(self, landing: Landing, codes: Codes, came: Rows) -> None:
        """What somebody has encrypted is a miss for who cannot decrypt it, and stays: others may."""
        sealed = landing.shard.template.seals(landing.headers[came]).any(axis=1)
        for row in came[sealed & (codes[came] == Code.OK)].tolist():
            codes[row] = Code.MISS
            self.ground.count(f"flaw_{Flaw.UNKNOWN_KEY.value}")

    def _opened(
        self,
        cipher: RecordCipher,
        landing: Landing,
        keys: RecordKeys,
        codes: Codes,
        came: Rows,
        claimed: NDArray[np.uint32],
    ) -> NDArray[np.uint32]:
        """Decrypt what is as it was stored; a record whose key is not known here is a miss, and stays.

        Returns:
            uint32[k, segments], what the rows that came are to sum up to from now on.
        """
        template, size = landing.shard.template, landing.shard.record.payload_bytes
        rows = came[codes[came] == Code.OK]
        wrong = (landing.summed(rows) != claimed[codes[came] == Code.OK]).any(axis=1)
        left = rows[~wrong]
        address = landing.address[left, 0]
        flaws = cipher.open(
            template.seals(landing.headers[left]),
            keys[left],
            template.fingerprint,
            address,
            size,
            clear=self.clear,
        )
        found = dict.fromkeys(rows[wrong].tolist(), Flaw.CORRUPT_PAYLOAD)
        found |= {row: flaw for row, flaw in zip(left.tolist(), flaws, strict=True) if flaw is not None}
        for row, flaw in found.items():
            codes[row] = Code.MISS if flaw is Flaw.UNKNOWN_KEY else Code.CORRUPT
            self.ground.count(f"flaw_{flaw.value}")
        expected, sound = claimed.copy(), codes[came] == Code.OK
        expected[sound] = landing.summed(came[sound])
        return expected


@dataclass(frozen=True, slots=True)
class _Use:
    """What memory is wanted for; `staged`: payloads are changed there, so that none may lie in the pages."""

    verb: str
    urgency: Urgency
    deadline: float
    after: StreamEvent | None = None
    staged: bool = False


def _landing(
    ground: Ground, shard: Shard, blocks: Blocks, use: _Use
) -> Generator[Pending[Any], Any, Landing | None]:
    """Memory for a batch; None if the deadline passed while others had it."""
    kind = MovedLanding if shard.remote else Landing
    need = kind.room_bytes(shard, len(blocks), staged=use.staged)
    room: Any = None
    if need:
        asked = ground.staging[use.verb].take(need, use.urgency)
        waits = not asked.done
        try:
            room = yield asked
        except GeneratorExit:
            asked.on_done(lambda found: found.give_back() if isinstance(found, Room) else None)
            raise
        if isinstance(room, Exception):
            raise room
        if waits and ground.clock() > use.deadline:
            room.give_back()
            return None
    try:
        if not shard.remote:
            return Landing(shard, blocks, room)
        address = MovedLanding.rows_of(shard, len(blocks), room)
        return MovedLanding(
            shard, blocks, address, mover=ground.mover, urgency=use.urgency, after=use.after, room=room
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

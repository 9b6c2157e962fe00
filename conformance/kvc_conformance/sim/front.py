"""The tiers of a simulated world: the places where records are kept, and each process's own end of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from kvc_conformance.sim.prompts import Prompts
from kvc_conformance.sim.setting import AMPLE, TierSetting
from kvcontract.core.lane import InlineLane
from kvcontract.core.pending import Pending
from kvcontract.tiers.base import RECORD_KEY, Buffers, Code, Level, Op, RecordKeys, SaveClass, key_bytes
from kvcontract.tiers.dram import DramTier
from kvcontract.tiers.fault import Call, FaultTier, TellingFaultTier
from kvcontract.tiers.frame import header_bytes

AMPLE_BYTES: Final = 1 << 20

Clock = Callable[[], float]


class Shelf(DramTier):
    """The place behind a tier: records that may outlive the processes which write them.

    Attributes:
        kept: keys that have been stored.
        durable: those that a flush has made so; a crash may lose the others.
        doubtful: keys whose last save was a lie, or changed on the way.
        losses: per key, how often it was lost.
        untold: something was lost that nobody was told of.
    """

    def __init__(self, capacity_bytes: int, setting: TierSetting, clock: Clock) -> None:
        super().__init__(capacity_bytes, lane=InlineLane(), clock=clock, name=setting.name)
        self.setting = setting
        self.kept: set[bytes] = set()
        self.durable: set[bytes] = set()
        self.doubtful: set[bytes] = set()
        self.losses: Counter[bytes] = Counter()
        self.untold = False
        self.on_loss(lambda keys, _: self._lost(key_bytes(keys)))

    def _lost(self, names: Sequence[bytes]) -> None:
        self.kept.difference_update(names)
        self.durable.difference_update(names)
        self.losses.update(names)

    def save(
        self,
        keys: RecordKeys,
        buffers: Buffers,
        cls: SaveClass,
        deadline: float,
        *,
        handoff: str | None = None,
    ) -> Op:
        """Keeps what was stored."""
        op = super().save(keys, buffers, cls, deadline, handoff=handoff)
        names = key_bytes(keys)
        op.on_done(lambda codes: self.kept.update(names[at] for at in np.flatnonzero(codes == Code.OK)))
        return op

    def flush(self, level: Level, deadline: float) -> Pending[bool]:
        """Durable means here that a crash does not lose it."""
        if level == "durable" and self.setting.shared:
            self.durable |= self.kept
            return super().flush("visible", deadline)
        return super().flush(level, deadline)

    def reset(self, deadline: float) -> Pending[bool]:
        """Forgets what it keeps."""
        self.untold = self.untold or self.setting.shared
        self._lost([*self.kept])
        return super().reset(deadline)

    def drop(self, names: Sequence[bytes]) -> None:
        """Forget some records, as an eviction would."""
        if names:
            keys = np.frombuffer(b"".join(names), RECORD_KEY)
            with self.lookup(keys, math.inf).value as lease:
                self.discard(lease, np.arange(len(keys)))
            self._lost(names)

    def has(self, keys: RecordKeys) -> bool:
        """Whether all of these records are there."""
        with self.lookup(keys, math.inf).value as lease:
            return bool(lease.present.all())


class Front(FaultTier):
    """A process's own end of a tier.

    Attributes:
        frozen: answers nothing.
        late: calls that are not answered before some time.
        acknowledged: records that were saved, as far as this process was told, and how often they had been
            lost before.
        failed: page keys of which a save has failed.
        owed: pages that have to be there once all saves have landed, with their records.
        resets: how often this process has made it forget.
    """

    inner: Shelf

    def __init__(self, inner: Shelf) -> None:
        lasting = inner.setting.shared
        super().__init__(inner, persistent=lasting, shared=lasting)
        self.frozen = False
        self.late: dict[Call, float] = {}
        self.acknowledged: dict[bytes, int] = {}
        self.failed: set[bytes] = set()
        self.owed: dict[bytes, RecordKeys] = {}
        self.resets = 0

    def ready(self, now: float) -> list[Call]:
        """Calls that may be answered now."""
        if self.frozen:
            return []
        return [call for call in self.calls if self.late.get(call, now) <= now]


class TellingFront(Front, TellingFaultTier):
    """One whose tier says what it loses, and can forget."""

    def reset(self, deadline: float) -> Pending[bool]:
        """Counted."""
        self.resets += 1
        return super().reset(deadline)


def make_shelf(prompts: Prompts, setting: TierSetting, clock: Clock) -> Shelf:
    """A tier's place for records."""
    records = -(-setting.pages // prompts.step)
    size = AMPLE_BYTES if setting.pages == AMPLE else records * record_bytes(prompts)
    return Shelf(size, setting, clock)


def record_bytes(prompts: Prompts) -> int:
    """Bytes of all shards of a record of every part."""
    return sum(
        record.payload_bytes + header_bytes(len(record.segments))
        for space in prompts.spaces.values()
        for record in space.records
    )

"""One simulated process: a store, its ranks, its own ends of the tiers, and what callers hold of it."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvc_conformance.sim.loop import VirtualLoop
from kvc_conformance.sim.prompts import SECRET, SPACE, Memory, Prompts
from kvc_conformance.sim.setting import AMPLE, Setting, TierSetting
from kvcontract.core.lane import InlineLane, ManualLane
from kvcontract.core.pending import Pending
from kvcontract.memory.match import holds
from kvcontract.pool.index import Keys
from kvcontract.pool.pool import BlockPool
from kvcontract.pool.request import RequestKv
from kvcontract.store.core import StoreOptions
from kvcontract.store.marks import names_of
from kvcontract.store.policy import CancelToken, KvPrefix, ResolvePolicy
from kvcontract.store.rank import Rank
from kvcontract.store.relay import Stage
from kvcontract.store.saves import SealReport
from kvcontract.store.store import KvStore
from kvcontract.store.tier_policy import SAVE_DEADLINE_S, TierPolicy
from kvcontract.tiers.base import (
    RECORD_KEY,
    Buffers,
    Code,
    Level,
    Op,
    RecordKeys,
    SaveClass,
    key_bytes,
    record_keys,
)
from kvcontract.tiers.dram import DramTier
from kvcontract.tiers.fault import Call, FaultTier, TellingFaultTier
from kvcontract.tiers.frame import header_bytes

AMPLE_BYTES: Final = 1 << 20

_NOT_RELAYED: Final = ("pages_not_relayed_", "pages_not_to_relay_")

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


@dataclass(slots=True, eq=False)
class Asked:
    """A resolve.

    Attributes:
        count: tokens of the prompt.
        begun: number of the step in which it was asked.
        cached: whether prefix caching was on then.
        cancelled: by its token or its task.
        prefix: what came, until it is consumed or dropped.
        judged: whether its answer was looked at.
    """

    rank: int
    stream: int
    scope: int
    count: int
    policy: ResolvePolicy
    deadline: float
    begun: int
    token: CancelToken
    task: asyncio.Task[KvPrefix]
    cached: bool = True
    cancelled: bool = False
    judged: bool = False
    prefix: KvPrefix | None = None


@dataclass(slots=True, eq=False)
class Live:
    """An admitted request."""

    rank: int
    stream: int
    scope: int
    req: RequestKv
    begun: int


@dataclass(slots=True, eq=False)
class Saved:
    """A seal or retire."""

    report: Pending[SealReport]


@dataclass(slots=True, eq=False)
class Waited:
    """A barrier or reset that somebody waits for.

    Attributes:
        resets: how often each tier had been made to forget before.
    """

    kind: str
    task: asyncio.Task[Any]
    deadline: float
    begun: int
    saves: Sequence[Saved]
    relays: Sequence[Pending[Any]]
    acknowledged: dict[str, dict[bytes, int]]
    resets: dict[str, int]
    cancelled: bool = False


class Node:
    """One process.

    Args:
        number: of the process.
        prompts: what it computes.
        setting: of the world.
        shelves: the tiers that all processes share, by name.
        loop: of the world.

    Attributes:
        readers: workers that need each shard of a record.
        landing: shards that have come, of each record that is being loaded.
        landed: records of which the last one has just come.
        unasked: `not_asked` when records began to be owed.
        tainted: records that a relay has read, and not as they were saved.
    """

    def __init__(
        self, number: int, prompts: Prompts, setting: Setting, shelves: dict[str, Shelf], loop: VirtualLoop
    ) -> None:
        self.number, self.prompts = number, prompts
        self.tp = setting.degrees[number]
        self.readers = readers(prompts, self.tp)
        self.lane = ManualLane() if setting.manual else InlineLane()
        self.pools = [BlockPool(setting.pages, prompts.page) for _ in range(setting.ranks)]
        self.memory = [
            [Memory(prompts, worker, self.tp, setting.pages) for worker in range(self.tp)] for _ in self.pools
        ]
        self.fronts = [self._front(item, shelves, loop.time) for item in setting.tiers]
        ranks = [
            Rank(pool, [{SPACE: worker.binding} for worker in workers], name=str(rank))
            for rank, (pool, workers) in enumerate(zip(self.pools, self.memory, strict=True))
        ]
        self.store = KvStore(
            prompts.model,
            ranks,
            self.fronts,
            secret=SECRET,
            loop=loop,
            lane=self.lane,
            options=StoreOptions(tiers={item.name: policy(prompts, item) for item in setting.tiers}),
            save_budget=setting.save_budget,
            max_tp=max(prompts.degrees),
        )
        self.asked: dict[int, Asked] = {}
        self.live: dict[int, Live] = {}
        self.saves: list[Saved] = []
        self.waited: dict[int, Waited] = {}
        self.pins: dict[int, int] = {}
        self.landing: dict[bytes, int] = {}
        self.landed: list[bytes] = []
        self.unasked = 0
        self.tainted: set[bytes] = set()
        self.cache = self.keep = True

    def _front(self, setting: TierSetting, shelves: dict[str, Shelf], clock: Clock) -> Front:
        shelf = shelves.get(setting.name)
        if shelf is None:
            shelf = make_shelf(self.prompts, setting, clock)
        return TellingFront(shelf) if setting.telling else Front(shelf)

    @property
    def jobs(self) -> int:
        """Copies that wait for their turn."""
        return len(self.lane) if isinstance(self.lane, ManualLane) else 0

    @property
    def open(self) -> list[Asked]:
        """Resolves that have not ended."""
        return [asked for asked in self.asked.values() if not asked.task.done()]

    def not_asked(self) -> int:
        """Pages whose save has ended before the tier was asked."""
        counters = self.store.stats().counters
        found = counters.get("pages_not_saved_expired", 0) + counters.get("pages_not_saved_refused", 0)
        return found + sum(count for name, count in counters.items() if name.startswith(_NOT_RELAYED))

    def relays(self) -> tuple[Pending[Any], ...]:
        """Relays that have not ended."""
        return self.store._core.pages.pending  # noqa: SLF001 - no caller waits for them but through barriers

    def leases(self) -> int:
        """Leases on records of the tiers that nobody has released."""
        return sum(lease.active for front in self.fronts for lease in front.leases)

    def saving(self) -> set[bytes]:
        """Keys of the pages in the saves that tiers have not answered."""
        found: set[bytes] = set()
        for front in self.fronts:
            for call in front.calls:
                if call.verb == "save" and not call.ghost and not relayed(call):
                    for record in record_names(call.keys):
                        found.update(names_of(self.prompts.pages_of(record)) or [record])
        return found

    def loading(self, front: Front) -> Counter[bytes]:
        """How often each record is being read from a tier."""
        counted: Counter[bytes] = Counter()
        for call in front.calls:
            if call.verb == "load" and not relayed(call):
                counted.update(key_bytes(call.keys))
        return counted

    def right(self, item: Live | Asked, pages: Sequence[int], tokens: int) -> bool:
        """Whether the first tokens of a stream lie on these pages, for every worker."""
        return all(memory.right(pages, item.stream, item.scope, tokens) for memory in self.memory[item.rank])


def relayed(call: Call) -> bool:
    """Whether a load or save is a relay's, from one tier to the next."""
    owners = () if call.buffers is None else call.buffers.keepalive
    return any(isinstance(owner, Stage) for owner in owners)


def policy(prompts: Prompts, setting: TierSetting) -> TierPolicy:
    """How a store uses a tier."""
    return TierPolicy(
        write="back" if setting.back else "through",
        most_saving_bytes=setting.saving * record_bytes(prompts) or None,
        load_deadline_s=setting.load_s or None,
        save_deadline_s=SAVE_DEADLINE_S,
    )


def readers(prompts: Prompts, tp: int) -> tuple[int, ...]:
    """By shard, how many of the workers read its records."""
    return tuple(sum(holds(record, worker, tp) for worker in range(tp)) for record in prompts.records)


def records_of(prompts: Prompts, keys: Keys) -> RecordKeys:
    """[records * shards], keys of every shard of some records, record by record."""
    part, shards = prompts.part, len(prompts.records)
    columns = [record_keys(keys, part.id, shard, shards) for shard in range(shards)]
    return np.stack(columns, axis=1).reshape(-1)


def make_shelf(prompts: Prompts, setting: TierSetting, clock: Clock) -> Shelf:
    """A tier's place for records."""
    records = -(-setting.pages // prompts.step)
    size = AMPLE_BYTES if setting.pages == AMPLE else records * record_bytes(prompts)
    return Shelf(size, setting, clock)


def record_bytes(prompts: Prompts) -> int:
    """Bytes of all shards of a record."""
    return sum(record.payload_bytes + header_bytes(len(record.segments)) for record in prompts.records)


def record_names(keys: RecordKeys) -> Sequence[bytes]:
    """What each record is called, whatever its shard, as 16 bytes."""
    return names_of(keys["page_key"])

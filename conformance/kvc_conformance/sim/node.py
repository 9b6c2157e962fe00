"""One simulated process: a store, its ranks, its own ends of the tiers, and what callers hold of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvc_conformance.sim.device import Device
from kvc_conformance.sim.front import Clock, Front, Shelf, TellingFront, make_shelf, record_bytes
from kvc_conformance.sim.loop import VirtualLoop
from kvc_conformance.sim.memory import Memory
from kvc_conformance.sim.prompts import NAME_BYTES, SECRET, SPACE, Prompts
from kvc_conformance.sim.setting import Setting, TierSetting
from kvc_conformance.sim.spaces import Space
from kvcontract.core.lane import InlineLane, ManualLane
from kvcontract.core.pending import Pending
from kvcontract.memory.match import holds
from kvcontract.pool.chunk import Chunk
from kvcontract.pool.index import Keys
from kvcontract.pool.pool import BlockPool
from kvcontract.pool.request import RequestKv
from kvcontract.pool.side import SidePool
from kvcontract.pool.sides import NO_SIDES, make_sides
from kvcontract.store.core import StoreOptions
from kvcontract.store.marks import names_of
from kvcontract.store.policy import CancelToken, KvPrefix, ResolvePolicy
from kvcontract.store.rank import Rank
from kvcontract.store.relay import Stage
from kvcontract.store.saves import SealReport
from kvcontract.store.store import KvStore
from kvcontract.store.tier_policy import SAVE_DEADLINE_S, TierPolicy
from kvcontract.tiers.base import RecordKeys, key_bytes, record_keys
from kvcontract.tiers.fault import Call

_NOT_RELAYED: Final = ("pages_not_relayed_", "pages_not_to_relay_")


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
        pools: of full pages, by rank.
        sides: the pools beside it, by rank and space.
        watched: of each space, the pools of all ranks.
        memory: by rank, worker and space.
        devices: by rank.
        readers: by id of a part, workers that need each shard of a record.
        landing: shards that have come, of each record that is being loaded.
        landed: records of which the last one has just come.
        unasked: `not_asked` when records began to be owed.
        tainted: records that a relay has read, and not as they were saved.
    """

    def __init__(
        self, number: int, prompts: Prompts, setting: Setting, shelves: dict[str, Shelf], loop: VirtualLoop
    ) -> None:
        # long: what a process is made of, one line each
        self.number, self.prompts = number, prompts
        self.tp = setting.degrees[number]
        self.readers = {id_: readers(space, self.tp) for id_, space in prompts.by_part.items()}
        self.lane = ManualLane() if setting.manual else InlineLane()
        self.pools = [_pool(prompts, setting) for _ in range(setting.ranks)]
        self.sides: list[dict[str, SidePool]] = [
            {side.key: side.pool for side in pool.sides} for pool in self.pools
        ]
        self.watched = [
            (space, [self.pool_of(rank, space) for rank in range(setting.ranks)])
            for space in prompts.spaces.values()
        ]
        self.devices = [Device(deferred=setting.deferred) for _ in self.pools]
        self.memory = [self._memory(setting, device) for device in self.devices]
        self.fronts = [self._front(item, shelves, loop.time) for item in setting.tiers]
        ranks = [
            Rank(
                pool,
                [{key: memory.binding for key, memory in worker.items()} for worker in workers],
                name=str(rank),
            )
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

    def _memory(self, setting: Setting, device: Device) -> list[dict[str, Memory]]:
        """Of every worker of a rank."""
        blocks, images = {SPACE: setting.pages, **setting.blocks}, self.prompts.images
        return [
            {key: Memory(images, key, worker, self.tp, blocks[key], device) for key in self.prompts.spaces}
            for worker in range(self.tp)
        ]

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
    def waiting(self) -> int:
        """Resolves that wait for room."""
        return self.store._core.lines.waiting  # noqa: SLF001 - one gauge of many, asked for after every step

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
        parts = self.store._core.parts  # noqa: SLF001 - no caller waits for them but through barriers
        return tuple(pending for part in parts for pending in part.pending)

    def leases(self) -> int:
        """Leases on records of the tiers that nobody has released."""
        return sum(lease.active for front in self.fronts if len(front.leases) for lease in front.leases)

    def pool_of(self, rank: int, space: Space) -> BlockPool | SidePool:
        """Of one space of a rank."""
        return self.pools[rank] if space.key == SPACE else self.sides[rank][space.key]

    def pools_of(self, rank: int) -> list[BlockPool | SidePool]:
        """Of every space of a rank."""
        return [self.pools[rank], *self.sides[rank].values()]

    def saving(self) -> dict[int, set[bytes]]:
        """By part, keys of the blocks in the saves that tiers have not answered."""
        found: dict[int, set[bytes]] = {}
        for front in self.fronts:
            for call in front.calls:
                if call.verb == "save" and not call.ghost and not relayed(call):
                    for record in record_names(call.keys):
                        names = names_of(self.prompts.pages_of(record)) or [record]
                        found.setdefault(part_of(record), set()).update(names)
        return found

    def loading(self, front: Front) -> Counter[bytes]:
        """How often each record is being read from a tier."""
        counted: Counter[bytes] = Counter()
        for call in front.calls:
            if call.verb == "load" and not relayed(call):
                counted.update(key_bytes(call.keys))
        return counted

    def run(self, live: Live, chunk: Chunk, *, fails: bool) -> None:
        """What a step does to the memory: it leaves its rows and states, or what is nobody's."""
        device, stream, scope = self.devices[live.rank], live.stream, live.scope
        for memory in self.memory[live.rank]:
            for key, pairs in chunk.copies.items():
                memory[key].binding.copy_blocks(pairs)
        device.catch_up()
        slots = {f"slots-{group}": slot for group, slot in chunk.slots.items()}
        for memory in self.memory[live.rank]:
            for key, table in chunk.pages.items():
                if fails:
                    memory[key].spoil(table, chunk.start, chunk.end)
                else:
                    memory[key].write(table, stream, scope, chunk.start, chunk.end)
            for key, slot in slots.items():
                if fails:
                    memory[key].lose(slot)
                else:
                    memory[key].put(slot, stream, scope, chunk.end)
            for group, states in chunk.emits_at.items():
                for position, slot in states if not fails else ():
                    memory[f"slots-{group}"].put(slot, stream, scope, position)

    def checkpoints(self) -> tuple[int, int, int]:
        """How many were taken, found no room, and failed."""
        counters = self.store.stats().counters
        taken, without, failed = (
            counters.get(f"checkpoints_{end}", 0) for end in ("taken", "without_room", "failed")
        )
        return taken, without, failed

    def right(self, item: Live | Asked, pages: Sequence[int], tokens: int) -> bool:
        """Whether the first tokens of a stream lie on these pages, for every worker."""
        numbers = range(-(-tokens // self.prompts.page))
        return self.right_in(SPACE, item, pages[: len(numbers)], numbers, tokens)

    def right_in(
        self, key: str, item: Live | Asked, blocks: Sequence[int], numbers: Sequence[int], tokens: int
    ) -> bool:
        """Whether pages of a stream lie on blocks of one space, up to so many tokens, for every worker."""
        return all(
            worker[key].right(blocks, numbers, item.stream, item.scope, tokens)
            for worker in self.memory[item.rank]
        )

    def has_state(self, key: str, item: Live | Asked, slot: int, tokens: int) -> bool:
        """Whether a slot has the state after the first tokens of a stream, for every worker."""
        return all(
            worker[key].has(slot, item.stream, item.scope, tokens) for worker in self.memory[item.rank]
        )


def _pool(prompts: Prompts, setting: Setting) -> BlockPool:
    """Pools of one rank."""
    sides = NO_SIDES
    if prompts.beside:
        sides = make_sides(prompts.model, setting.blocks, setting.step_tokens)
    return BlockPool(setting.pages, prompts.page, sides=sides)


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


def readers(space: Space, tp: int) -> tuple[int, ...]:
    """By shard, how many of the workers read its records."""
    return tuple(sum(holds(record, worker, tp) for worker in range(tp)) for record in space.records)


def records_of(space: Space, keys: Keys) -> RecordKeys:
    """[records * shards], keys of every shard of some records, record by record."""
    shards = len(space.records)
    columns = [record_keys(keys, space.part.id, shard, shards) for shard in range(shards)]
    return np.stack(columns, axis=1).reshape(-1)


def record_names(keys: RecordKeys) -> list[bytes]:
    """What each record is called, whatever its shard: page key and part."""
    return [name[:NAME_BYTES] for name in key_bytes(keys)]


def part_of(record: bytes) -> int:
    """Id of the part of a record that is called so."""
    return record[-1]

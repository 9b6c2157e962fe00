"""The workers of one rank as one: the rank decides, each worker runs its share, the rank ANDs (E3).

A record is there only if every shard of it is; it has arrived, or left, only when every worker says so.
Nothing here is decided twice: the rank asks a tier once for all shards, and hands each worker its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.layout import layout
from kvcontract.contract.model import KvModel
from kvcontract.contract.snapshot import is_paged
from kvcontract.contract.wire import Part
from kvcontract.core.lane import Lane
from kvcontract.core.pending import Pending, all_of
from kvcontract.memory.copy import Blocks
from kvcontract.store.landing import PageKeys
from kvcontract.store.rank import Rank
from kvcontract.store.worker import After, Worker
from kvcontract.tiers.base import Clock, Code, Codes, Lease, Op, RecordKeys, SaveClass, Tier, record_keys
from kvcontract.tiers.cipher import NO_KEY, KeyId, RecordCipher, leaves


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """What an operation of a rank came to.

    Attributes:
        codes: u8[n], per record the worst of all workers.
        by_worker: u8[workers, n].
    """

    codes: Codes
    by_worker: NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """What one tier contributes to a load.

    Attributes:
        tier: which.
        lease: of that tier.
        rows: int64[n, columns], row of the lease for each shard; -1 where another tier gives it.
    """

    tier: Tier
    lease: Lease
    rows: NDArray[np.int64]


class Crew:
    """The workers of one rank.

    Args:
        model: the declaration.
        rank: its memory, one mapping of bindings a worker.
        max_tp: largest degree of tensor parallelism that may share the records.
        lane: where all of them copy and check; None makes a thread for each.
        clock: what deadlines are measured on.
        cipher: of what leaves the process; None: nothing is encrypted.

    Raises:
        UsageFault: declaration and memory do not fit.
        PluginFault: a conversion cannot be found.
    """

    def __init__(
        self,
        model: KvModel,
        rank: Rank,
        *,
        max_tp: int,
        lane: Lane | None,
        clock: Clock,
        cipher: RecordCipher | None = None,
    ) -> None:
        self.cipher = cipher
        self.members: list[Worker] = []
        with ExitStack() as undo:
            for number, memory in enumerate(rank.memory):
                held = layout(model, number, rank.tp)
                made = Worker(model, held, memory, max_tp=max_tp, lane=lane, clock=clock, cipher=cipher)
                self.members.append(made)
                undo.callback(made.close, clock())
            undo.pop_all()

    @property
    def operations(self) -> int:
        """Operations in flight, of all workers."""
        return sum(worker.stats()["operations"] for worker in self.members)

    def close(self, deadline: float) -> bool:
        """Take no more work and wait for what runs; False if something still does (C10)."""
        ended = [worker.close(deadline) for worker in self.members]  # all of them, whatever the first says
        return all(ended)


class Workers:
    """All workers of a rank, for one part.

    Args:
        model: the declaration.
        part: what is saved and restored as one unit.
        crew: of the rank.
        max_tp: largest degree of tensor parallelism that may share the records.

    Attributes:
        columns: shards of one record.
        shard_bytes: of each of them, frame included.
        record_pages: blocks that it spans.
        saved_record_bytes, loaded_record_bytes: of all shards, as often as they are written, or read.

    Raises:
        UsageFault: a shard would be written by nobody.
    """

    def __init__(self, model: KvModel, part: Part, crew: Crew, *, max_tp: int) -> None:
        self.part = part
        self._cipher = crew.cipher
        self._workers = crew.members
        self.columns = part.shards(max_tp)
        self.record_pages = model.record_pages if is_paged(model.group(part.groups[0])) else 1
        self._reads = [np.array(worker.reads(part), np.int64) for worker in self._workers]
        self._writers = [worker for worker in self._workers if worker.writes(part)]
        written = sorted(shard for worker in self._writers for shard in worker.writes(part))
        if written != list(range(self.columns)):
            raise UsageFault(
                f"part {part.name}: {len(self._workers)} workers would write shards {written} of"
                f" {self.columns} (max_tp {max_tp}); each must be written by exactly one"
            )
        sizes = self.shard_bytes = tuple(self._record_bytes(shard) for shard in range(self.columns))
        self.saved_record_bytes = sum(sizes)
        self.loaded_record_bytes = sum(sizes[shard] for reads in self._reads for shard in reads.tolist())

    def __len__(self) -> int:
        return len(self._workers)

    def __getitem__(self, number: int) -> Worker:
        return self._workers[number]

    def record_keys(self, page_keys: PageKeys) -> RecordKeys:
        """Keys of every shard of some records.

        Args:
            page_keys: uint64[n, 2], names of the records.

        Returns:
            [n * columns], record by record, and within one shard by shard.
        """
        columns = [record_keys(page_keys, self.part.id, shard, self.columns) for shard in range(self.columns)]
        joined: RecordKeys = np.stack(columns, axis=1).reshape(-1)
        return joined

    def readers(self, shard: int) -> tuple[int, ...]:
        """Which workers need a shard."""
        return tuple(number for number, reads in enumerate(self._reads) if shard in reads)

    def save(
        self,
        tier: Tier,
        page_keys: PageKeys,
        blocks: Blocks,
        cls: SaveClass,
        deadline: float,
        after: After | None = None,
        *,
        handoff: str | None = None,
        key: KeyId | None = NO_KEY,
    ) -> Pending[Verdict]:
        """Every worker saves its share; arguments are those of `Worker.save`, blocks int[n, record_pages].

        `after` is waited for by each worker that writes, on its own lane or device.  Where the tier's records
        are to be encrypted and no key is known (`key` is None), nothing is saved.
        """
        used = key if self._encrypts(tier) else NO_KEY
        if used is None:
            refused = np.full((len(self._workers), len(page_keys)), Code.REFUSED, np.uint8)
            return Pending.of(Verdict(refused[0], refused))
        blocks = self._shaped(blocks)
        ops = [
            worker.save(tier, self.part, page_keys, blocks, cls, deadline, after, handoff=handoff, key=used)
            for worker in self._writers
        ]
        numbers = [self._workers.index(worker) for worker in self._writers]
        return all_of(ops).map(lambda codes: self._verdict(len(page_keys), numbers, codes))

    def _encrypts(self, tier: Tier) -> bool:
        return self._cipher is not None and leaves(tier.capabilities)

    def load(
        self,
        sources: Sequence[Source],
        page_keys: PageKeys,
        blocks: Blocks,
        deadline: float,
        *,
        key: KeyId | None = NO_KEY,
    ) -> Pending[Verdict]:
        """Every worker loads its share; settles once all have (C12).

        Args:
            sources: together they give every record.
            page_keys: uint64[n, 2], names of the records.
            blocks: int[n, record_pages], where the pages are to lie, none twice; see `Worker.load`.
            deadline: no batch is begun after it.
            key: that the pages' scope writes with; where it has one, records in the clear are not taken.
        """
        blocks, ops = self._shaped(blocks), list[Op]()
        who: list[tuple[int, NDArray[np.int64]]] = []
        every = np.arange(len(page_keys))
        for source in sources:
            clear = key == NO_KEY if self._encrypts(source.tier) else None
            if (source.rows >= 0).all():
                for number, worker in enumerate(self._workers):
                    rows = source.rows[:, self._reads[number]].ravel()
                    op = worker.load(
                        source.tier,
                        source.lease,
                        rows,
                        self.part,
                        page_keys,
                        blocks,
                        deadline,
                        clear=clear,
                    )
                    ops.append(op)
                    who.append((number, every))
                continue
            for number, pages, op in self._pieces(source, page_keys, blocks, deadline, clear):
                ops.append(op)
                who.append((number, pages))
        return all_of(ops).map(lambda codes: self._merged(len(page_keys), who, codes))

    def _pieces(
        self, source: Source, page_keys: PageKeys, blocks: Blocks, deadline: float, clear: bool | None
    ) -> list[tuple[int, NDArray[np.int64], Op]]:
        """Loads of a tier that has only some of the records: one for each worker and shard."""
        found = []
        for shard in range(self.columns):
            pages = np.flatnonzero(source.rows[:, shard] >= 0)
            if not len(pages):
                continue
            rows, keys, where = source.rows[pages, shard], page_keys[pages], blocks[pages]
            for number in self.readers(shard):
                op = self._workers[number].load(
                    source.tier,
                    source.lease,
                    rows,
                    self.part,
                    keys,
                    where,
                    deadline,
                    only=(shard,),
                    clear=clear,
                )
                found.append((number, pages, op))
        return found

    def _merged(
        self, count: int, who: list[tuple[int, NDArray[np.int64]]], codes: tuple[Codes, ...]
    ) -> Verdict:
        by_worker = np.full((len(self._workers), count), Code.OK, np.uint8)
        for (number, pages), found in zip(who, codes, strict=True):
            by_worker[number, pages] = np.maximum(by_worker[number, pages], found)
        return Verdict(by_worker.max(axis=0), by_worker)

    def _verdict(self, count: int, numbers: list[int], codes: tuple[Codes, ...]) -> Verdict:
        every = np.arange(count)
        return self._merged(count, [(number, every) for number in numbers], codes)

    def _shaped(self, blocks: Blocks) -> Blocks:
        return blocks if self.record_pages > 1 else blocks.reshape(-1)

    def _record_bytes(self, shard: int) -> int:
        return self._workers[self.readers(shard)[0]].record_bytes(self.part, shard)

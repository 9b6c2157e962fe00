"""Relays: records on their way from one tier to the next, without the device (write-back).

A page that a tier gets by write-back is *expected* from the moment it begins its way to the tier above, so
that whoever waits for what was submitted waits for it too.  Once it has landed there it is *queued*, then
copied: looked up above, loaded into a buffer of bounded size, saved below, batch by batch.  Nothing pins a
device page meanwhile.  Every page ends in exactly one way (R8).

A relay waits behind the loads that were under way before it, and a tier takes one batch of them at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import numpy as np

from kvcontract.core.pending import Once, Pending, all_of, report_uncaught
from kvcontract.pool.index import Keys
from kvcontract.store.hop import Hop, Item, Relay, by_relay, keys_of
from kvcontract.store.known import Known
from kvcontract.store.marks import Flags, names_of
from kvcontract.store.rank import Berth
from kvcontract.store.saves import Run
from kvcontract.store.stats import Tally
from kvcontract.store.tier_policy import TierPolicy
from kvcontract.tiers.base import Buffers, Code, Codes, Lease, RecordKeys, SaveClass
from kvcontract.tiers.cipher import NO_KEY, RecordCipher, leaves

BUFFER_BYTES: Final = 32 * 2**20
"""Memory that the relays to one tier go through; at least a record."""

MOST_WAITING: Final = 65_536
"""Records that may wait for their turn, a tier; beyond that they are shed, and wanted again later (C5)."""

YIELD_S: Final = 1.0
"""Longest time that a batch waits for the loads before it."""


class RelayClock(Protocol):
    """Time, and being called later."""

    def time(self) -> float:
        """Now."""
        ...

    def later(self, delay_s: float, function: Callable[[], object]) -> None:
        """Call after a while."""
        ...


@dataclass(frozen=True, slots=True)
class Records:
    """What a record is to a tier.

    Attributes:
        keys: of the shards of some records, uint64[n, 2] -> [n * shards], record by record.
        shard_bytes: of each shard, frame included.
        pages: that it spans.
    """

    keys: Callable[[Keys], RecordKeys]
    shard_bytes: tuple[int, ...]
    pages: int

    @property
    def total_bytes(self) -> int:
        """Of all shards."""
        return sum(self.shard_bytes)


@dataclass(slots=True, eq=False)
class Stage:
    """What owns the buffers of a relay's operations."""

    memory: Any


class Relays:
    """All relays of a store; thread-safe, never blocks.

    Args:
        known: of each tier, fastest first.
        policies: of each tier.
        records: what one is.
        tally: where everything is counted.
        clock: the store's.
        loads: those in flight, which go first.
        cipher: of what leaves the process; None: nothing is encrypted.
    """

    def __init__(
        self,
        known: Sequence[Known],
        policies: Sequence[TierPolicy],
        records: Records,
        tally: Tally,
        clock: RelayClock,
        loads: Callable[[], Sequence[Pending[None]]],
        cipher: RecordCipher | None = None,
    ) -> None:
        self._cipher = cipher
        self._records = records
        self._tally = tally
        self._clock = clock
        self._loads = loads
        self._lock = threading.Lock()
        self._open: dict[Relay, None] = {}
        self._closed = False
        self._given_up = 0
        self._hops = {
            number: Hop(
                number, known[number - 1], known[number], policy, _buffer_bytes(policy, records.total_bytes)
            )
            for number, policy in enumerate(policies)
            if policy.back
        }

    @property
    def targets(self) -> Sequence[int]:
        """Numbers of the tiers that get their pages from the one above."""
        return tuple(self._hops)

    @property
    def pending(self) -> tuple[Pending[Codes], ...]:
        """Relays that have not ended, oldest first."""
        with self._lock:
            return tuple(relay.done for relay in self._open)

    @property
    def pages(self) -> int:
        """Pages on their way, or waiting for it."""
        with self._lock:
            return sum(len(hop.names) for hop in self._hops.values()) * self._records.pages

    @property
    def copying(self) -> int:
        """Pages that are being copied now."""
        with self._lock:
            return sum(len(hop.batch) for hop in self._hops.values()) * self._records.pages

    def expect(self, number: int, rank: Berth, run: Run, rows: Any) -> bool:
        """Records of a run are to be copied to a tier once they are in the one above.

        Args:
            number: of the tier.
            rank: whose pages.
            run: of the records.
            rows: int64[n], of its generations; those that are on their way there already are left out.

        Returns:
            Whether there were any; the caller looks then whether they have arrived meanwhile.
        """
        hop, numbers = self._hops[number], rows + run.first
        names = names_of(run.keys[numbers])
        with self._lock:
            fresh = [at for at, name in enumerate(names) if name not in hop.names]
            shed = max(0, len(fresh) + len(hop.names) - MOST_WAITING)
            fresh = [] if self._closed else fresh[: len(fresh) - shed]
            if fresh:
                mine = numbers[fresh]
                relay = Relay(
                    rank, run, mine, run.pages[mine, -1], run.generations[rows[fresh]], run.keys[mine].copy()
                )
                self._open[relay] = None
                for row, at in enumerate(fresh):
                    hop.names[names[at]] = None
                    hop.expected[names[at]] = relay, row
        if fresh:
            self._count("pages_to_relay", hop, len(fresh))
        if shed:
            self._count("pages_not_to_relay", hop, shed)
        return bool(fresh)

    def coming(self, number: int, keys: Keys) -> Flags:
        """Which records, uint64[n, 2], are on their way to a tier by relay, bool[n]."""
        hop = self._hops.get(number)
        if hop is None:
            return np.zeros(len(keys), np.bool_)
        with self._lock:
            return np.array([name in hop.names for name in names_of(keys)], np.bool_)

    def arrived(self, number: int, keys: Keys, there: Flags) -> None:
        """Records have ended their way to a tier: `there`, bool[n], or not; the next one may go on."""
        hop = self._hops.get(number + 1)
        if hop is None or not hop.expected:
            return
        lost: list[Item] = []
        with self._lock:
            for name, ok in zip(names_of(keys), there.tolist(), strict=True):
                item = hop.expected.pop(name, None)
                if item is not None:
                    (hop.queue if ok else lost).append(item)
        if lost:
            self._end(hop, lost, np.full(len(lost), Code.MISS, np.uint8))
            self.arrived(hop.number, keys_of(lost), np.zeros(len(lost), np.bool_))
        self._drive(hop)

    def conclude(self) -> int:
        """Begin nothing more; what has not begun ends here.  Returns how many pages were never copied."""
        with self._lock:
            self._closed = True
        for hop in self._hops.values():
            with self._lock:
                items = [*hop.expected.values(), *hop.queue]
                hop.expected.clear()
                hop.queue.clear()
            if items:
                self._given_up += len(items) * self._records.pages
                self._end(hop, items, np.full(len(items), Code.SHED, np.uint8))
        return self._given_up + self.copying

    # One batch after the other

    def _drive(self, hop: Hop) -> None:
        """Begin batches until one is under way; nobody goes deeper than that, however fast tiers answer."""
        with self._lock:
            if hop.driving:
                return
            hop.driving = True
        while True:
            with self._lock:
                if hop.batch or not hop.queue or self._closed:
                    hop.driving = False
                    return
                most = hop.buffer_bytes // self._records.total_bytes
                hop.batch = [hop.queue.popleft() for _ in range(min(most, len(hop.queue)))]
            self._guarded(hop, partial(self._yield, hop))

    def _guarded(self, hop: Hop, step: Callable[[], object]) -> None:
        """Whatever goes wrong in a step, the batch has its end."""
        try:
            step()
        except Exception as error:  # noqa: BLE001 - reported; pages must not stay on their way for ever (R8)
            self._tally.count("faults")
            report_uncaught(error)
            self._finish(hop, np.full(len(hop.batch), Code.FAILED, np.uint8))

    def _yield(self, hop: Hop) -> None:
        """Let the loads go first that are under way, for a while."""
        loads = self._loads()
        if not loads:
            self._look(hop)
            return
        once = Once(lambda: self._guarded(hop, partial(self._look, hop)))
        all_of(loads).on_done(lambda _: once())
        self._clock.later(YIELD_S, once)

    def _look(self, hop: Hop) -> None:
        # One deadline for all three steps: it is passed down, never added up (A20).
        deadline = self._clock.time() + hop.policy.save_deadline_s
        keys = self._records.keys(keys_of(hop.batch))
        query = hop.source.tier.lookup(keys, deadline)
        answered = Once(lambda: self._guarded(hop, lambda: self._found(hop, keys, query.value, deadline)))
        query.on_done(lambda _: answered())
        if not query.done:
            self._clock.later(hop.policy.save_deadline_s, lambda: self._too_late(hop, query, answered))

    def _too_late(self, hop: Hop, query: Pending[Lease], answered: Once) -> None:
        """The look-up has not been answered in time: whoever gives up leaves its release behind (A2)."""
        if answered.take():
            query.on_done(Lease.release)
            self._finish(hop, np.full(len(hop.batch), Code.EXPIRED, np.uint8))

    def _found(self, hop: Hop, keys: RecordKeys, lease: Lease, deadline: float) -> None:
        count, columns = len(hop.batch), len(self._records.shard_bytes)
        codes = np.full(count, Code.FAILED, np.uint8)
        if lease.failed or lease.present.shape != keys.shape:  # A15: nothing is known
            self._tally.count("tier_answers_refused", int(not lease.failed))
            lease.release()
            self._finish(hop, codes)
            return
        present = lease.present.reshape(count, columns).all(axis=1)
        rows = np.flatnonzero(present)
        if len(rows) < count:
            codes[~present] = Code.MISS
            self._missed(hop, np.flatnonzero(~present))
        if not len(rows) or self._late(codes, rows, deadline):
            lease.release()
            self._finish(hop, codes)
            return
        places = (rows[:, None] * columns + np.arange(columns)).ravel()
        buffers = self._buffers(hop, len(rows))
        hop.lease = lease  # whatever the tier does with the operation, it is the relay's to give back (A6)
        op = hop.source.tier.load(lease, places, buffers, deadline)

        def landed(found: Codes) -> None:
            hop.lease = None
            lease.release()
            self._guarded(hop, lambda: self._landed(hop, keys, rows, places, buffers, codes, found, deadline))

        op.on_done(landed)

    def _landed(
        self,
        hop: Hop,
        keys: RecordKeys,
        rows: Any,
        places: Any,
        buffers: Buffers,
        codes: Codes,
        found: Codes,
        deadline: float,
    ) -> None:
        """What was loaded is in the buffer: save what came whole."""
        columns = len(self._records.shard_bytes)
        codes[rows] = found.reshape(-1, columns).max(axis=1)
        self._encrypt(hop, keys[places], rows, buffers, codes)
        whole = np.flatnonzero(codes[rows] == Code.OK)
        if not len(whole) or self._late(codes, rows[whole], deadline):
            self._finish(hop, codes)
            return
        mine = (whole[:, None] * columns + np.arange(columns)).ravel()
        begun = self._clock.time()
        op = hop.target.tier.save(keys[places[mine]], buffers.take(mine), SaveClass.WRITE_BACK, deadline)

        def saved(answer: Codes) -> None:
            codes[rows[whole]] = answer.reshape(-1, columns).max(axis=1)
            self._guarded(hop, lambda: self._booked(hop, codes, begun))

        op.on_done(saved)

    def _encrypt(self, hop: Hop, keys: RecordKeys, rows: Any, buffers: Buffers, codes: Codes) -> None:
        """What leaves the process leaves it encrypted; else nobody looks into a frame on the way."""
        cipher = self._cipher
        if cipher is None or not leaves(hop.target.tier.capabilities):
            return
        columns, pieces = len(self._records.shard_bytes), buffers.pieces()
        for at, row in enumerate(rows.tolist()):
            relay, _ = hop.batch[row]
            key = relay.run.key
            if codes[row] != Code.OK or key == NO_KEY:
                continue
            if key is None:
                codes[row] = Code.REFUSED
                continue
            for place in range(at * columns, (at + 1) * columns):
                address, size = pieces[place][0]
                sealed = cipher.seal_frame(key, keys[place].tobytes(), address, size)
                codes[row] = max(int(codes[row]), sealed)

    def _late(self, codes: Codes, rows: Any, deadline: float) -> bool:
        """Whether the deadline has passed: nothing further is issued (A9)."""
        late = self._clock.time() > deadline
        if late:
            codes[rows] = Code.EXPIRED
        return late

    def _booked(self, hop: Hop, codes: Codes, begun: float) -> None:
        """The target has answered: what it has is known, and may go further."""
        at, good = 0, int(np.count_nonzero(codes == Code.OK))
        for relay, rows in by_relay(hop.batch):
            ok = rows[codes[at : at + len(rows)] == Code.OK]
            at += len(rows)
            if len(ok):
                chain = relay.run.keys, relay.numbers[ok], relay.run.content
                hop.target.relayed(
                    relay.rank, relay.pages[ok], relay.keys[ok], relay.generations[ok], begun, chain
                )
        size, seconds = good * self._records.total_bytes, self._clock.time() - begun
        self._tally.moved(hop.target.tier.name, "save", good * self._records.pages, size, seconds)
        self._finish(hop, codes)

    def _missed(self, hop: Hop, rows: Any) -> None:
        """The source has lost them meanwhile: no more is it believed to have them, so they are saved anew."""
        self._tally.count(f"relays_lost_{hop.source.tier.name}", len(rows) * self._records.pages)
        for relay, mine in by_relay([hop.batch[row] for row in rows.tolist()]):
            hop.source.absent(relay.rank, relay.pages[mine], relay.keys[mine], relay.generations[mine])

    def _finish(self, hop: Hop, codes: Codes) -> None:
        """End the batch that is under way, and go on with the next."""
        with self._lock:
            items, hop.batch = hop.batch, []
        if not items:
            return  # it has ended already
        keys = keys_of(items)
        self._end(hop, items, codes)
        self.arrived(hop.number, keys, codes == Code.OK)
        self._drive(hop)

    def _end(self, hop: Hop, items: Sequence[Item], codes: Codes) -> None:
        """Give records their one terminal, counted (R8)."""
        for code, number in enumerate(np.bincount(codes).tolist()):
            if number:
                name = "pages_relayed" if code == Code.OK else f"pages_not_relayed_{Code(code).name.lower()}"
                self._count(name, hop, number)
        ended = []
        with self._lock:
            for (relay, row), code in zip(items, codes.tolist(), strict=True):
                del hop.names[relay.keys[row].tobytes()]
                relay.codes[row] = code
                relay.left -= 1
                if not relay.left:
                    del self._open[relay]
                    ended.append(relay)
        for relay in ended:
            relay.done.settle(relay.codes)

    def _count(self, name: str, hop: Hop, records: int) -> None:
        self._tally.count(f"{name}_{hop.target.tier.name}", records * self._records.pages)

    def _buffers(self, hop: Hop, count: int) -> Buffers:
        """Memory of so many records."""
        memory = hop.buffer()
        sizes = np.tile(np.array(self._records.shard_bytes, np.int64), count)
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)[:-1]])
        return Buffers(
            memory.ctypes.data + starts, sizes, np.arange(len(sizes) + 1, dtype=np.int64), (Stage(memory),)
        )


def _buffer_bytes(policy: TierPolicy, record_bytes: int) -> int:
    limit = BUFFER_BYTES if policy.most_saving_bytes is None else min(BUFFER_BYTES, policy.most_saving_bytes)
    return max(record_bytes, limit)

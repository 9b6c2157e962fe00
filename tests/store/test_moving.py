"""Workers whose pages a mover copies: batches in flight, memory of tiers, turns; on host and device."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.layout import layout
from kvcontract.contract.model import Arena, Field, Group, KvModel, WeightIdentity
from kvcontract.core.lane import InlineLane, Lane, ManualLane, ThreadLane, Urgency
from kvcontract.core.pending import Pending
from kvcontract.memory.binding import Binding
from kvcontract.memory.checksum import SegmentSums
from kvcontract.memory.copy import Blocks, Program, checked_blocks
from kvcontract.memory.pinned import host_memory
from kvcontract.memory.slab import PAGE_BYTES, Allocate
from kvcontract.store.worker import DEPTH, Worker
from kvcontract.tiers.base import Buffers, Code, Op, RecordKeys, SaveClass, Tier
from kvcontract.tiers.dram import DramTier
from kvcontract.tiers.guard import GuardedTier
from kvcontract.tiers.lending import Lends, Loan

PAGE, BLOCKS, FOREVER, WAIT_S = 3, 33, math.inf, 60.0
OK = Code.OK


def model_of() -> KvModel:
    """Two layers of K and V."""
    kv = tuple(Field(name=name, dtype="bfloat16", axes={"head": 4, "dim": 32}) for name in "kv")
    return KvModel(
        contract=1,
        name="toy",
        weights=WeightIdentity(kind="digest", value="a"),
        numerics="test",
        page_tokens=PAGE,
        groups=(Group(name="kv"),),
        arenas=tuple(Arena.planes(name=f"l{n}", group="kv", layer=n, fields=kv) for n in range(2)),
    )


class FarMover:
    """A mover over pages in host memory that copies in a lane, as a device does in its streams."""

    allocate: Allocate | None = None
    remote = True

    def __init__(self, lane: Lane) -> None:
        self.lane, self.fails = lane, False

    def plan(self, program: Program, segments: tuple[int, ...]) -> Any:
        """What it has to know."""
        return program, SegmentSums((program.payload_bytes,), segments)

    def out(
        self, plan: Any, blocks: Blocks, address: NDArray[np.int64], *, urgency: Urgency, after: Any = None
    ) -> Pending[Any]:
        """Pages to host memory, in the lane."""
        program, sums = plan
        checked_blocks(program, blocks)
        return self._later(lambda: self._out(program, sums, blocks, address, after), urgency)

    def _out(self, program: Program, sums: SegmentSums, blocks: Blocks, address: Any, after: Any) -> Any:
        if after is not None:
            after.synchronize()
        staged = torch.empty(len(blocks), program.payload_bytes, dtype=torch.uint8)
        program.gather(blocks, staged)
        for row, start in enumerate(address.tolist()):
            ctypes.memmove(start, staged[row].data_ptr(), staged.shape[1])
        return sums.sums(address[:, None])

    def into(
        self, plan: Any, blocks: Blocks, address: NDArray[np.int64], *, urgency: Urgency
    ) -> Pending[Any]:
        """Host memory to pages, in the lane."""
        program, sums = plan
        checked_blocks(program, blocks, holes=True)
        return self._later(lambda: self._into(program, sums, blocks, address), urgency)

    def _into(self, program: Program, sums: SegmentSums, blocks: Blocks, address: Any) -> Any:
        staged = torch.empty(len(blocks), program.payload_bytes, dtype=torch.uint8)
        for row, start in enumerate(address.tolist()):
            ctypes.memmove(staged[row].data_ptr(), start, staged.shape[1])
        program.scatter(blocks, staged)
        at = staged.data_ptr() + staged.shape[1] * np.arange(len(staged), dtype=np.int64)
        return sums.sums(at[:, None])

    def _later(self, work: Callable[[], Any], urgency: Urgency) -> Pending[Any]:
        landed: Pending[Any] = Pending()
        self.lane.submit(lambda: landed.settle(None if self.fails else work()), urgency)
        return landed

    def stats(self) -> dict[str, int]:
        """None."""
        return {}

    def close(self, deadline_s: float) -> bool:
        """The lane is somebody else's."""
        del deadline_s
        return True


DEVICES = ["near", "host", pytest.param("cuda", marks=pytest.mark.cuda)]
"""Pages in host memory that tiers reach as well, that only a mover reaches, and on a device."""

FORMS = ["page-first", "layer-first"]


class Side:
    """A worker with a mover, over pages of random bytes."""

    def __init__(self, where: str, form: str = "page-first", **options: Any) -> None:
        if where == "cuda" and not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        self.device = "cuda" if where == "cuda" else "cpu"
        model = model_of()
        space = layout(model).space("full")
        if form == "page-first":
            self.binding = Binding.allocate(space, BLOCKS, self.device)
        else:
            tensors = {
                arena.name: torch.zeros(BLOCKS, arena.content_bytes, dtype=torch.uint8, device=self.device)
                for arena in space.arenas
            }
            self.binding = Binding.of(space, tensors)
        if where == "host":
            options.setdefault("mover", FarMover(options.pop("copies", InlineLane())))
        if where != "cuda":
            options.setdefault("lane", InlineLane())
        self.worker = Worker(model, layout(model), {"full": self.binding}, max_tp=1, **options)
        (self.part,) = self.worker.parts
        self.record_bytes = self.worker.record_bytes(self.part, 0)
        made = torch.Generator().manual_seed(3)
        for view in self.binding.views.values():
            view.copy_(torch.randint(0, 128, view.shape, generator=made).to(view.dtype))

    def tier(self, records: int = 64, **options: Any) -> DramTier:
        """A DRAM tier whose memory the mover is quick with."""
        size = records * (self.record_bytes + 64)
        return DramTier(size, allocate=host_memory(self.device, 2 * size + 2**20), **options)

    def save(self, tier: Tier, pages: list[int], blocks: list[int], **options: Any) -> Op:
        """Begin to save."""
        options = {"cls": SaveClass.CACHEABLE, "deadline": FOREVER, **options}
        return self.worker.save(tier, self.part, keys(pages), np.array(blocks), **options)

    def load(self, tier: Tier, pages: list[int], blocks: list[int]) -> list[Code]:
        """Look up and load."""
        wanted = self.worker.record_keys(self.part, keys(pages))
        with tier.lookup(wanted, FOREVER).wait(WAIT_S) as lease:
            rows = np.arange(len(wanted))
            args = (tier, lease, rows, self.part, keys(pages), np.array(blocks), FOREVER)
            return codes_of(self.worker.load(*args))

    def equal(self, blocks: list[int], others: list[int]) -> bool:
        """Whether blocks hold the same."""
        return all(torch.equal(view[blocks], view[others]) for view in self.binding.views.values())

    def idle(self) -> bool:
        """Whether nothing is held and nothing went wrong."""
        stats = self.worker.stats()
        return not (stats["operations"] or stats["staging_bytes"] or stats["faults"])


def keys(pages: list[int]) -> NDArray[np.uint64]:
    """Page keys of some numbers."""
    return np.array([[page, page * 7919] for page in pages], np.uint64).reshape(-1, 2)


def codes_of(op: Op) -> list[Code]:
    """The codes of an operation that ends soon."""
    return [Code(code) for code in op.wait(WAIT_S)]


class Plain:
    """A tier that lends nothing; all else is the DRAM tier's."""

    def __init__(self, inner: DramTier) -> None:
        self.inner = inner
        self.buffers: list[Buffers] = []

    def __getattr__(self, name: str) -> Any:
        if name in ("reserve", "borrow"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def save(self, keys: RecordKeys, buffers: Buffers, cls: SaveClass, deadline: float, **more: Any) -> Op:
        """Remember where payloads lay."""
        self.buffers.append(buffers)
        return self.inner.save(keys, buffers, cls, deadline, **more)


@pytest.mark.parametrize("lent", [True, False])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("where", DEVICES)
def test_e7_what_was_saved_comes_back(where: str, form: str, *, lent: bool) -> None:
    """E7, H1: many batches in flight, through memory of the tier's or of ours: the same pages come back."""
    for batch in (1, 5, 1000):
        side = Side(where, form, batch_bytes=batch * 1536, staging_bytes=16 * PAGE_BYTES)
        inner = side.tier()
        tier: Any = inner if lent else Plain(inner)
        pages = list(range(1, 17))
        assert codes_of(side.save(tier, pages, pages)) == [OK] * 16
        assert inner.stats()["records"] == 16
        targets = list(range(32, 16, -1))
        assert side.load(tier, pages, targets) == [OK] * 16
        assert side.equal(pages, targets)
        assert side.idle()
        if where == "near":
            straight = 16 * (side.record_bytes - 128) if lent and form == "page-first" else 0
            stats = side.worker.stats()
            assert (stats["host_bytes_out"], stats["host_bytes_in"]) == (straight, straight)
        if not lent and where != "near":
            starts = np.concatenate([buffers.address[1::2] for buffers in tier.buffers])
            assert (starts % PAGE_BYTES == 0).all()
        assert side.worker.close(time.monotonic() + WAIT_S)
        assert inner.close(time.monotonic() + WAIT_S)
        assert inner.stats()["operations"] == 0


@pytest.mark.parametrize("where", DEVICES)
def test_h2_what_is_there_is_not_written_again(where: str) -> None:
    """H2, G7: pages that are stored are OK without a copy; of a handoff they are kept, too."""
    side = Side(where)
    tier = side.tier()
    assert codes_of(side.save(tier, [1, 2], [1, 2])) == [OK, OK]
    assert codes_of(side.save(tier, [2, 3], [9, 3], cls=SaveClass.HANDOFF, handoff="h")) == [OK, OK]
    assert tier.stats()["handoffs"] == 1
    assert side.load(tier, [1, 2, 3], [11, 12, 13]) == [OK] * 3
    assert side.equal([1, 2, 3], [11, 12, 13])
    tier.release_handoff("h")
    assert tier.stats()["handoffs"] == 0


@pytest.mark.parametrize("lent", [True, False])
@pytest.mark.parametrize("where", DEVICES)
def test_e7_damaged_records_are_never_ok(where: str, *, lent: bool) -> None:
    """E7: a bit flipped anywhere in a stored record is CORRUPT, counted, and forgotten by the tier."""
    side = Side(where)
    rng = np.random.default_rng(5)
    for _ in range(12):
        inner = side.tier()
        tier: Any = inner if lent else Plain(inner)
        side.save(tier, [1, 2, 3], [1, 2, 3]).wait(WAIT_S)
        with tier.lookup(side.worker.record_keys(side.part, keys([2])), FOREVER).value as lease:
            loan = inner.borrow(lease, np.array([0]), side.record_bytes, FOREVER)
            at = int(rng.integers(side.record_bytes))
            (ctypes.c_uint8 * side.record_bytes).from_address(int(loan.address[0]))[at] ^= 1 << 3
            loan.end(np.array([True]))
        assert side.load(tier, [1, 2, 3], [11, 12, 13]) == [OK, Code.CORRUPT, OK]
        assert side.equal([1, 3], [11, 13])
        assert inner.stats()["quarantined"] == 1
        assert side.load(tier, [2], [5]) == [Code.MISS]
    assert side.idle()


@pytest.mark.parametrize("where", DEVICES)
def test_r4_what_was_not_lent_did_not_come(where: str) -> None:
    """R4: a tier that says OK and lends nothing gives no page."""
    side = Side(where)
    inner = side.tier()
    assert codes_of(side.save(inner, [1, 2], [1, 2])) == [OK, OK]

    class Boaster(DramTier):
        """One that does."""

        lookup, borrow, reserve = inner.lookup, inner.borrow, inner.reserve

    boaster = Boaster(1)
    boaster.borrow = lambda *_: Loan(np.zeros(2, np.int64), np.zeros(2, np.uint8), None)  # type: ignore[method-assign]
    assert side.load(boaster, [1, 2], [11, 12]) == [Code.FAILED] * 2
    assert boaster.close(FOREVER)


def test_r3_nothing_is_found_before_its_bytes_are_complete() -> None:
    """R3, C8: what a mover writes into a tier is not found, nor reused; barriers wait for it."""
    copies = ManualLane()
    side = Side("host", copies=copies)
    tier = side.tier(records=2, lane=InlineLane())
    op = side.save(tier, [1, 2], [1, 2])
    flushed = tier.flush("visible", FOREVER)
    assert tier.stats()["records"] == 0
    assert tier.stats()["operations"] == 1
    assert side.load(tier, [1], [5]) == [Code.MISS]
    assert codes_of(side.save(tier, [3], [3])) == [Code.FULL]  # what is written may not be evicted
    assert not flushed.done
    assert not tier.close(0.0)
    copies.drain()
    assert codes_of(op) == [OK, OK]
    assert flushed.value
    assert tier.stats()["operations"] == 0


def test_r3_what_is_read_is_not_evicted() -> None:
    """R3, A3: records that a mover reads stay, though their lease has ended; then they may go."""
    copies = ManualLane()
    side = Side("host", copies=copies)
    tier = side.tier(records=1, lane=InlineLane())
    op = side.save(tier, [1], [1])
    copies.drain()
    assert codes_of(op) == [OK]
    wanted = side.worker.record_keys(side.part, keys([1]))
    with tier.lookup(wanted, FOREVER).value as lease:
        load = side.worker.load(tier, lease, np.arange(1), side.part, keys([1]), np.array([7]), FOREVER)
    assert codes_of(side.save(tier, [2], [2])) == [Code.FULL]
    copies.drain()
    assert codes_of(load) == [OK]
    assert side.equal([1], [7])
    op = side.save(tier, [2], [2])
    copies.drain()
    assert codes_of(op) == [OK]
    assert tier.stats()["evictions"] == 1


@pytest.mark.parametrize("lent", [True, False])
def test_r4_a_device_that_fails_fails_pages_only(*, lent: bool) -> None:
    """R4, R3: of a copy that failed nothing is published, everything is given back, and work goes on."""
    mover = FarMover(InlineLane())
    side = Side("host", mover=mover)
    inner = side.tier(lane=InlineLane())
    tier: Any = inner if lent else Plain(inner)
    mover.fails = True
    assert codes_of(side.save(tier, [1, 2], [1, 2])) == [Code.FAILED] * 2
    assert inner.stats()["records"] == inner.stats()["operations"] == 0
    mover.fails = False
    assert codes_of(side.save(tier, [1, 2], [1, 2])) == [OK] * 2
    mover.fails = True
    assert side.load(tier, [1, 2], [5, 6]) == [Code.FAILED] * 2
    mover.fails = False
    assert side.load(tier, [1, 2], [5, 6]) == [OK] * 2
    assert side.idle()


@pytest.mark.parametrize("lent", [True, False])
@pytest.mark.parametrize("where", DEVICES)
def test_e8_blocks_out_of_range_are_refused(where: str, *, lent: bool) -> None:
    """E8: of pages that do not exist nothing is copied, and memory comes back."""
    side = Side(where)
    inner = side.tier()
    tier: Any = inner if lent else Plain(inner)
    assert codes_of(side.save(tier, [1], [BLOCKS])) == [Code.REFUSED]
    assert codes_of(side.save(tier, [1], [1])) == [OK]
    assert side.load(tier, [1], [BLOCKS]) == [Code.REFUSED]
    assert all(isinstance(fault, UsageFault) for fault in side.worker.faults)
    stats = side.worker.stats()
    assert (stats["operations"], stats["staging_bytes"], inner.stats()["operations"]) == (0, 0, 0)


def test_batches_in_flight_are_bounded() -> None:
    """At most DEPTH batches of an operation are on their way; as one lands, one begins."""
    copies = ManualLane()
    side = Side("host", copies=copies, batch_bytes=1)
    tier = side.tier(lane=InlineLane())
    op = side.save(tier, list(range(1, 13)), list(range(1, 13)))
    highest = len(copies)
    while copies.step():
        highest = max(highest, len(copies))
    assert highest == DEPTH
    assert codes_of(op) == [OK] * 12


def test_memory_of_ours_is_bounded() -> None:
    """Of a tier that lends nothing, batches wait for memory; all get through, and it comes back."""
    copies = ManualLane()
    side = Side("host", copies=copies, batch_bytes=1, staging_bytes=2 * PAGE_BYTES)
    tier: Any = Plain(side.tier(lane=InlineLane()))
    op = side.save(tier, list(range(1, 9)), list(range(1, 9)))
    highest = side.worker.stats()["staging_bytes"]
    while copies.step():
        highest = max(highest, side.worker.stats()["staging_bytes"])
    assert highest == 2 * PAGE_BYTES
    assert codes_of(op) == [OK] * 8
    assert side.idle()


def test_c10_a_lane_that_closes_gives_everything_back() -> None:
    """C10: batches in flight when the lane ends fail once they have landed; nothing is kept, or published."""
    copies, lane = ManualLane(), ManualLane()
    side = Side("host", copies=copies, lane=lane)
    tier = side.tier(lane=InlineLane())
    op = side.save(tier, [1, 2], [1, 2])
    lane.step()
    lane.close(0.0)
    assert not op.done
    copies.drain()
    assert codes_of(op) == [Code.FAILED] * 2
    assert tier.stats()["records"] == tier.stats()["operations"] == 0


class Step:
    """An event of a device, for a worker without one."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work

    def synchronize(self) -> None:
        """Let what it stands for happen."""
        self._work()

    def wait(self, stream: Any) -> None:
        """There is no stream here."""
        raise AssertionError(stream)


@pytest.mark.parametrize("where", ["near", "host"])
def test_c2_an_event_is_waited_for_where_bytes_are_read(where: str) -> None:
    """C2: pages are read after the event, which a remote mover waits for itself, and else the lane."""
    side = Side(where)
    tier = side.tier(lane=InlineLane())
    (view, *_) = side.binding.views.values()
    op = side.save(tier, [1], [1], after=Step(lambda: view[1].fill_(5)))
    assert codes_of(op) == [OK]
    assert side.load(tier, [1], [2]) == [OK]
    assert (view[2] == 5).all()


@pytest.mark.cuda
def test_c2_the_device_waits_for_the_event() -> None:
    """C2: a save behind a step that still runs does not block the worker's lane, and sees what it wrote."""
    side = Side("cuda")
    tier = side.tier()
    side.save(tier, [9], [9]).wait(WAIT_S)
    (view, *_) = side.binding.views.values()
    view[1].fill_(4)  # what is loaded at first use is loaded: that would wait for the device
    torch.cuda._sleep(400_000_000)
    view[1].fill_(5)
    event = torch.cuda.Event()
    event.record()
    op = side.save(tier, [1], [1], after=event)
    assert side.load(tier, [9], [8]) == [OK]
    assert not event.query()
    assert codes_of(op) == [OK]
    assert side.load(tier, [1], [2]) == [OK]
    assert (view[2] == 5).all()


class Odd(DramTier):
    """A tier whose loans break the rules."""

    how = ""

    def reserve(self, *_: Any, **__: Any) -> Loan:
        """Raise, or lend for other records."""
        if self.how == "raises":
            raise OSError("tier down")
        return Loan.nothing(7, OK)

    def borrow(self, *_: Any) -> Any:
        """Raise, or lend nothing that could be used."""
        if self.how == "raises":
            raise OSError("tier down")
        return "memory"


@pytest.mark.parametrize("how", ["raises", "odd"])
def test_r4_a_tier_that_lends_oddly_fails_pages_only(how: str) -> None:
    """R4: loans are held to the rules like other answers."""
    side = Side("host")
    odd = Odd(1 << 20, lane=InlineLane())
    odd.how = ""
    assert isinstance(odd, Lends)
    tier = GuardedTier(odd)
    odd.how = how
    assert codes_of(side.save(tier, [1], [1])) == [Code.FAILED]
    staged: Any = Plain(odd)
    assert codes_of(side.save(staged, [1], [1])) == [OK]
    assert side.load(tier, [1], [2]) == [Code.FAILED]
    assert tier.stats()["broke_rules_reserve"] == tier.stats()["broke_rules_borrow"] == 1


def test_worker_mover_and_tier_in_threads() -> None:
    """Own threads everywhere, many operations at once: all whole, gauges at 0, everything closes."""
    copies = ThreadLane("mover", workers=2)
    side = Side("host", "layer-first", lane=ThreadLane("worker", workers=2), copies=copies, batch_bytes=1536)
    tier = side.tier()
    ops = [side.save(tier, [page, 100 + page], [page, page], cls=SaveClass.HANDOFF) for page in range(1, 9)]
    assert [codes_of(op) for op in ops] == [[OK, OK]] * 8
    assert side.load(tier, [101, 4, 5, 6, 7, 8], [21, 22, 23, 24, 25, 26]) == [OK] * 6
    assert side.equal([1, 4, 5, 6, 7, 8], [21, 22, 23, 24, 25, 26])
    assert side.idle()
    assert side.worker.close(time.monotonic() + WAIT_S)
    assert tier.close(time.monotonic() + WAIT_S)
    assert copies.close(WAIT_S)
    assert side.worker.lane.close(WAIT_S)

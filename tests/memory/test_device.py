"""The copy engine of a device: kernels, streams and sums against torch and the checksum library."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.layout import layout
from kvcontract.contract.model import Arena, Field, Group, KvModel, Repack, WeightIdentity
from kvcontract.contract.wire import WireRecord, parts, wire_record
from kvcontract.core.lane import Urgency
from kvcontract.memory import copy as copies
from kvcontract.memory.binding import Binding
from kvcontract.memory.checksum import SegmentSums
from kvcontract.memory.copy import CopyProgram
from kvcontract.memory.device import ON_DEVICE, DeviceMover
from kvcontract.memory.pinned import pinned_memory

pytestmark = pytest.mark.cuda

PAGE, BLOCKS, WAIT_S = 5, 40, 60.0
POISON = 0xA5


@pytest.fixture(autouse=True)
def device() -> torch.device:
    """A CUDA device; without one these tests have nothing to say."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda", 0)


def arenas_of(dims: tuple[int, int, int], layers: int = 3, turned: bool = False) -> tuple[Arena, ...]:
    """K, V and a byte-wide latent in each layer; `turned`: axes the other way round."""
    head, dim, latent = dims
    names = ("dim", "head") if turned else ("head", "dim")
    axes = {name: {"head": head, "dim": dim}[name] for name in names}
    found = []
    for layer in range(layers):
        kv = tuple(Field(name=name, dtype="bfloat16", axes=axes, shard_axis="head") for name in "kv")
        found.append(Arena.planes(name=f"l{layer}.kv", group="kv", layer=layer, fields=kv, align_bytes=2))
        if latent:
            low = (Field(name="c", dtype="uint8", axes={"dim": latent}),)
            found.append(Arena.rows(name=f"l{layer}.c", group="kv", layer=layer, fields=low, align_bytes=2))
    return tuple(found)


def model_of(dims: tuple[int, int, int], *, turned: bool = False) -> KvModel:
    """A model of one group; `turned` stores it in another order."""
    return KvModel(
        contract=1,
        name="toy",
        weights=WeightIdentity(kind="unresolved"),
        numerics="test",
        page_tokens=PAGE,
        groups=(Group(name="kv"),),
        arenas=arenas_of(dims),
        repack=Repack(arenas=arenas_of(dims, turned=True)) if turned else None,
    )


class Side:
    """The same memory on a device and on the host; the host's copy program is the oracle."""

    def __init__(self, model: KvModel, form: str, worker: int = 0, tp: int = 1, max_tp: int = 1) -> None:
        pages = model.record_pages
        space = layout(model, worker, tp).space("full")
        (part,) = parts(model)
        shards = part.shards(max_tp)
        self.record: WireRecord = wire_record(model, part, worker * shards // tp, shards)
        made = []
        for where in ("cuda", "cpu"):
            if form == "page-first":
                binding = Binding.allocate(space, BLOCKS, where)
            else:
                tensors = {}
                for arena in space.arenas:
                    stride = arena.stride_bytes + (64 if form == "padded" else 0)
                    whole = torch.zeros(BLOCKS, stride, dtype=torch.uint8, device=where)
                    tensors[arena.name] = whole[:, : arena.content_bytes]
                binding = Binding.of(space, tensors)
            made.append(binding)
        self.device, self.host = made
        self.programs = [
            CopyProgram.compile(binding, self.record, worker, tp, pages=pages) for binding in made
        ]
        self.plan: Any = None
        self.fill(np.random.default_rng(7))

    def fill(self, rng: np.random.Generator) -> None:
        """The same random bytes on both, padding included."""
        for mine, other in self._storages():
            data = torch.from_numpy(rng.integers(0, 256, len(other), dtype=np.uint8))
            other.copy_(data)
            mine[: len(data)].copy_(data)

    def poison(self) -> None:
        """One value everywhere."""
        for mine, other in self._storages():
            mine.fill_(POISON)
            other.fill_(POISON)

    def equal(self) -> bool:
        """Whether both hold the same bytes, padding included."""
        return all(torch.equal(mine.cpu(), other) for mine, other in self._storages())

    def _storages(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each storage once, cut to where block 0 begins, since that is aligned apart."""
        found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for name, mine in self.device.arenas.items():
            other = self.host.arenas[name]
            key = mine.storage.data_ptr()
            if key not in found:
                size = min(len(mine.storage) - mine.offset_bytes, len(other.storage) - other.offset_bytes)
                found[key] = (
                    mine.storage[mine.offset_bytes :][:size],
                    other.storage[other.offset_bytes :][:size],
                )
        return list(found.values())

    def expected(self, ids: NDArray[np.int64]) -> torch.Tensor:
        """Payloads, by the host."""
        out = torch.zeros(len(ids), self.record.payload_bytes, dtype=torch.uint8)
        self.programs[1].gather(ids, out)
        return out

    def sums(self, payloads: torch.Tensor) -> NDArray[np.uint32]:
        """Sums, by the library."""
        return SegmentSums((payloads.shape[1],), self.record.segments).sums(addresses(payloads)[:, None])


def addresses(payloads: torch.Tensor) -> NDArray[np.int64]:
    """Where rows begin."""
    return payloads.data_ptr() + payloads.shape[1] * np.arange(len(payloads), dtype=np.int64)


def pinned(count: int, size: int) -> torch.Tensor:
    """uint8[count, size] of zeroed pinned memory."""
    return torch.frombuffer(pinned_memory(count * size), dtype=torch.uint8).view(count, size)


@pytest.fixture
def faults() -> Iterator[list[Exception]]:
    """What a mover reports; nothing, unless a test takes it out."""
    found: list[Exception] = []
    yield found
    assert not found


def mover(side: Side, faults: list[Exception], count: int = 8, **options: Any) -> DeviceMover:
    """A mover whose largest batch has so many records."""
    device = torch.device("cuda", 0)
    made = DeviceMover(device, count * side.record.payload_bytes, faults.append, **options)
    side.plan = made.plan(side.programs[0], side.record.segments)
    return made


SHAPES = [(4, 8, 6), (3, 5, 7), (8, 128, 0), (1, 3, 1), (8, 1664, 0)]


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("form", ["page-first", "layer-first", "padded"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dims", SHAPES)
def test_e7_bytes_and_sums_both_ways(
    dims: tuple[int, int, int], form: str, faults: list[Exception], *, turned: bool, batched: bool
) -> None:
    """E7, E1: payloads and their sums are the oracle's; no other byte is touched."""
    side = Side(model_of(dims, turned=turned), form)
    moving = mover(side, faults, batched_copies=batched)
    ids = np.random.default_rng(1).permutation(np.arange(1, BLOCKS))[:8]
    host = pinned(8, side.record.payload_bytes)
    sums = moving.out(side.plan, ids, addresses(host)).wait(WAIT_S)
    want = side.expected(ids)
    assert torch.equal(host, want)
    assert np.array_equal(sums, side.sums(want))
    side.poison()
    back = moving.into(side.plan, ids, addresses(host)).wait(WAIT_S)
    side.programs[1].scatter(ids, want)
    assert np.array_equal(back, sums)
    assert side.equal()
    assert moving.close(WAIT_S)


@pytest.mark.parametrize("form", ["page-first", "layer-first", "padded"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("pages", [2, 3])
@pytest.mark.parametrize("dims", SHAPES)
def test_e7_records_of_several_pages_both_ways(
    dims: tuple[int, int, int], pages: int, form: str, faults: list[Exception], *, turned: bool
) -> None:
    """E7, E1, B21: as with one page; what is left out of a record is not written."""
    model = model_of(dims, turned=turned).model_copy(update={"key_tokens": pages * PAGE})
    side = Side(model, form)
    moving = mover(side, faults)
    assert not side.plan.straight
    ids = np.random.default_rng(1).permutation(np.arange(1, BLOCKS))[: 4 * pages].reshape(4, pages)
    host = pinned(4, side.record.payload_bytes)
    sums = moving.out(side.plan, ids, addresses(host)).wait(WAIT_S)
    want = side.expected(ids)
    assert torch.equal(host, want)
    assert np.array_equal(sums, side.sums(want))
    side.poison()
    ids[0, 0] = ids[2, -1] = 0
    back = moving.into(side.plan, ids, addresses(host)).wait(WAIT_S)
    side.programs[1].scatter(ids, want)
    assert np.array_equal(back, sums)
    assert side.equal()
    assert moving.close(WAIT_S)


@pytest.mark.parametrize("form", ["page-first", "layer-first"])
def test_long_runs_are_copied_where_they_lie(
    form: str, faults: list[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above a length, pages are neither gathered nor scattered; bytes and sums are the same."""
    monkeypatch.setattr(copies, "MIN_DEVICE_RUN_BYTES", 1024)
    side = Side(model_of((8, 128, 0)), form)
    moving = mover(side, faults)
    assert side.plan.straight
    assert len(side.plan.lengths) == (1 if form == "page-first" else 3)
    ids, host = np.array([7, 3, 4, 30]), pinned(4, side.record.payload_bytes)
    sums = moving.out(side.plan, ids, addresses(host)).wait(WAIT_S)
    want = side.expected(ids)
    assert torch.equal(host, want)
    assert np.array_equal(sums, side.sums(want))
    side.poison()
    assert np.array_equal(moving.into(side.plan, ids, addresses(host)).wait(WAIT_S), sums)
    side.programs[1].scatter(ids, want)
    assert side.equal()
    assert moving.close(WAIT_S)


@pytest.mark.parametrize("tp", [2, 4])
def test_a_worker_moves_its_slice(tp: int, faults: list[Exception]) -> None:
    """Shards of a tensor-parallel worker are gathered and scattered like whole records."""
    for worker in range(tp):
        side = Side(model_of((4, 8, 6)), "layer-first", worker, tp, tp)
        moving = mover(side, faults)
        ids, host = np.array([2, 9, 1]), pinned(3, side.record.payload_bytes)
        sums = moving.out(side.plan, ids, addresses(host)).wait(WAIT_S)
        want = side.expected(ids)
        assert torch.equal(host, want)
        assert np.array_equal(sums, side.sums(want))
        side.poison()
        moving.into(side.plan, ids, addresses(host)).wait(WAIT_S)
        side.programs[1].scatter(ids, want)
        assert side.equal()
        assert moving.close(WAIT_S)


@pytest.mark.parametrize("unpinned", [False, True])
def test_many_batches_of_both_directions_at_once(faults: list[Exception], *, unpinned: bool) -> None:
    """More batches than buffers, out and in together: none mixes with another."""
    side = Side(model_of((8, 128, 0)), "layer-first")
    moving, size = mover(side, faults, 2), side.record.payload_bytes
    out_ids, in_ids = np.arange(1, 20), np.arange(20, 39)
    given = side.expected(in_ids)
    memory = torch.zeros(38, size, dtype=torch.uint8) if unpinned else pinned(38, size)
    memory[19:].copy_(given)
    at = addresses(memory)
    pendings = []
    for first in range(0, 19, 2):
        rows = slice(first, min(19, first + 2))
        pendings.append((rows, moving.out(side.plan, out_ids[rows], at[:19][rows])))
        moving.into(side.plan, in_ids[::-1][rows], at[19:][rows])
    want = side.expected(out_ids)
    for rows, pending in pendings:
        assert np.array_equal(pending.wait(WAIT_S), side.sums(want[rows].contiguous()))
    last = moving.into(side.plan, in_ids[::-1][:1], at[19:][:1]).wait(WAIT_S)
    assert last is not None
    assert torch.equal(memory[:19], want)
    side.programs[1].scatter(in_ids[::-1].copy(), given)
    assert side.equal()
    assert moving.stats()["device_bytes_out"] == 19 * size
    assert moving.close(WAIT_S)


def test_c2_what_leaves_waits_for_the_writing_step(faults: list[Exception]) -> None:
    """C2: copies after an event see what was written before it; the caller does not wait."""
    side = Side(model_of((8, 128, 0)), "layer-first")
    moving, ids = mover(side, faults), np.array([3, 8])
    host = pinned(2, side.record.payload_bytes)
    moving.out(side.plan, ids, addresses(host)).wait(WAIT_S)
    side.poison()  # what is loaded at first use is loaded: that would wait for the device
    event = torch.cuda.Event()
    torch.cuda._sleep(400_000_000)
    for mine, other in side._storages():
        mine.fill_(0x3C)
        other.fill_(0x3C)
    event.record()
    pending = moving.out(side.plan, ids, addresses(host), after=event)
    assert not event.query()
    sums = pending.wait(WAIT_S)
    assert event.query()
    assert torch.equal(host, torch.full_like(host, 0x3C))
    assert np.array_equal(sums, side.sums(host))
    assert moving.close(WAIT_S)


@pytest.mark.parametrize("form", ["layer-first", "page-first"])
def test_c1_what_comes_waits_for_copies_that_read_its_blocks(form: str, faults: list[Exception]) -> None:
    """C1: a copy from block to block that is queued behind a step still finds what it is to copy."""
    side = Side(model_of((8, 128, 0)), form)
    moving, source, target = mover(side, faults), 3, 8
    host = pinned(1, side.record.payload_bytes)
    moving.out(side.plan, np.array([source]), addresses(host)).wait(WAIT_S)
    moving.into(side.plan, np.array([source]), addresses(host)).wait(WAIT_S)  # all is loaded and warm
    kept = {name: view[source].clone() for name, view in side.device.views.items()}
    host.fill_(0x3C)
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)
    side.device.copy_blocks([(source, target)])
    moving.into(side.plan, np.array([source]), addresses(host)).wait(WAIT_S)
    torch.cuda.synchronize()
    for name, view in side.device.views.items():
        assert torch.equal(view[target].view(torch.uint8), kept[name].view(torch.uint8))
        assert (view[source].contiguous().view(torch.uint8) == 0x3C).all()
    assert moving.close(WAIT_S)


def test_e8_what_cannot_be_is_refused(faults: list[Exception]) -> None:
    """E8: blocks out of range, the padding block, repeated targets, batches too large."""
    side = Side(model_of((4, 8, 6)), "layer-first")
    moving, host = mover(side, faults, 2), pinned(4, side.record.payload_bytes)
    at = addresses(host)
    for ids in ([0, 1], [1, BLOCKS], [-1, 2]):
        for move in (moving.out, moving.into):
            with pytest.raises(UsageFault, match="from 1 to"):
                move(side.plan, np.array(ids), at[:2])
    with pytest.raises(UsageFault, match="written twice"):
        moving.into(side.plan, np.array([2, 2]), at[:2])
    for _ in range(4):
        moving.out(side.plan, np.array([1, 2]), at[:2]).wait(WAIT_S)
    with pytest.raises(UsageFault, match="the buffers have"):
        moving.out(side.plan, np.array([1, 2, 3]), at[:3])
    assert moving.out(side.plan, np.array([1, 2]), at[:2]).wait(WAIT_S) is not None
    assert moving.close(WAIT_S)


@pytest.mark.parametrize("form", ["page-first", "layer-first", "padded"])
@pytest.mark.parametrize("layer_bytes", [64 * 1024, 40_960, 41_984, 4_112, 1_050, 333])
def test_e7_sums_of_segments_of_any_length(
    layer_bytes: int, form: str, faults: list[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """E7: grains that are rows, that straddle them, or are not aligned: bytes and sums are the library's."""
    monkeypatch.setattr(copies, "MIN_DEVICE_RUN_BYTES", 1024)
    fields = (Field(name="c", dtype="uint8", axes={"dim": layer_bytes}),)
    arenas = tuple(
        Arena.rows(name=f"l{layer}", group="kv", layer=layer, fields=fields, align_bytes=1)
        for layer in range(3)
    )
    model = model_of((1, 1, 0)).model_copy(update={"arenas": arenas, "page_tokens": 4})
    side = Side(model, form)
    moving, ids, host = mover(side, faults), np.array([7, 3, 4, 30]), pinned(4, side.record.payload_bytes)
    sums = moving.out(side.plan, ids, addresses(host)).wait(WAIT_S)
    want = side.expected(ids)
    assert torch.equal(host, want)
    assert np.array_equal(sums, side.sums(want))
    side.poison()
    assert np.array_equal(moving.into(side.plan, ids, addresses(host)).wait(WAIT_S), sums)
    side.programs[1].scatter(ids, want)
    assert side.equal()
    assert moving.close(WAIT_S)


def test_what_is_urgent_goes_before_what_waits(faults: list[Exception]) -> None:
    """Of the batches that are not on the device yet the most urgent goes first, then the first that came."""
    side = Side(model_of((8, 128, 0)), "layer-first")
    moving, host = mover(side, faults, 1), pinned(9, side.record.payload_bytes)
    at, order = addresses(host), list[str]()
    moving.out(side.plan, np.array([9]), at[8:]).wait(WAIT_S)
    event = torch.cuda.Event()
    torch.cuda._sleep(400_000_000)
    event.record()
    calm = [
        moving.out(side.plan, np.array([1 + n]), at[n : n + 1], urgency=Urgency.CACHEABLE, after=event)
        for n in range(5)
    ]
    hand = moving.out(side.plan, np.array([7]), at[6:7], urgency=Urgency.HANDOFF)
    for name, pending in (*((f"calm{n}", found) for n, found in enumerate(calm)), ("hand", hand)):
        pending.on_done(lambda _, name=name: order.append(name))
    for pending in (*calm, hand):
        pending.wait(WAIT_S)
    assert order.index("hand") == ON_DEVICE
    assert [name for name in order if name != "hand"] == [f"calm{n}" for n in range(5)]
    assert moving.close(WAIT_S)


def test_torch_moves_what_the_kernel_moves(device: torch.device) -> None:
    """Without triton, torch does the same on the device."""
    side = Side(model_of((3, 5, 7), turned=True), "padded")
    ids = np.array([5, 1, 17])
    out = torch.zeros(3, side.record.payload_bytes, dtype=torch.uint8, device=device)
    side.programs[0].gather(ids, out)
    want = side.expected(ids)
    assert torch.equal(out.cpu(), want)
    side.poison()
    side.programs[0].scatter(ids, out)
    side.programs[1].scatter(ids, want)
    assert side.equal()


def test_e7_a_changed_bit_changes_its_segments_sum(faults: list[Exception]) -> None:
    """E7: what changed in host memory shows in the sum of its segment, on the device."""
    side = Side(model_of((8, 128, 0)), "layer-first")
    moving, host = mover(side, faults), pinned(2, side.record.payload_bytes)
    ids = np.array([3, 4])
    sums = moving.out(side.plan, ids, addresses(host)).wait(WAIT_S)
    assert sums is not None
    rng = np.random.default_rng(2)
    for _ in range(20):
        row, at, bit = int(rng.integers(2)), int(rng.integers(host.shape[1])), int(rng.integers(8))
        host[row, at] ^= 1 << bit
        found = moving.into(side.plan, ids, addresses(host)).wait(WAIT_S)
        assert found is not None
        wrong = np.argwhere(found != sums).tolist()
        segment = int(np.searchsorted(np.cumsum(side.record.segments), at, side="right"))
        assert wrong == [[row, segment]]
        host[row, at] ^= 1 << bit
    assert moving.close(WAIT_S)

"""What `copy.py` measures with: pages of known bytes, movers and workers over them, decoding beside them."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import cache
from itertools import count
from typing import Any, Self

import numpy as np
import torch

from kvcontract import Arena, Field, Group, KvModel, WeightIdentity
from kvcontract.contract.layout import layout
from kvcontract.contract.wire import parts, wire_record
from kvcontract.core.pending import Pending
from kvcontract.memory.binding import Binding
from kvcontract.memory.checksum import SegmentSums
from kvcontract.memory.copy import CopyProgram
from kvcontract.memory.pinned import host_memory
from kvcontract.store.landing import Shard
from kvcontract.store.worker import BATCH_BYTES, DEPTH, Worker
from kvcontract.tiers.base import Code, SaveClass
from kvcontract.tiers.dram import DramTier

PAGE, LAYERS, LAYER_BYTES = 16, 36, 64 * 1024
POOL, MANY, FEW = 2_049, 1_024, 64
RNG = np.random.default_rng(1)
WAIT_S = 60.0

Ids = np.ndarray[Any, np.dtype[np.int64]]


def model_of(layers: int, layer_bytes: int) -> KvModel:
    """K and V of a page in each layer."""
    axes = {"head": 8, "dim": layer_bytes // (2 * PAGE * 8 * 2)}
    fields = tuple(Field(name=name, dtype="bfloat16", axes=axes) for name in ("k", "v"))
    return KvModel(
        contract=1,
        name="benchmark",
        weights=WeightIdentity(kind="unresolved"),
        numerics="bfloat16",
        page_tokens=PAGE,
        groups=(Group(name="kv"),),
        arenas=tuple(
            Arena.planes(name=f"l{layer}", group="kv", layer=layer, fields=fields) for layer in range(layers)
        ),
    )


class Pages:
    """Pages of one form, filled with random bytes, and their program.

    Args:
        form: ``page-first`` or ``layer-first``.
        device: where.
        layers: of a page.
        layer_bytes: of each.
        blocks: how many pages.
    """

    def __init__(
        self,
        form: str,
        device: str,
        layers: int = LAYERS,
        layer_bytes: int = LAYER_BYTES,
        blocks: int = POOL,
    ) -> None:
        self.model = model_of(layers, layer_bytes)
        space = layout(self.model).space("full")
        if form == "page-first":
            self.binding = Binding.allocate(space, blocks, device)
        else:
            tensors = {
                arena.name: torch.empty(blocks, layer_bytes, dtype=torch.uint8, device=device)
                for arena in space.arenas
            }
            self.binding = Binding.of(space, tensors)
        for arena in self.binding.arenas.values():
            view = arena.view(arena.layout.fields[0])
            view.view(torch.int16).random_()
        (self.part,) = parts(self.model)
        self.record = wire_record(self.model, self.part)
        self.program = CopyProgram.compile(self.binding, self.record)
        self.size = self.record.payload_bytes
        self.blocks = blocks

    def some(self, count: int) -> Ids:
        """Random blocks, none twice."""
        return RNG.permutation(np.arange(1, self.blocks))[:count]

    def payloads(self, ids: Ids) -> torch.Tensor:
        """uint8[n, payload], by torch, arena by arena: what must be copied."""
        index = torch.from_numpy(ids).to(self.binding.device)
        views = [arena.view(field) for arena in self.binding.arenas.values() for field in arena.layout.fields]
        pieces = [view.view(torch.uint8).flatten(1)[index] for view in views]
        return torch.cat(pieces, 1)


def host_sums(host: torch.Tensor, segments: tuple[int, ...]) -> Any:
    """Sums by the library, uint32[n, segments]."""
    return SegmentSums((host.shape[1],), segments).sums(addresses(host)[:, None])


def addresses(host: torch.Tensor) -> Ids:
    """int64[n], where rows begin."""
    rows: Ids = host.data_ptr() + host.shape[1] * np.arange(len(host), dtype=np.int64)
    return rows


def timed(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@cache
def pinned(size: int) -> torch.Tensor:
    """uint8[size] of pinned memory, taken once."""
    from kvcontract.memory.pinned import pinned_memory  # noqa: PLC0415 - needs a device

    return torch.frombuffer(pinned_memory(size), dtype=torch.uint8)


@cache
def pages_of(form: str) -> Pages:
    """The pages of the bars."""
    return Pages(form, "cuda")


class Moving:
    """A mover with batches as a worker makes them."""

    def __init__(self, pages: Pages, **options: Any) -> None:
        from kvcontract.memory.device import DeviceMover  # noqa: PLC0415 - needs a device

        self.pages = pages
        self.faults: list[Exception] = []
        self.shard = Shard(pages.record, pages.program, bytes(16), writes=True, batch_bytes=BATCH_BYTES)
        largest = self.shard.batch_records * pages.size
        self.mover = DeviceMover(pages.binding.device, largest, self.faults.append, **options)
        self.plan = self.shard.plan = self.mover.plan(pages.program, pages.record.segments)

    def all(self, verb: str, ids: Ids, at: Ids) -> Any:
        """Every batch of a copy, some in flight at a time; their sums."""
        flying: deque[Pending[Any]] = deque()
        found = []
        move = self.mover.out if verb == "out" else self.mover.into
        for rows in self.shard.batches(len(ids)):
            if len(flying) == DEPTH:
                found.append(flying.popleft().wait(WAIT_S))
            flying.append(move(self.plan, ids[rows], at[rows]))
        found += [pending.wait(WAIT_S) for pending in flying]
        if self.faults:
            raise self.faults[0]
        return np.concatenate(found)

    def check(self, count: int) -> None:
        """Both ways: bytes and sums."""
        ids, pages = self.pages.some(count), self.pages
        host = pinned(MANY * pages.size)[: count * pages.size].view(count, pages.size)
        host.zero_()
        sums = self.all("out", ids, addresses(host))
        want = pages.payloads(ids)
        if not torch.equal(host.to(want.device), want):
            raise AssertionError("out: other bytes than torch gathers")
        if not np.array_equal(sums, host_sums(host, pages.record.segments)):
            raise AssertionError("out: other sums than the library's")
        targets = pages.some(count)
        back = self.all("in", targets, addresses(host))
        if not np.array_equal(sums, back):
            raise AssertionError("in: other sums than on the way out")
        if not torch.equal(pages.payloads(targets), want):
            raise AssertionError("in: other bytes in the pages than in the records")


class Working:
    """A worker over pages on a device, and a DRAM tier of pinned memory below it."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        held = layout(pages.model)
        self.worker = Worker(pages.model, held, {"full": pages.binding}, max_tp=1)
        room = (MANY + 64) * (pages.size + 4096)
        self.tier = DramTier(room, allocate=host_memory("cuda", room))
        self._numbers = count(1)

    def keys(self, pages: int) -> Any:
        """Names that nothing was stored under before."""
        return np.array([[next(self._numbers), 7] for _ in range(pages)], np.uint64)

    def save(self, keys: Any, ids: Ids, after: Any = None) -> Pending[Any]:
        """Pages to the tier."""
        args = (self.tier, self.pages.part, keys, ids, SaveClass.CACHEABLE, math.inf, after)
        return self.worker.save(*args)

    def load(self, keys: Any, ids: Ids) -> None:
        """The way back; returns when they are there."""
        wanted = self.worker.record_keys(self.pages.part, keys)
        with self.tier.lookup(wanted, math.inf).wait(WAIT_S) as lease:
            rows = np.arange(len(wanted))
            good(self.worker.load(self.tier, lease, rows, self.pages.part, keys, ids, math.inf))

    def check(self, pages: int) -> None:
        """Both ways: what comes back is what left."""
        keys, ids, targets = self.keys(pages), self.pages.some(pages), self.pages.some(pages)
        want = self.pages.payloads(ids)
        good(self.save(keys, ids))
        self.load(keys, targets)
        if not torch.equal(self.pages.payloads(targets), want):
            raise AssertionError("other bytes came back")


@cache
def working_of(form: str) -> Working:
    """One for each form: its memory takes seconds to pin."""
    return Working(pages_of(form))


def good(op: Pending[Any]) -> None:
    """Wait until all is done, and see that it is."""
    codes = op.wait(WAIT_S)
    if (codes != Code.OK).any():
        raise AssertionError(f"codes {np.unique(codes).tolist()}")


STEPS, SAVED_PAGES = 40, 2


def decode(*, graph: bool, ahead: int) -> Callable[[Callable[[int], object]], float]:
    """Runs steps bound by memory, as decoding is, and something during each; returns seconds.

    Args:
        graph: one launch a step, as engines decode; else one a kernel, from Python.
        ahead: steps that are launched before an earlier one is waited for: engines that schedule while the
            device computes launch one ahead; with none the device waits for Python after each.
    """
    weights = [torch.randn(8192, 6144, dtype=torch.bfloat16, device="cuda") for _ in range(36)]
    vector = torch.randn(6144, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(8192, dtype=torch.bfloat16, device="cuda")

    def kernels() -> None:
        for weight in weights:
            torch.mv(weight, vector, out=out)

    step: Callable[[], object] = kernels
    if graph:
        kernels()
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            kernels()
        step = captured.replay

    def run(each: Callable[[int], object]) -> float:
        torch.cuda.synchronize()
        running: deque[Any] = deque()
        start = time.perf_counter()
        for number in range(STEPS):
            step()
            event = torch.cuda.Event()
            event.record()
            running.append(event)
            each(number)
            if len(running) > ahead:
                running.popleft().synchronize()
        for event in running:
            event.synchronize()
        return time.perf_counter() - start

    return run


class Backlog:
    """Copies all the time, in a thread of its own, while the context lasts."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work, self._ended = work, threading.Event()
        self._thread = threading.Thread(target=self._loop)

    def _loop(self) -> None:
        while not self._ended.is_set():
            self._work()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

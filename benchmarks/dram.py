"""What `tiers.py` measures a DRAM tier with: pages into and out of its memory, by copies and by a worker."""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

import numpy as np
import numpy.typing as npt
import torch
from paired import Case, Row, measure

from kvcontract.contract.layout import layout
from kvcontract.contract.model import Arena, Field, Group, KvModel, WeightIdentity
from kvcontract.contract.wire import SEGMENT_BYTES
from kvcontract.memory.binding import Binding
from kvcontract.memory.host import copy_runs
from kvcontract.memory.host_mover import COPIES
from kvcontract.store.worker import BATCH_BYTES, Worker
from kvcontract.tiers.base import Code, Op, RecordKeys, SaveClass, record_keys
from kvcontract.tiers.dram import DramTier
from kvcontract.tiers.frame import header_bytes
from kvcontract.tiers.lending import Loan

MIB = 2**20
CALM_S = 120.0
THREADS = COPIES
LAYERS, LAYER_BYTES = 36, 64 * 1024
PAGE_BYTES = LAYERS * LAYER_BYTES
PAGES = 256
HEADER_BYTES = header_bytes(math.ceil(PAGE_BYTES / SEGMENT_BYTES))
RECORD_BYTES = HEADER_BYTES + PAGE_BYTES
DRAM_BAR, DRAM_SUMMED_BAR = 0.90, 0.55
RNG = np.random.default_rng(1)
Bytes = npt.NDArray[np.uint8]


def pages_of(size: int, pages: int, offset: int = 0) -> Bytes:
    """uint8[pages, size] of its own memory that begins `offset` beyond a page of the system."""
    memory = np.frombuffer(mmap.mmap(-1, size * pages + 4096), np.uint8)
    return memory[offset : offset + size * pages].reshape(pages, size)


def filled(size: int, pages: int, offset: int = 0) -> Bytes:
    """Random bytes."""
    made = pages_of(size, pages, offset)
    made[:] = RNG.integers(0, 256, made.shape, np.uint8)
    return made


def keys_of(first: int, pages: int) -> RecordKeys:
    """Keys of consecutive numbers."""
    numbers = np.arange(first, first + pages, dtype=np.uint64)
    return record_keys(np.stack([numbers * np.uint64(0x9E3779B97F4A7C15), numbers], axis=1), 0, 0, 1)


def all_ok(op: Op) -> None:
    """Wait; end if a record was not OK."""
    codes = op.wait(CALM_S)
    if codes.any():
        raise SystemExit(f"codes {[Code(code).name for code in codes]}")


def in_batches(rows: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """As many pages at a time as a worker moves."""
    step = BATCH_BYTES // PAGE_BYTES
    return [rows[at : at + step] for at in range(0, len(rows), step)]


class LentMemory:
    """Pages copied into and out of memory that a DRAM tier lends, in some threads, and not summed."""

    def __init__(self) -> None:
        self._tier = DramTier((PAGES + 1) * (RECORD_BYTES + 64))
        self._source, self._target = filled(PAGE_BYTES, PAGES), pages_of(PAGE_BYTES, PAGES)
        self._order = RNG.permutation(PAGES)
        self._keys = keys_of(1, PAGES)
        self._sizes = np.full(PAGES, PAGE_BYTES, np.int64)
        self.save()
        self.load()
        if not np.array_equal(self._source, self._target):
            raise SystemExit("what came back is wrong")

    def save(self) -> float:
        """Seconds to save every page."""
        self._tier.reset(math.inf)

        def work(rows: npt.NDArray[np.int64]) -> None:
            for some in in_batches(rows):
                loan = self._tier.reserve(self._keys[some], RECORD_BYTES, SaveClass.CACHEABLE, math.inf)
                source = self._source.ctypes.data + PAGE_BYTES * some
                copy_runs(loan.address + HEADER_BYTES, source, self._sizes[: len(some)])
                self._end(loan)

        return in_threads(work, self._order)

    def load(self) -> float:
        """Seconds to load every page."""

        def work(rows: npt.NDArray[np.int64]) -> None:
            with self._tier.lookup(self._keys[rows], math.inf).wait(CALM_S) as lease:
                for at, some in zip(in_batches(np.arange(len(rows))), in_batches(rows), strict=True):
                    loan = self._tier.borrow(lease, at, RECORD_BYTES, math.inf)
                    target = self._target.ctypes.data + PAGE_BYTES * some
                    copy_runs(target, loan.address + HEADER_BYTES, self._sizes[: len(some)])
                    self._end(loan)

        return in_threads(work, self._order)

    def _end(self, loan: Loan) -> None:
        if loan.end(np.ones(len(loan.address), np.bool_)).any():
            raise SystemExit("a page was not lent")

    def close(self) -> None:
        """End."""
        if not self._tier.close(math.inf):
            raise SystemExit("the tier ended badly")


class WorkerSide:
    """A worker over pages in host memory and a DRAM tier: sums, frames and checks, as they are served.

    Args:
        form: how the pages lie: each in one piece, or each layer apart.
    """

    def __init__(self, form: str) -> None:
        model = served_model()
        held = layout(model)
        space = held.space("full")
        if form == "page-first":
            self._binding = Binding.allocate(space, 2 * PAGES + 1)
        else:
            tensors = {
                arena.name: torch.zeros(2 * PAGES + 1, arena.content_bytes, dtype=torch.uint8)
                for arena in space.arenas
            }
            self._binding = Binding.of(space, tensors)
        for view in self._binding.views.values():
            view.copy_(torch.randint(0, 128, view.shape, dtype=torch.uint8))
        self._worker = Worker(model, held, {"full": self._binding}, max_tp=1)
        (self._part,) = self._worker.parts
        size = self._worker.record_bytes(self._part, 0)
        self._tier = DramTier((PAGES + 1) * (size + 64))
        self._source = 1 + RNG.permutation(PAGES)
        self._target = 1 + PAGES + RNG.permutation(PAGES)
        numbers = np.arange(1, PAGES + 1, dtype=np.uint64)
        self._keys = np.stack([numbers * np.uint64(0x9E3779B97F4A7C15), numbers], axis=1)
        self.save()
        self.load()
        if not all(
            torch.equal(view[self._source], view[self._target]) for view in self._binding.views.values()
        ):
            raise SystemExit("what came back is wrong")

    def save(self) -> float:
        """Seconds to save every page, in one operation."""
        self._tier.reset(math.inf)
        start = time.perf_counter()
        args = (self._tier, self._part, self._keys, self._source, SaveClass.CACHEABLE, math.inf)
        all_ok(self._worker.save(*args))
        return time.perf_counter() - start

    def load(self) -> float:
        """Seconds to load every page, in one operation."""
        start = time.perf_counter()
        wanted = self._worker.record_keys(self._part, self._keys)
        with self._tier.lookup(wanted, math.inf).wait(CALM_S) as lease:
            rows = np.arange(PAGES)
            args = (self._tier, lease, rows, self._part, self._keys, self._target, math.inf)
            all_ok(self._worker.load(*args))
        return time.perf_counter() - start

    def close(self) -> None:
        """End."""
        if not (self._worker.close(math.inf) and self._tier.close(math.inf)):
            raise SystemExit("the tier ended badly")


def served_model() -> KvModel:
    """Pages of PAGE_BYTES in layers."""
    kv = tuple(Field(name=name, dtype="uint8", axes={"byte": LAYER_BYTES // 2}) for name in "kv")
    arenas = (
        Arena.planes(name=f"layer.{layer:02}", group="kv", layer=layer, fields=kv) for layer in range(LAYERS)
    )
    return KvModel(
        contract=1,
        name="served",
        weights=WeightIdentity(kind="digest", value="none"),
        numerics="none",
        page_tokens=1,
        groups=(Group(name="kv"),),
        arenas=tuple(arenas),
    )


def in_threads(work: Callable[[npt.NDArray[np.int64]], None], rows: npt.NDArray[np.int64]) -> float:
    """Seconds until some threads have done their shares."""
    threads = [threading.Thread(target=work, args=(share,)) for share in np.array_split(rows, THREADS)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


class PlainMemory:
    """Copies page by page, in random order, in some threads."""

    def __init__(self) -> None:
        self._pages = [filled(PAGE_BYTES, PAGES), filled(PAGE_BYTES, PAGES)]
        self._order = RNG.permutation(PAGES)
        self._turn = count()

    def copy(self) -> float:
        """Seconds to copy every page."""
        turn = next(self._turn) % 2
        source, target = self._pages[turn].ctypes.data, self._pages[1 - turn].ctypes.data

        def work(rows: npt.NDArray[np.int64]) -> None:
            for row in rows.tolist():
                ctypes.memmove(target + row * PAGE_BYTES, source + row * PAGE_BYTES, PAGE_BYTES)

        return in_threads(work, self._order)


def dram_rows(rounds: int) -> Iterator[Row]:
    """Both ways: copies into and out of lent memory, then what a worker does, which sums them as well."""
    plain = PlainMemory()
    sides: tuple[tuple[str, float | None, Callable[[], LentMemory | WorkerSide]], ...] = (
        ("without checksums", DRAM_BAR, LentMemory),
        ("with checksums", DRAM_SUMMED_BAR, partial(WorkerSide, "page-first")),
        (
            f"with checksums, layers of {LAYER_BYTES // 1024} KiB apart",
            None,
            partial(WorkerSide, "layer-first"),
        ),
    )
    for how, bar, make in sides:
        side = make()
        for name, ours in (("save", side.save), ("load", side.load)):
            label = f"dram: {name} random {PAGE_BYTES / MIB:g} MiB pages, {how}, {THREADS} threads"
            yield measure(Case(label, ours, plain.copy, bar=bar, note=f"{PAGES} pages"), rounds)
        side.close()

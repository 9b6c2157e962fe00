"""Copies between pages and host memory: pages where they lie, records in one piece, sums on.

    python benchmarks/copies.py [--json PATH|-] [--rounds N] [--only TEXT]

1,024 random pages of 36 layers of 64 KiB. On a CUDA device: to and from pinned memory, against one large
pinned copy of as many bytes. On the host: against a page-wise memcpy with as many threads. Every row checks
bytes and sums before it is timed. Exit code 1: a bar is missed, or a row failed.
"""

from __future__ import annotations

import argparse
import ctypes
import platform
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import torch
from paired import Case, Row, measure, publish

from kvcontract import Arena, Field, Group, KvModel, WeightIdentity
from kvcontract.contract.layout import layout
from kvcontract.contract.wire import parts, wire_record
from kvcontract.core.pending import Pending
from kvcontract.memory import copy as copies
from kvcontract.memory.binding import Binding
from kvcontract.memory.checksum import SegmentSums
from kvcontract.memory.copy import CopyProgram

PAGE, LAYERS, LAYER_BYTES = 16, 36, 64 * 1024
POOL, MANY, FEW, ON_HOST = 2_049, 1_024, 64, 128
BATCH_BYTES = 32 * 2**20
IN_FLIGHT = 4
RNG = np.random.default_rng(1)
GIB = 2**30
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
        model = model_of(layers, layer_bytes)
        space = layout(model).space("full")
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
        self.record = wire_record(model, parts(model)[0])
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
    at = host.data_ptr() + host.shape[1] * np.arange(len(host), dtype=np.int64)
    return SegmentSums((host.shape[1],), segments).sums(at[:, None])


def addresses(host: torch.Tensor) -> Ids:
    """int64[n], where rows begin."""
    rows: Ids = host.data_ptr() + host.shape[1] * np.arange(len(host), dtype=np.int64)
    return rows


def timed(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# On a device


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
    """A mover, batches and all, as a worker uses it."""

    def __init__(self, pages: Pages, **options: Any) -> None:
        from kvcontract.memory.device import DeviceMover, Plan  # noqa: PLC0415 - needs a device

        self.pages = pages
        self.plan = Plan(pages.program, pages.record.segments)
        self.faults: list[Exception] = []
        each = max(1, BATCH_BYTES // pages.size)
        device = pages.binding.device
        self.mover = DeviceMover(device, each * pages.size, self.faults.append, **options)
        self.each = each

    def all(self, verb: str, ids: Ids, at: Ids) -> Any:
        """Every batch of a copy, some in flight at a time; their sums."""
        flying: deque[Pending[Any]] = deque()
        found = []
        move = self.mover.out if verb == "out" else self.mover.into
        for start in range(0, len(ids), self.each):
            if len(flying) == IN_FLIGHT:
                found.append(flying.popleft().wait(WAIT_S))
            stop = start + self.each
            flying.append(move(self.plan, ids[start:stop], at[start:stop]))
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

    def close(self) -> None:
        """End its threads."""
        self.mover.close(WAIT_S)


def large(size: int, verb: str, stream: Any = None) -> Callable[[], float]:
    """One pinned copy of so many bytes."""
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    host = pinned(MANY * LAYERS * LAYER_BYTES)[:size]
    target, source = (host, device) if verb == "out" else (device, host)

    def work() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    return work


def device_case(form: str, verb: str, count: int) -> Case:
    """One direction of one form."""
    pages, moving = pages_of(form), Moving(pages_of(form))
    moving.check(count)
    host = pinned(MANY * pages.size)[: count * pages.size].view(count, pages.size)

    def ours() -> float:
        ids, at = pages.some(count), addresses(host)
        torch.cuda.synchronize()
        return timed(lambda: moving.all(verb, ids, at))

    few = count == FEW
    return Case(
        f"{form}, {verb}, {count:,} pages",
        ours,
        large(count * pages.size, verb),
        unit="GB/s" if not few else "ms",
        per_s=1e3,
        bar=1.2 if few else (0.95 if form == "layer-first" else 0.97),
        sense="at most" if few else "at least",
        note=f"straight {moving.plan.straight}",
    )


def both_ways(form: str) -> Case:
    """Half of the pages out, the other half in, at once."""
    pages, count = pages_of(form), MANY // 2
    moving = Moving(pages)
    whole = pinned(MANY * pages.size).view(MANY, pages.size)
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    device = [torch.empty(count * pages.size, dtype=torch.uint8, device="cuda") for _ in range(2)]

    def ours() -> float:
        ids = pages.some(2 * count)
        torch.cuda.synchronize()
        work = [
            threading.Thread(target=moving.all, args=(verb, part, addresses(rows)))
            for verb, part, rows in (("out", ids[:count], whole[:count]), ("in", ids[count:], whole[count:]))
        ]
        start = time.perf_counter()
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()
        seconds = time.perf_counter() - start
        if moving.faults:
            raise moving.faults[0]
        return seconds

    def theirs() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.cuda.stream(streams[0]):
            whole[:count].view(-1).copy_(device[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            device[1].copy_(whole[count:].view(-1), non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    return Case(f"{form}, both ways, {count} pages each", ours, theirs, bar=0.9)


STEPS, SAVED_PAGES = 40, 2


def decode() -> Callable[[Callable[[int], object]], float]:
    """Runs steps bound by memory, as decoding is, and something after each; returns seconds."""
    weights = [torch.randn(8192, 6144, dtype=torch.bfloat16, device="cuda") for _ in range(36)]
    vector = torch.randn(6144, dtype=torch.bfloat16, device="cuda")

    def run(each: Callable[[int], object]) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for number in range(STEPS):
            for weight in weights:
                torch.mv(weight, vector)
            event = torch.cuda.Event()
            event.record()
            each(number)
            event.synchronize()
        return time.perf_counter() - start

    return run


def beside(form: str, rate: str) -> Case:
    """Steps beside copies out: of what decoding itself fills, or as many as the bus takes."""
    pages, moving, run = pages_of(form), Moving(pages_of(form)), decode()
    moving.check(FEW)
    at = addresses(pinned(MANY * pages.size).view(MANY, pages.size))

    def own() -> float:
        ids = pages.some(MANY)
        pendings: list[Pending[Any]] = []

        def save(number: int) -> None:
            event = torch.cuda.Event()
            event.record()
            moving.mover.after(event)
            rows = slice(number * SAVED_PAGES, (number + 1) * SAVED_PAGES)
            pendings.append(moving.mover.out(moving.plan, ids[rows], at[rows]))

        seconds = run(save)
        for pending in pendings:
            pending.wait(WAIT_S)
        return seconds

    def full() -> float:
        ids, ended = pages.some(MANY), threading.Event()

        def copy() -> None:
            while not ended.is_set():
                moving.all("out", ids, at)

        thread = threading.Thread(target=copy)
        thread.start()
        try:
            return run(lambda _: None)
        finally:
            ended.set()
            thread.join()

    return Case(
        f"{form}, decode beside offload, {rate} rate",
        own if rate == "own" else full,
        lambda: run(lambda _: None),
        bar=1.01 if rate == "own" else 1.04,
        sense="at most",
        per_s=1e3 / STEPS,
    )


def kernel_case(form: str, what: str) -> Case:
    """One kernel over one batch that stays on the device; GB/s of payload are in the note."""
    pages, moving = pages_of(form), Moving(pages_of(form))
    moving.check(FEW)
    ids, count = pages.some(moving.each), moving.each
    memory = torch.empty(count, pages.size, dtype=torch.uint8, device="cuda")
    wire = torch.from_numpy(addresses(memory)).cuda()
    index, grains = torch.from_numpy(ids).cuda(), pages.program.grains
    from kvcontract.memory.lanes import LaneSums  # noqa: PLC0415 - beside its use

    sums = LaneSums((pages.size,), pages.record.segments, pages.binding.device)
    if grains is None:
        raise AssertionError("no kernels")
    work: dict[str, Callable[[], object]] = {
        "gather": lambda: grains.move(index, wire, to_wire=True),
        "scatter": lambda: grains.move(index, wire, to_wire=False),
        "sums": lambda: sums.sums(wire[:, None]),
    }

    def ours() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(20):
            work[what]()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 20e3

    gbs = count * pages.size / min(ours() for _ in range(5)) / 1e9
    return Case(f"{form}, {what} kernel, one batch", ours, unit="us", per_s=1e6, note=f"{gbs:.0f} GB/s")


def fragment_case(layer_bytes: int, verb: str) -> Case:
    """Straight batched copies of fragments (ours) against gathering them first (theirs): calibration."""
    layers = max(1, LAYERS * LAYER_BYTES // layer_bytes)
    kept = copies.MIN_DEVICE_RUN_BYTES
    made = []
    for threshold in (0, 2**40):
        copies.MIN_DEVICE_RUN_BYTES = threshold
        try:
            pages = Pages("layer-first", "cuda", layers, layer_bytes, 257)
            made.append(Moving(pages))
        finally:
            copies.MIN_DEVICE_RUN_BYTES = kept
    straight, gathered = made
    if not straight.plan.straight or gathered.plan.straight:
        raise AssertionError("the threshold does not decide")
    for moving in made:
        moving.check(FEW)
    count = 256

    def run(moving: Moving) -> float:
        host = pinned(MANY * LAYERS * LAYER_BYTES)[: count * moving.pages.size].view(count, -1)
        ids, at = moving.pages.some(count), addresses(host)
        torch.cuda.synchronize()
        return timed(lambda: moving.all(verb, ids, at))

    gbs = count * straight.pages.size / min(run(straight) for _ in range(3)) / 1e9
    other = count * straight.pages.size / min(run(gathered) for _ in range(3)) / 1e9
    return Case(
        f"fragments of {layer_bytes // 1024} KiB, {verb}: straight / gathered",
        lambda: run(straight),
        lambda: run(gathered),
        note=f"{gbs:.1f} / {other:.1f} GB/s",
    )


def pin_case() -> Case:
    """What pinning costs."""
    from kvcontract.memory.pinned import pinned_memory  # noqa: PLC0415 - needs a device

    def ours() -> float:
        return timed(lambda: pinned_memory(GIB // 4))

    return Case("pin 256 MiB", ours)


# On the host


def host_case(form: str, verb: str) -> Case:
    """Gather or scatter, against a memcpy of the same runs, one after the other."""
    torch.set_num_threads(1)
    pages = Pages(form, "cpu", blocks=2 * ON_HOST + 1)
    staged = torch.zeros(ON_HOST, pages.size, dtype=torch.uint8)
    ids = pages.some(ON_HOST)
    pages.program.gather(ids, staged)
    if not torch.equal(staged, pages.payloads(ids)):
        raise AssertionError("other bytes than torch gathers")
    address, lengths = pages.program.buffers(ids)
    rows = addresses(staged)

    def ours() -> float:
        move = pages.program.gather if verb == "gather" else pages.program.scatter
        return timed(lambda: move(ids, staged))

    def page_wise() -> None:
        for row, starts in zip(rows.tolist(), address.tolist(), strict=True):
            at = row
            for start, size in zip(starts, lengths, strict=True):
                pair = (at, start) if verb == "gather" else (start, at)
                ctypes.memmove(*pair, size)
                at += size

    return Case(f"host, {form}, {verb}, {ON_HOST} pages", ours, lambda: timed(page_wise), bar=0.9)


FORMS = ("layer-first", "page-first")
Maker = tuple[str, bool, Callable[[], Case]]


def rows_of() -> list[Maker]:
    """Name, whether a device is needed, and what makes the case."""
    host = [
        (f"host, {form}, {verb}", False, partial(host_case, form, verb))
        for form, verb in product(FORMS, ("gather", "scatter"))
    ]
    kernels = [
        (f"{form}, {what} kernel", True, partial(kernel_case, form, what))
        for form, what in product(FORMS, ("gather", "scatter", "sums"))
    ]
    bars = [
        (f"{form}, {verb}, {count:,} pages", True, partial(device_case, form, verb, count))
        for form, count, verb in product(FORMS, (MANY, FEW), ("out", "in"))
    ]
    bars += [(f"{form}, both ways", True, partial(both_ways, form)) for form in FORMS]
    bars += [
        (f"{form}, decode beside offload, {rate} rate", True, partial(beside, form, rate))
        for form, rate in product(FORMS, ("own", "full"))
    ]
    fragments = [
        (f"fragments of {size} KiB, {verb}", True, partial(fragment_case, size * 1024, verb))
        for size, verb in product((16, 32, 64, 128, 256, 512, 1152), ("out", "in"))
    ]
    return [*host, ("pin 256 MiB", True, pin_case), *kernels, *bars, *fragments]


def one_row(name: str, make: Callable[[], Case], rounds: int) -> Row:
    """Measure a row; what fails says so, whole, and the others go on."""
    start = time.perf_counter()
    try:
        row = measure(make(), rounds)
    except Exception as error:  # noqa: BLE001 - printed, and the row is not ok
        traceback.print_exc()
        row = Row(name, "", None, ok=False, note=f"failed: {type(error).__name__}: {error}"[:200])
    print(f"{name}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    return row


def versions() -> dict[str, str]:
    """What was measured."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    if torch.cuda.is_available():
        import triton  # noqa: PLC0415 - where a device is

        found |= {
            "device": torch.cuda.get_device_name(),
            "cuda": str(torch.version.cuda),
            "triton": triton.__version__,
        }
    return found


def main() -> int:
    """Run what this machine can run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="rows whose name has this text")
    given = parser.parse_args()
    rows = []
    for name, needs_device, make in rows_of():
        if given.only not in name:
            continue
        if needs_device and not torch.cuda.is_available():
            rows.append(Row(name, "", None, note="skipped: no CUDA device"))
            continue
        rows.append(one_row(name, make, given.rounds))
        if needs_device:
            torch.cuda.empty_cache()
    return publish(rows, versions(), "Copies", given.json)


if __name__ == "__main__":
    raise SystemExit(main())

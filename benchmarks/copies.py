"""The rows of `copy.py`."""

from __future__ import annotations

import argparse
import ctypes
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from moving import (
    FEW,
    LAYER_BYTES,
    LAYERS,
    MANY,
    SAVED_PAGES,
    STEPS,
    WAIT_S,
    Backlog,
    Moving,
    Pages,
    addresses,
    decode,
    good,
    pages_of,
    pinned,
    timed,
    working_of,
)
from paired import Case, Row, measure, publish, versions

from kvcontract.memory import copy as copies

ON_HOST = 128
LAUNCHING_CYCLES = 4_000_000
GIB = 2**30


def large(size: int, verb: str) -> Callable[[], float]:
    """One pinned copy of so many bytes."""
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    host = pinned(MANY * LAYERS * LAYER_BYTES)[:size]
    target, source = (host, device) if verb == "out" else (device, host)

    def work() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    return work


def gigabytes(pages: int) -> float:
    """What so many pages hold."""
    return pages * LAYERS * LAYER_BYTES / 1e9


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
    best = gigabytes(count) / min(ours() for _ in range(3))
    return Case(
        f"{form}, {verb}, {count:,} pages",
        ours,
        large(count * pages.size, verb),
        bar=1.2 if few else (0.95 if form == "layer-first" else 0.97),
        sense="at most" if few else "at least",
        note=f"{best:.1f} GB/s{', straight' if moving.plan.straight else ''}",
    )


def worker_case(form: str, verb: str) -> Case:
    """The same by a worker, to or from a DRAM tier of pinned memory."""
    pages, working = pages_of(form), working_of(form)
    working.check(FEW)
    kept = working.keys(MANY)

    def out() -> float:
        working.tier.reset(time.monotonic() + WAIT_S)
        keys, ids = working.keys(MANY), pages.some(MANY)
        torch.cuda.synchronize()
        return timed(lambda: good(working.save(keys, ids)))

    def back() -> float:
        ids = pages.some(MANY)
        torch.cuda.synchronize()
        return timed(lambda: working.load(kept, ids))

    working.tier.reset(time.monotonic() + WAIT_S)
    good(working.save(kept, pages.some(MANY)))
    ours = out if verb == "out" else back
    best = gigabytes(MANY) / min(ours() for _ in range(3))
    name = "save to" if verb == "out" else "load from"
    return Case(
        f"{form}, worker: {name} DRAM tier, {MANY:,} pages",
        ours,
        large(MANY * pages.size, verb),
        note=f"{best:.1f} GB/s",
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

    best = gigabytes(2 * count) / min(ours() for _ in range(3))
    return Case(f"{form}, both ways, {count} pages each", ours, theirs, bar=0.9, note=f"{best:.1f} GB/s")


def beside(form: str, what: str, *, graph: bool = True, ahead: int = 1) -> Case:
    """Steps beside a worker's saves: of what decoding itself fills, or as many as the bus takes."""
    pages, working, run = pages_of(form), working_of(form), decode(graph=graph, ahead=ahead)
    working.check(FEW)
    saved = [0]

    def own() -> float:
        ids, keys = pages.some(STEPS * SAVED_PAGES), working.keys(STEPS * SAVED_PAGES)
        pendings = []

        def save(number: int) -> None:
            event = torch.cuda.Event()
            event.record()
            rows = slice(number * SAVED_PAGES, (number + 1) * SAVED_PAGES)
            pendings.append(working.save(keys[rows], ids[rows], event))

        seconds = run(save)
        for pending in pendings:
            good(pending)
        return seconds

    def full() -> float:
        start, before = time.perf_counter(), saved[0]

        def copy() -> None:
            good(working.save(working.keys(MANY // 4), pages.some(MANY // 4)))
            saved[0] += MANY // 4

        with Backlog(copy):
            seconds = run(lambda _: None)
        speeds.append(gigabytes(saved[0] - before) / (time.perf_counter() - start))
        return seconds

    speeds: list[float] = []
    ours = own if what == "own" else full
    for _ in range(4):
        ours()
    steps = "steps of one graph" if graph else "steps of 36 launches from Python"
    launched = "one launched ahead" if ahead else "each waited for"
    return Case(
        f"{form}, decode beside offload, {what} rate, {steps}, {launched}",
        ours,
        lambda: run(lambda _: None),
        bar=None if not (graph and ahead) else 1.01 if what == "own" else 1.04,
        sense="at most",
        per_s=1e3 / STEPS,
        note=f"{speeds[-1]:.1f} GB/s" if speeds else f"{SAVED_PAGES} pages a step",
    )


def kernel_case(form: str, what: str) -> Case:
    """One kernel over one batch that stays on the device; GB/s of payload are in the note."""
    from kvcontract.memory.device import Desk  # noqa: PLC0415 - needs a device

    pages, moving = pages_of(form), Moving(pages_of(form))
    ids, count = pages.some(moving.shard.batch_records), moving.shard.batch_records
    memory = torch.empty(count, pages.size, dtype=torch.uint8, device="cuda")
    desk, plan = Desk(pages.binding.device, 0), moving.plan
    desk.prepare(ids, count * len(plan.sums))
    stream = torch.cuda.current_stream()
    plan.tell(desk, count, stream)
    read, write = {"gather": (True, True), "scatter": (False, True), "sums": (True, False)}[what]

    def ours() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(LAUNCHING_CYCLES)  # noqa: SLF001 - what is timed are kernels, not their launches
        begin.record()
        for _ in range(20):
            plan.carry(desk, count, memory, stream, read=read, write=write)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 20e3

    ours()
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
BESIDE: dict[str, dict[str, Any]] = {
    "decode beside offload": {},
    "decode that waits for each step beside offload": {"ahead": 0},
    "decode from Python beside offload": {"graph": False},
    "decode from Python that waits for each step beside offload": {"graph": False, "ahead": 0},
}
Maker = tuple[str, bool, Callable[[], Case]]


def rows_of() -> list[Maker]:
    """Name, whether a device is needed, and what makes the case."""
    host = [
        (f"host, {form}, {verb}", False, partial(host_case, form, verb))
        for form, verb in product(FORMS, ("gather", "scatter"))
    ]
    kernels = [
        (f"{form}, {what} kernel", True, partial(kernel_case, form, what))
        for form, what in (("layer-first", "gather"), ("layer-first", "scatter"), ("page-first", "sums"))
    ]
    bars = [
        (f"{form}, {verb}, {count:,} pages", True, partial(device_case, form, verb, count))
        for form, count, verb in product(FORMS, (MANY, FEW), ("out", "in"))
    ]
    bars += [(f"{form}, both ways", True, partial(both_ways, form)) for form in FORMS]
    bars += [
        (f"{form}, worker, {verb}, {MANY:,} pages", True, partial(worker_case, form, verb))
        for form, verb in product(FORMS, ("out", "in"))
    ]
    for name, options in BESIDE.items():
        bars += [
            (f"{form}, {name}, {what} rate", True, partial(beside, form, what, **options))
            for form, what in product(FORMS, ("own", "full"))
        ]
    fragments = [
        (f"fragments of {size} KiB, {verb}", True, partial(fragment_case, size * 1024, verb))
        for size, verb in product((64, 256, 512, 1152), ("out", "in"))
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


def device_versions() -> dict[str, str]:
    """Of the device, where there is one."""
    if not torch.cuda.is_available():
        return {}
    return {"device": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)} | versions("triton")


def main(about: str) -> int:
    """Run what this machine can run."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
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
    return publish(rows, versions("numpy", "torch") | device_versions(), "Copies", given.json)

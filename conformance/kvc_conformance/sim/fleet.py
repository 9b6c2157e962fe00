"""Many seeds, in several processes: what they reached, and the first that found something."""

from __future__ import annotations

import gc
import multiprocessing
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any, Final

import torch

from kvc_conformance.sim.judge import Counts
from kvc_conformance.sim.prompts import Prompts
from kvc_conformance.sim.spaces import simulated
from kvc_conformance.sim.trace import STEPS, Trace, collected, cut_down, of, run_seed
from kvcontract.contract.model import Full, KvModel
from kvcontract.tiers.fault import FAULTS_OF

CHUNK: Final = 20
"""Seeds that a process plays between two reports; what they leave behind is collected then."""

FAULTS: Final = (
    *(f"{kind} {verb}" for verb, kinds in FAULTS_OF.items() for kind in kinds),
    *(f"{kind} {verb}" for verb in FAULTS_OF for kind in ("stale", "delay", "overtake")),
    "freeze",
    "die",
    "evict",
    "crash",
    "fail copy",
)
"""Everything that can befall a world."""

TERMINALS: Final = (
    *(f"resolve {end}" for end in ("hit", "miss", "degraded", "cancelled", "refused")),
    *(f"load {end}" for end in ("ok", "failed", "ok late", "failed late")),
    *(f"save {end}" for end in ("ok", "failed", "shed")),
    *(f"{level} {end}" for level in ("landed", "visible", "durable") for end in ("reached", "missed")),
    *("loads reached", "loads missed", "barrier left", "handoff settled", "handoff not settled"),
    *("reset done", "reset not done", "close drained", "close leaked"),
    *("admission ok", "admission later", "admission never", "step ok", "step reverted"),
    *("request retired", "request released", "request preempted", "resume ok", "resume later"),
    *("restored", "not restored", "relay ok", "relay failed", "relay lost"),
    *("checkpoint ok", "checkpoint without room", "checkpoint failed"),
)
"""Every way in which something can end."""

CLAUSES: Final = (
    *("A2", "A3", "A4", "A5", "A6", "A7", "A9", "A11", "A12", "A13", "A16", "A17", "A20", "A24"),
    *("B4", "B5", "B12", "B17", "B21", "C1", "C3", "C4", "C5", "C6", "C7", "C8", "C9", "C10", "C11"),
    *("D2", "F1", "F2", "F3", "F4", "F5", "F6", "F7", "I6", "R2", "R3", "R4", "R5", "R7", "R8"),
)
"""Every clause that is judged."""

SEEN: Final = ("A1", "A7", "A10", "A15", "A16", "A18", "C11", "E7")
"""Clauses of which the reasons of shorter hits show that they were at work."""

BESIDE: Final[Mapping[str, tuple[str, ...]]] = {
    "windows": ("B17", "F5"),
    "slots": (
        "fail copy",
        *("checkpoint ok", "checkpoint without room", "checkpoint failed"),
        *("F1", "F2", "F3", "F4", "F5", "F6", "F7"),
    ),
}
"""Of all these, what only some declarations can reach: those that have windows of pages, or slots."""

Progress = Callable[[int], object]


@dataclass(slots=True)
class Summary:
    """What some seeds came to.

    Attributes:
        beside: what some of the declarations have beside full pages, see `BESIDE`.
        seeds: that were played.
        counts: what they reached.
        choices: of each seed.
        failed: seeds that found something.
        trace: the first of those, cut down; None also if it does not come again.
    """

    beside: frozenset[str] = frozenset(BESIDE)
    seeds: int = 0
    counts: Counts = field(default_factory=Counts)
    choices: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    trace: Trace | None = None

    @property
    def median_choices(self) -> float:
        """Choice points of a seed."""
        return statistics.median(self.choices) if self.choices else 0.0

    @property
    def unreached(self) -> list[str]:
        """What should have happened, and did not."""
        return [name for _, names, found in self._kinds() for name in names if not found[name]]

    def _kinds(self) -> Iterator[tuple[str, list[str], Counter[str]]]:
        """Title, what there is to reach, and how often each was."""
        elsewhere = {name for kind in BESIDE for name in BESIDE[kind]}
        elsewhere -= {name for kind in self.beside for name in BESIDE[kind]}
        for title, names, found in (
            ("faults", FAULTS, self.counts.faults),
            ("terminals", TERMINALS, self.counts.terminals),
            ("clauses judged", CLAUSES, self.counts.clauses),
            ("clauses seen at work", SEEN, self.counts.seen),
        ):
            yield title, [name for name in names if name not in elsewhere], found

    def as_json(self, seconds: float) -> dict[str, Any]:
        """As plain JSON."""
        counts, trace = self.counts, self.trace
        found = None
        if trace is not None and trace.violation is not None:
            found = {"seed": trace.seed, "clause": trace.violation[0], "text": trace.violation[1]}
        return {
            "schema": "kvc.simulation/1",
            "seeds": self.seeds,
            "seconds": round(seconds, 3),
            "median_choices": self.median_choices,
            "violation": found,
            "unreached": self.unreached,
            "faults": dict(sorted(counts.faults.items())),
            "terminals": dict(sorted(counts.terminals.items())),
            "clauses": dict(sorted(counts.clauses.items())),
            "seen": dict(sorted(counts.seen.items())),
        }

    def lines(self) -> Iterator[str]:
        """The counts as text, one line a kind."""
        for title, names, found in self._kinds():
            yield title
            for name in (*names, *sorted(set(found) - set(names))):
                yield f"  {name:<22} {found[name]:>12,}"


def simulate(
    models: Sequence[KvModel],
    seeds: range,
    *,
    jobs: int | None = None,
    steps: int = STEPS,
    progress: Progress | None = None,
) -> Summary:
    """Play seeds until all are done, or one has found something.

    Args:
        models: seed n plays the one with number n modulo theirs.
        seeds: which.
        jobs: processes; None: one for each core.
        steps: actions of a seed.
        progress: told how many seeds are done.

    Raises:
        UsageFault: a model that cannot be simulated.
    """
    small = [simulated(model) for model in models]
    summary, tell = Summary(_beside(small)), progress or (lambda _: None)
    documents = tuple(model.model_dump_json() for model in small)
    chunks = (seeds[at : at + CHUNK] for at in range(0, len(seeds), CHUNK))
    count = jobs or os.cpu_count() or 1
    spawn, others = multiprocessing.get_context("spawn"), multiprocessing.active_children()
    with (
        ProcessPoolExecutor(count, mp_context=spawn, initializer=_prepare, initargs=(documents,)) as pool,
        _ended(others),
    ):
        open_: set[Future[_Chunk]] = set()
        while True:
            for chunk in chunks:
                open_.add(pool.submit(_play_chunk, chunk, steps))
                if len(open_) > 2 * count:
                    break
            if not open_:
                break
            done, open_ = wait(open_, return_when=FIRST_COMPLETED)
            for future in done:
                _add(summary, future.result())
                tell(summary.seeds)
            if summary.failed:
                for future in open_:
                    future.cancel()
                break
    if summary.failed:
        first = min(summary.failed)
        summary.trace = _trace(Prompts(small[first % len(small)]), first, steps)
    return summary


def _beside(models: Sequence[KvModel]) -> frozenset[str]:
    groups = [group for model in models for group in model.groups]
    kinds = {"slots": [group.kind == "bounded" for group in groups]}
    kinds["windows"] = [not isinstance(group.reach, Full) for group in groups]
    return frozenset(kind for kind, found in kinds.items() if any(found))


def first_found(prompts: Prompts, seeds: range, steps: int = STEPS) -> Trace | None:
    """Play seeds here, one after the other; what the first of them found, as it was found."""
    for at in range(0, len(seeds), CHUNK):
        with collected():
            for seed in seeds[at : at + CHUNK]:
                setting, played = run_seed(prompts, seed, steps)
                if played.violation is not None:
                    return of(prompts, seed, setting, played)
    return None


def _trace(prompts: Prompts, seed: int, steps: int) -> Trace | None:
    found = first_found(prompts, range(seed, seed + 1), steps)
    return None if found is None else cut_down(prompts, found)


@dataclass(slots=True)
class _Chunk:
    seeds: int
    counts: Counts
    choices: list[int]
    failed: list[int]


_PROMPTS: list[Prompts] = []


def _prepare(documents: Sequence[str]) -> None:
    """In a process of its own: make what all seeds share."""
    torch.set_num_threads(1)
    _PROMPTS[:] = [Prompts(KvModel.model_validate_json(document)) for document in documents]
    run_seed(_PROMPTS[0], 0, steps=20)  # compiles, imports, fills caches
    gc.collect()
    gc.freeze()


def _play_chunk(seeds: range, steps: int) -> _Chunk:
    chunk = _Chunk(0, Counts(), [], [])
    with collected():
        for seed in seeds:
            _, played = run_seed(_PROMPTS[seed % len(_PROMPTS)], seed, steps)
            chunk.seeds += 1
            chunk.counts.add(played.counts)
            chunk.choices.append(played.counts.choices)
            if played.violation is not None:
                chunk.failed.append(seed)
                break
    return chunk


@contextmanager
def _ended(others: Sequence[BaseProcess]) -> Iterator[None]:
    """Whoever is interrupted does not wait for what the processes are at; `others` are not touched."""
    try:
        yield
    except BaseException:
        for process in multiprocessing.active_children():
            if process not in others:
                process.terminate()
        raise


def _add(summary: Summary, chunk: _Chunk) -> None:
    summary.seeds += chunk.seeds
    summary.counts.add(chunk.counts)
    summary.choices += chunk.choices
    summary.failed += chunk.failed

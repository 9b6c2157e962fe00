"""KVC-PREFIX-04: what a step writes, seen by running it over two fillings of the memory."""

from __future__ import annotations

from typing import Any, Final

from kvc_conformance.bench import Bench, Check, Failed, NotApplicable
from kvc_conformance.checks.golden import page_cases, parts_of
from kvc_conformance.engine_rig import OWN, Batches, Job, Rig, engine_rig
from kvc_conformance.footprint import Footprint, Kind

FILLS: Final = (0xA5, 0x5A)
"""Small finite numbers, so that even a padding page may be read; no bit is the same in both."""

KINDS: Final[tuple[Kind, ...]] = ("paged", "bounded")


def _writes(bench: Bench, case: str) -> str:
    """KVC-PREFIX-04."""
    rig, one, two = _written(bench, case)
    rows = slots = 0
    for number in range(len(one.batches)):
        for kind in KINDS:
            footprint = Footprint(rig.model, rig.places, one.batches[: number + 1], kind)
            before = (one.images[number - 1], two.images[number - 1]) if number else None
            wrong = footprint.judge((one.images[number], two.images[number]), FILLS, before)
            if wrong is not None:
                rig.fail(wrong)
            rows, slots = footprint.rows, footprint.slots
    also = f" and {slots} slots" if slots else ""
    return f"{rows} rows an arena{also} written in {len(one.batches)} steps, and no other byte"


def _written(bench: Bench, case: str) -> tuple[Rig, Batches, Batches]:
    """The same steps over two fillings of the memory."""
    dtype, page, kind = parts_of(case)
    jobs = [Job(page + max(1, page // 2), 3, seed=41)]
    if kind == "two requests":
        jobs.append(Job(max(1, page - 2), 4, seed=42))
    pages = 3 + sum(job.pages(page) for job in jobs)
    settings = {"pages": pages, "max_batch_tokens": 2 * page + 2, "max_chunk_tokens": page}
    found: list[Batches] = []
    for fill in FILLS:
        with engine_rig(bench, f"writes {case}", dtype, page, **settings) as rig:
            if rig.max_requests < len(jobs):
                raise NotApplicable("the executor takes one request a step")
            found.append(rig.run(jobs, poison=fill, dump=True))
    one, two = found
    if _placed(one) != _placed(two):
        raise Failed("two equal runs were given other pages", fault="suite")
    return rig, one, two


def _placed(run: Batches) -> list[list[Any]]:
    return [
        [table.tolist() for table in (*batch.tables.values(), *batch.slots.values())] for batch in run.batches
    ]


def _judged(bench: Bench, case: str) -> str:
    _ = bench.small
    return _writes(bench, case)


CHECKS: Final[tuple[Check, ...]] = (
    Check("KVC-PREFIX-04", _judged, page_cases("one request", "two requests", dtypes=("fp32", OWN))),
)

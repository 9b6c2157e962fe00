"""State that is rewritten at each token: where a prefill may be cut for it."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from kvc_conformance.bench import Bench, Check, CouldNotRun, Failed, NotApplicable
from kvc_conformance.beside import Beside
from kvc_conformance.checks.golden import NAN, page_cases, parts_of
from kvc_conformance.engine_rig import Job, Rig, engine_rig
from kvc_conformance.golden import Run
from kvc_conformance.states import FLOAT32, state_fields
from kvcontract.contract.layout import with_page_tokens
from kvcontract.contract.model import KvModel

COARSER: Final = (2, 4, 8, 16)
"""Other multiples of the boundary, to tell one that is too fine from noise of matrix products."""

CUT: Final = "cut"
INSIDE: Final = "written inside a step"

CUT_NOISE: Final = 0.02
"""How far states may be apart where even coarse cuts change bits, in units of the largest number."""


def _cut(bench: Bench, case: str) -> str:
    """KVC-BOUNDED-01."""
    dtype, page, kind = parts_of(case)
    if kind == INSIDE:
        return _written_inside(bench, dtype, page)
    whole = _cut_at(bench, dtype, page, None)
    fine = _cut_at(bench, dtype, page, 1)
    if (fine.state == whole.state).all():
        return f"cut at every {fine.step} tokens: equal bit for bit"
    for times in COARSER:
        found = _cut_at(bench, dtype, page, times)
        if found.step < found.tokens and (found.state == whole.state).all():
            item = _first_different(whole.model, fine.state, whole.state)
            fine.rig.fail(
                f"a prefill of {whole.tokens} tokens that is cut at every {fine.step} leaves another state"
                f" than one that is not cut ({item}); cut at every {found.step}, it leaves the same one:"
                " boundary_tokens is finer than the kernel"
            )
    apart = _apart(whole.model, fine.state, whole.state)
    if not apart <= CUT_NOISE:
        fine.rig.fail(
            f"a prefill of {whole.tokens} tokens that is cut at every {fine.step} leaves a state that is"
            f" {apart:.2g} of its largest number away from that of one that is not cut"
        )
    return f"every cut changes bits here, by {apart:.2g} of the largest number at most"


def _written_inside(bench: Bench, dtype: str, page: int) -> str:
    """What an executor writes at a position inside a step is what a prefill that ends there leaves."""
    unit = _granule(bench, page)
    job = Job(3 * unit + max(1, unit // 2), 1, seed=62)
    settings = {"pages": 2 + 2 * job.pages(page), "max_batch_tokens": job.tokens, "prefix_cache": True}
    long = {"max_chunk_tokens": job.tokens, **settings}
    with engine_rig(bench, f"inside {dtype} {page}", dtype, page, **long) as rig:
        if not rig.emits:
            raise NotApplicable("the executor writes no state inside a step")
        # Zeros: what was not written is then a state like any other, which is judged.
        whole, warm = (rig.run([job], poison=poison).runs[0] for poison in (0, None))
        if len(whole.split) > 1 or not warm.hit_tokens:
            raise Failed(f"cut into {whole.split}, then a hit of {warm.hit_tokens} tokens", fault="runtime")
    short = {"max_chunk_tokens": unit, **settings}
    with engine_rig(bench, f"ending {dtype} {page}", dtype, page, **short) as ending:
        cut = ending.run([job], poison=NAN).runs[0]
    found, wanted = warm.states[warm.hit_tokens][0], cut.states[warm.hit_tokens - unit][1]
    if (found == wanted).all():
        return f"written after {warm.hit_tokens} of {job.prompt_tokens} tokens of a step: equal bit for bit"
    apart = _apart(rig.model, found, wanted)
    if not apart <= CUT_NOISE:
        rig.fail(
            f"the state that a step of {job.prompt_tokens} tokens has written for position {warm.hit_tokens}"
            f" ({_first_different(rig.model, found, wanted)}) is {apart:.2g} of its largest number away from"
            " what a step that ends there leaves: look at when and where step.snapshots are written"
        )
    return f"{apart:.2g} of the largest number away from what a step that ends there leaves"


class _Cut:
    """What a prefill left in its slot."""

    def __init__(self, rig: Rig, run: Run, step: int) -> None:
        self.rig, self.model, self.step = rig, rig.model, step
        self.tokens = len(run.prompt)
        self.state = run.states[max(run.states)][1]


def _cut_at(bench: Bench, dtype: str, page: int, times: int | None) -> _Cut:
    """Run one prompt, cut at a multiple of the declared boundary, or nowhere."""
    granule = _granule(bench, page)
    job = Job(max(3 * granule, 150) + granule // 2 + 1, 1, seed=61)
    step = job.tokens if times is None else times * granule
    settings = {"pages": 2 + job.pages(page), "max_batch_tokens": job.tokens, "max_chunk_tokens": step}
    with engine_rig(bench, f"cut {dtype} {page} {times}", dtype, page, **settings) as rig:
        if rig.max_batch_tokens < job.prompt_tokens:
            raise CouldNotRun(
                f"needs steps of {job.tokens} tokens; the executor takes {rig.max_batch_tokens}"
            )
        return _Cut(rig, rig.run([job], poison=NAN).runs[0], step)


def _granule(bench: Bench, page: int) -> int:
    """Tokens between two places where every state may be taken."""
    return Beside.of(with_page_tokens(bench.small, page, bench.small.key_tokens)).granule_tokens


def _first_different(model: KvModel, one: Any, other: Any) -> str:
    first = int(np.flatnonzero(one != other)[0])
    return str(next(item for item in state_fields(model) if item.first <= first < item.end))


def _apart(model: KvModel, one: Any, other: Any) -> float:
    """The largest difference of a float32 field, in units of its largest number."""
    found = [0.0]
    for item in state_fields(model):
        if item.dtype == FLOAT32:
            mine, theirs = item.floats(one), item.floats(other)
            found.append(float(np.abs(mine - theirs).max() / max(1e-6, np.abs(theirs).max())))
    return max(found)


CHECKS: Final[tuple[Check, ...]] = (Check("KVC-BOUNDED-01", _cut, page_cases(CUT, INSIDE, dtypes=("bf16",))),)

"""State that is rewritten at each token: where a prefill may be cut for it."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from kvc_conformance.bench import Bench, Check, CouldNotRun
from kvc_conformance.beside import Beside
from kvc_conformance.checks.golden import NAN, page_cases
from kvc_conformance.engine_rig import Job, Rig, engine_rig
from kvc_conformance.golden import Run
from kvc_conformance.states import FLOAT32, state_fields
from kvcontract.contract.layout import with_page_tokens
from kvcontract.contract.model import KvModel

COARSER: Final = (2, 4, 8, 16)
"""Other multiples of the boundary, to tell one that is too fine from noise of matrix products."""

CUT_NOISE: Final = 0.02
"""How far states may be apart where even coarse cuts change bits, in units of the largest number."""


def _cut(bench: Bench, case: str) -> str:
    """KVC-BOUNDED-01."""
    dtype, page = case.split(", page ")
    whole = _cut_at(bench, dtype, int(page), None)
    fine = _cut_at(bench, dtype, int(page), 1)
    if (fine.state == whole.state).all():
        return f"cut at every {fine.step} tokens: equal bit for bit"
    for times in COARSER:
        found = _cut_at(bench, dtype, int(page), times)
        if found.step < found.tokens and (found.state == whole.state).all():
            item = _first_different(whole.model, fine.state, whole.state)
            fine.rig.fail(
                f"a prefill of {whole.tokens} tokens that is cut at every {fine.step} leaves another state"
                f" than one that is not cut ({item}); cut at every {found.step}, it leaves the same one:"
                " boundary_tokens is finer than the kernel"
            )
    apart = _apart(whole.model, fine.state, whole.state)
    if apart > CUT_NOISE:
        fine.rig.fail(
            f"a prefill of {whole.tokens} tokens that is cut at every {fine.step} leaves a state that is"
            f" {apart:.2g} of its largest number away from that of one that is not cut"
        )
    return f"every cut changes bits here, by {apart:.2g} of the largest number at most"


class _Cut:
    """What a prefill left in its slot."""

    def __init__(self, rig: Rig, run: Run, step: int) -> None:
        self.rig, self.model, self.step = rig, rig.model, step
        self.tokens = len(run.prompt)
        self.state = run.states[max(run.states)][1]


def _cut_at(bench: Bench, dtype: str, page: int, times: int | None) -> _Cut:
    """Run one prompt, cut at a multiple of the declared boundary, or nowhere."""
    granule = Beside.of(with_page_tokens(bench.small, page, bench.small.key_tokens)).granule_tokens
    job = Job(max(3 * granule, 150) + granule // 2 + 1, 1, seed=61)
    step = job.tokens if times is None else times * granule
    settings = {"pages": 2 + job.pages(page), "max_batch_tokens": job.tokens, "max_chunk_tokens": step}
    with engine_rig(bench, f"cut {dtype} {page} {times}", dtype, page, **settings) as rig:
        if rig.max_batch_tokens < job.prompt_tokens:
            raise CouldNotRun(
                f"needs steps of {job.tokens} tokens; the executor takes {rig.max_batch_tokens}"
            )
        return _Cut(rig, rig.run([job], poison=NAN).runs[0], step)


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


CHECKS: Final[tuple[Check, ...]] = (Check("KVC-BOUNDED-01", _cut, page_cases(dtypes=("bf16",))),)

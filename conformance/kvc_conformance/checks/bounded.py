"""State that is rewritten at each token: what an executor does to slots, and where a state may be taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from kvc_conformance.bench import Bench, Check, CouldNotRun, Failed, NotApplicable
from kvc_conformance.beside import Beside
from kvc_conformance.checks.golden import NAN, judge_writes, page_cases
from kvc_conformance.engine_rig import TIMEOUT_S, Job, Rig, engine_rig
from kvc_conformance.golden import Run
from kvc_conformance.states import Kept, state_fields, unlike_original
from kvcontract.contract.dtypes import DTYPE_BITS
from kvcontract.contract.layout import with_page_tokens
from kvcontract.contract.model import KvModel

COARSER: Final = (2, 4, 8, 16)
"""Other multiples of the boundary, to tell one that is too fine from noise of matrix products."""

CUT_NOISE: Final = 0.02
"""How far states may be apart where even coarse cuts change bits, in units of the largest number."""


def _needs_slots(bench: Bench) -> KvModel:
    model = bench.small
    if not any(group.kind == "bounded" for group in model.groups):
        raise NotApplicable("the declaration has no bounded group")
    return model


def _slots(bench: Bench, case: str) -> str:
    """KVC-BOUNDED-01."""
    _needs_slots(bench)
    return judge_writes(bench, case, "bounded")


def _original(bench: Bench, case: str) -> str:
    """KVC-BOUNDED-02: on the runs whose logits KVC-PREFIX-01 has compared."""
    _needs_slots(bench)
    answer = bench.small_plugin.call("engine.layer_map", timeout_s=TIMEOUT_S).body
    if answer["layers"] is None:
        raise NotApplicable("the plugin brings its own executor: nobody else knows which field is what")
    if f"states {case}" not in bench.kept:
        raise NotApplicable("no such run: the executor takes one request a step")
    model, runs, arrays = bench.kept[f"states {case}"]
    kept = [Kept.of(model, told) for told in answer["states"]]
    worst, steps = 0.0, 0
    for number, run in enumerate(runs):
        wrong, largest = unlike_original(run, number, kept, arrays)
        if wrong is not None:
            raise Failed(wrong, where=answer["where"], fault="plugin")
        worst, steps = max(worst, largest), steps + len(run.states)
    return f"largest difference {worst:.2g} of {len(kept)} layers after {steps} steps"


def _cut(bench: Bench, case: str) -> str:
    """KVC-BOUNDED-03."""
    _needs_slots(bench)
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
        if item.dtype == "float32" and DTYPE_BITS[item.dtype]:
            mine, theirs = item.floats(one), item.floats(other)
            found.append(float(np.abs(mine - theirs).max() / max(1e-6, np.abs(theirs).max())))
    return max(found)


def _state_cases(bench: Bench) -> tuple[str, ...]:
    sizes = [case.split(", page ")[1] for case in page_cases("fp32")(bench)]
    return tuple(f"{size}, {kind}" for size in sizes for kind in ("alone", "mixed"))


Cases = Callable[[Bench], tuple[str, ...]]

CHECKS: Final[tuple[Check, ...]] = (
    Check("KVC-BOUNDED-01", _slots, page_cases("fp32", "one request", "two requests")),
    Check("KVC-BOUNDED-02", _original, _state_cases),
    Check("KVC-BOUNDED-03", _cut, page_cases("bf16")),
)

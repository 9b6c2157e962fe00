"""Level 2, the real model: the plugin's executor over our arenas against the unmodified model, and itself.

Three gates, because each alone can be fooled: float32 against the original (an executor that never reads
some row equals itself); reused and restored state against a cold run, bit for bit; bfloat16 within bounds.
The parent chooses prompts and judges; one child runs the plugin's executor, another the original.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final

from numpy.typing import NDArray

from kvc_conformance.bench import Bench, Check, CouldNotRun, Failed, NotApplicable
from kvc_conformance.beside import Beside
from kvc_conformance.checks.layer_map import THE_MAP, judged_map
from kvc_conformance.driver import ChildDied, ProbeFailed
from kvc_conformance.engine_rig import OWN, TIMEOUT_S, Batches, Job, Rig, engine_rig
from kvc_conformance.footprint import Batch
from kvc_conformance.golden import (
    COMPUTED_BITS,
    Distance,
    Run,
    beyond_bounds,
    differences,
    less_exact,
    margins,
    wrong_bits,
    wrong_hit,
    wrong_logits,
    wrong_tokens,
)
from kvc_conformance.states import Kept, unlike_original, wrong_states
from kvcontract.contract.dtypes import DTYPE_BITS
from kvcontract.contract.layout import with_page_tokens
from kvcontract.contract.model import Full, KvModel, Window
from kvcontract.store.policy import DEVICE

NAN: Final = 0xFF
"""A byte that makes NaN in every float type."""

TIER_BYTES: Final = 1 << 30
HIT_PAGES: Final = 3
MANY_SIZES: Final = 3
LONG_TOKENS: Final = 305
"""A prompt beyond many a window that was not declared, if the model's context is longer."""

ALONE_NEW: Final = 4
RESTART: Final = "restarted over a disk tier"


def _reference(
    bench: Bench, rig: Rig, runs: Sequence[Run], dtype: str | None = None
) -> Mapping[str, NDArray[Any]]:
    """What the unmodified model computes and keeps, fed the same streams in the same steps."""
    arguments = {
        "folder": str(bench.checkpoint),
        "dtype": dtype or rig.dtype,
        "device": bench.job["device"],
        "splits": [run.split for run in runs],
    }
    arrays = {f"tokens_{number}": run.stream for number, run in enumerate(runs)}
    answer = bench.reference.call("reference.run", arguments, arrays, timeout_s=TIMEOUT_S)
    return answer.arrays


# Gate a


def _original(bench: Bench, case: str) -> str:
    """KVC-PREFIX-01."""
    dtype, page, kind = parts_of(case)
    chunk = page // 2 + 1 if page > 2 else 5  # noqa: PLR2004 - never a divisor or multiple of a page
    plan = _alone(page) if kind == "alone" else [_together(page)]
    jobs = [job for group in plan for job in group]
    pages = 2 + sum(job.pages(page) for job in jobs)
    pages = max(pages, 2 + max([0, *_around_windows(bench.small)]) + ALONE_NEW)
    settings = {"max_batch_tokens": 2 * chunk + 3, "max_chunk_tokens": chunk, "max_requests": 5}
    with engine_rig(bench, f"original {case}", dtype, page, pages=pages, **settings) as rig:
        _must_be_exact(rig.model)
        if kind == "alone":
            plan += [[Job(length, ALONE_NEW, seed=50)] for length in _around_windows(rig.model)]
        plan = [group for group in plan if group[0].tokens != LONG_TOKENS or rig.takes(LONG_TOKENS)]
        if kind == "mixed" and rig.max_requests == 1:
            raise NotApplicable("the executor takes one request a step")
        found = [rig.run(group, poison=NAN) for group in plan]
        if kind == "mixed" and not any(_is_mixed(batch) for batch in found[0].batches):
            raise Failed("no step mixed prefill chunks with decodes", fault="suite")
        hint = ""
        if bench.kept.get(f"right alone {page}"):
            hint = "\nalone, requests are right (case alone): look at how a step's requests are told apart"
        runs = [run for group in found for run in group.runs]
        if kind == "alone":  # whoever is right over NaN alone is found out
            again = rig.run(plan[0], poison=0).runs
            runs += [replace(run, label=f"{run.label}, over memory of zeros") for run in again]
        answer = _reference(bench, rig, runs)
        expected = [answer[f"logits_{number}"] for number in range(len(runs))]
        reaches = {group.reach.tokens for group in rig.model.groups if not isinstance(group.reach, Full)}
        for judge in (lambda run, logits: wrong_logits(run, logits, page, reaches), wrong_tokens):
            _raise_worst(rig, [judge(run, logits) for run, logits in zip(runs, expected, strict=True)], hint)
        states = _original_states(bench, rig, runs, answer)
    bench.kept[f"right alone {page}"] = kind == "alone"
    worst = max(
        float(differences(run.logits, logits).max()) for run, logits in zip(runs, expected, strict=True)
    )
    margin = min(
        float(margins(logits[run.sampled_at]).min()) for run, logits in zip(runs, expected, strict=True)
    )
    rows = sum(len(run.positions) for run in runs)
    return f"largest difference {worst:.2g} at {rows} positions; smallest top-1 margin {margin:.2g}{states}"


def _original_states(bench: Bench, rig: Rig, runs: Sequence[Run], arrays: Mapping[str, NDArray[Any]]) -> str:
    """States against those of the unmodified model's own cache, where a map says which field is what."""
    if not any(run.states for run in runs):
        return ""
    told = bench.small_plugin.call("engine.layer_map", timeout_s=TIMEOUT_S).body["states"]
    kept = [Kept.of(rig.model, item) for item in told]
    found = [unlike_original(run, number, kept, arrays) for number, run in enumerate(runs)]
    _raise_worst(rig, [wrong for wrong, _ in found])
    steps, worst = sum(len(run.states) for run in runs), max(largest for _, largest in found)
    return f"; states of {len(kept)} layers differ by {worst:.2g} after {steps} steps" if kept else ""


def _alone(page: int) -> list[list[Job]]:
    """Prompts that end before, at and after a page's end, one of several pages, a long one; in turn."""
    lengths = dict.fromkeys([max(1, page - 1), page, page + 1, 3 * page + 5, LONG_TOKENS - ALONE_NEW])
    return [[Job(length, ALONE_NEW, seed=number)] for number, length in enumerate(lengths)]


def _around_windows(model: KvModel) -> list[int]:
    """Prompts after which decodes pass the moment when a page has left a window, or a chunk has ended."""
    sizes = [
        group.reach.tokens + (model.page_tokens if isinstance(group.reach, Window) else 0)
        for group in model.groups
        if not isinstance(group.reach, Full)
    ]
    return sorted({max(1, size - ALONE_NEW + 1) for size in sizes if size <= LONG_TOKENS})


def _together(page: int) -> list[Job]:
    """Requests that come while others decode."""
    return [
        Job(max(1, page - 1), 6, 0, 11),
        Job(2 * page + 3, 4, 0, 12),
        Job(page, 6, 1, 13),
        Job(page + 1, 5, 2, 14),
        Job(5, 4, 3, 15),
    ]


def _is_mixed(batch: Batch) -> bool:
    return min(batch.sizes) == 1 and max(batch.sizes) > 1


def _must_be_exact(model: KvModel) -> None:
    """Gate a needs state that is kept as it is computed."""
    narrow = sorted(
        {item.dtype for arena in model.arenas for item in arena.fields if DTYPE_BITS[item.dtype] < 32}  # noqa: PLR2004
    )
    if narrow:
        raise CouldNotRun(
            f"needs float32 state: asked for kv_dtype float32, the plugin declares {', '.join(narrow)}"
        )


def _raise_worst(rig: Rig, faults: Sequence[str | None], hint: str = "") -> None:
    said = [fault for fault in faults if fault is not None]
    if said:
        more = f"\n{len(said) - 1} more of {len(faults)} requests are wrong" if len(said) > 1 else ""
        rig.fail(said[0] + more + hint)


# Gate b


def _device_hit(bench: Bench, case: str) -> str:
    """KVC-PREFIX-02."""
    dtype, page, _ = parts_of(case)
    unit = _unit(bench, page)
    jobs = _reused(unit)
    pages = 2 + 2 * sum(job.pages(page) for job in jobs)
    with engine_rig(
        bench, f"hit {case}", dtype, page, pages=pages, prefix_cache=True, **_aligned(unit)
    ) as rig:
        jobs = _fitting(rig, unit, jobs)
        cold, warm = _cold(rig, jobs), _warm(rig, jobs)
        alone = [rig.run([job], poison=None) for job in _alone_twice(unit)]
        pairs = [*zip(cold.runs, warm.runs, strict=True), (alone[0].runs[0], alone[1].runs[0])]
        figures = _equal(rig, unit, pairs, DEVICE, cold, warm)
        bench.kept[f"right after a device hit {dtype} {page}"] = True
        return figures


def _restored(bench: Bench, case: str) -> str:
    """KVC-OFFLOAD-02."""
    dtype, page, kind = parts_of(case)
    rules = Beside.of(with_page_tokens(bench.small, page, bench.small.key_tokens))
    unit = rules.granule_tokens
    hits = -(-HIT_PAGES * unit // rules.stored_tokens) * rules.stored_tokens // unit  # whole records
    jobs = _reused(unit, hits)
    pages = 2 + sum(job.pages(page) for job in jobs)
    settings: dict[str, Any] = {"pages": pages, "prefix_cache": True, **_aligned(unit)}
    restart = kind == RESTART
    settings |= {"disk": str(bench.folder / case)} if restart else {"tier_bytes": TIER_BYTES}
    with ExitStack() as end:
        rig = end.enter_context(engine_rig(bench, f"restored {case}", dtype, page, **settings))
        jobs = _fitting(rig, unit, jobs)
        cold = _cold(rig, jobs)
        rig.flush()
        rig.drop()
        if restart:
            end.close()
            rig = end.enter_context(engine_rig(bench, f"restarted {case}", dtype, page, **settings))
        warm = _warm(rig, jobs, poison=NAN)
        pairs = list(zip(cold.runs, warm.runs, strict=True))
        hint = ""
        if bench.kept.get(f"right after a device hit {dtype} {page}"):
            hint = "\na hit on pages that stayed on the device is right: what was lost lies beside the arenas"
        return _equal(rig, unit, pairs, "disk" if restart else "dram", cold, warm, hint, hits=hits)


def _unit(bench: Bench, page: int) -> int:
    """Tokens of the steps in which hits grow: a page, or what every group can be cut at."""
    return Beside.of(with_page_tokens(bench.small, page, bench.small.key_tokens)).granule_tokens


def _aligned(unit: int) -> dict[str, int]:
    """Steps end where hits may end."""
    return {"max_chunk_tokens": unit, "max_batch_tokens": 3 * unit + 4}


def _reused(unit: int, hits: int = HIT_PAGES) -> list[Job]:
    """Two that will hit so many units, and a short one, which comes when the others have run theirs."""
    rest = min(unit, 5)
    return [
        Job(hits * unit + rest, 4, 0, 21),
        Job(hits * unit + max(1, rest - 2), 4, 0, 22),
        Job(max(1, unit - 3), 4, hits, 23),
    ]


def _alone_twice(unit: int) -> list[Job]:
    return [Job(HIT_PAGES * unit + min(unit, 4), 4, 0, 24)] * 2


def _fitting(rig: Rig, unit: int, jobs: list[Job]) -> list[Job]:
    """As many of the jobs as one step takes: cold and warm runs are to be batched alike."""
    count = min(rig.max_requests, rig.max_batch_tokens // unit)
    if count < 1:
        raise CouldNotRun(f"needs steps of {unit} tokens; the executor takes {rig.max_batch_tokens}")
    return jobs[:count]


def _cold(rig: Rig, jobs: Sequence[Job]) -> Batches:
    found = rig.run(jobs, poison=NAN)
    for run in found.runs:
        _runtime(wrong_hit(run, "", 0) if run.hit_tokens else None)
    return found


def _warm(rig: Rig, jobs: Sequence[Job], poison: int | None = None) -> Batches:
    return rig.run([Job(job.prompt_tokens, job.new_tokens, 0, job.seed) for job in jobs], poison=poison)


def _equal(
    rig: Rig,
    unit: int,
    pairs: Sequence[tuple[Run, Run]],
    source: str,
    cold: Batches,
    warm: Batches,
    hint: str = "",
    *,
    hits: int = HIT_PAGES,
) -> str:
    """Judge pairs of a cold and a warm run whose steps were composed alike."""
    for before, after in pairs:
        hit = hits * unit if len(before.prompt) > unit else 0
        _runtime(wrong_hit(after, source, hit) if hit else None)
    if [_shape(batch) for batch in cold.batches[hits:]] != [_shape(batch) for batch in warm.batches]:
        raise Failed("the cold and the warm run were not batched alike", fault="suite")
    _raise_worst(rig, [wrong_bits(after, before, rig.model.page_tokens) for before, after in pairs], hint)
    _raise_worst(rig, [wrong_states(after, before, rig.model) for before, after in pairs], hint)
    rows = sum(len(after.positions) for _, after in pairs)
    reused = sum(after.hit_tokens for _, after in pairs)
    states = sum(len(after.states) for _, after in pairs)
    more = f", and the states of {states} steps" if states else ""
    return f"{rows} positions equal bit for bit after {reused} tokens from {source}{more}"


def _shape(batch: Batch) -> tuple[list[int], list[int]]:
    return list(batch.sizes), list(batch.context)


def _runtime(fault: str | None) -> None:
    if fault is not None:
        raise Failed(fault, fault="runtime")


# Gate c


def _bounds(bench: Bench, case: str) -> str:
    """KVC-PREFIX-03."""
    dtype, page, kind = parts_of(case)
    chunk = page // 2 + 1 if page > 2 else 5  # noqa: PLR2004 - another split than by pages
    unit = page if kind == "original" else _unit(bench, page)
    job = Job(6 * unit + 5, 1, seed=31)
    pages = 2 + 2 * job.pages(page)
    cut = {"pages": pages, "max_batch_tokens": unit + chunk}
    with engine_rig(bench, f"bounds {case}", dtype, page, max_chunk_tokens=chunk, **cut) as rig:
        cold = rig.run([job], poison=NAN).runs[0]
        bits = _narrowest(rig.model)
        if kind == "original":
            expected, other = _reference(bench, rig, [cold])["logits_0"], "the unmodified model"
            beyond = beyond_bounds(cold, expected, page, other, bits)
            if beyond is None and bits >= COMPUTED_BITS:
                exact = _reference(bench, rig, [cold], "float32")["logits_0"]
                beyond = less_exact(cold, expected, exact, rig.dtype)
            _raise_worst(rig, [beyond])
            return str(Distance.of(cold.logits, expected))
    with engine_rig(
        bench, f"bounds {case}", dtype, page, max_chunk_tokens=unit, prefix_cache=True, **cut
    ) as rig:
        rig.run([Job(2 * unit, 1, seed=31)], poison=NAN)  # two full pages, even where one holds one token
        warm = rig.run([job]).runs[0]
        _runtime(wrong_hit(warm, DEVICE, 2 * unit))
        expected = cold.logits[warm.hit_tokens :]
        other = f"a cold run in chunks of {chunk} instead of {unit} tokens"
        beyond = beyond_bounds(warm, expected, page, other, bits)
        if beyond is not None:
            _refuse_restless(bench, rig, cold, warm)
        _raise_worst(rig, [beyond])
        return str(Distance.of(warm.logits, expected))


def _refuse_restless(bench: Bench, rig: Rig, cold: Run, warm: Run) -> None:
    """Judge no split where the unmodified model moves as far by itself: where rounding picks experts or rows.

    Raises:
        NotApplicable: it does.
    """
    hit = warm.hit_tokens
    again = replace(warm, split=(*[hit // 2] * 2, *warm.split), hit_tokens=0)
    answer = _reference(bench, rig, [cold, again])
    alone = replace(warm, logits=answer["logits_1"][hit:])
    expected = answer["logits_0"][hit:]
    if beyond_bounds(alone, expected, rig.model.page_tokens, "itself") is not None:
        moved = Distance.of(alone.logits, expected)
        raise NotApplicable(f"between these splits the unmodified model itself moves as far: {moved}")


# Cases


def page_cases(*kinds: str, dtypes: tuple[str, ...]) -> Callable[[Bench], tuple[str, ...]]:
    """Cases at every page size that is served; `OWN` only where the cache is narrower than what computes."""

    def cases(bench: Bench) -> tuple[str, ...]:
        try:
            sizes, narrow = _page_sizes(bench.small), _narrowest(bench.small) < COMPUTED_BITS
        except (Failed, ProbeFailed, ChildDied):
            sizes, narrow = (0,), False  # the run says why
        served = [dtype for dtype in dtypes if narrow or dtype != OWN]
        tails = [f", {kind}" for kind in kinds] or [""]
        return tuple(f"{dtype}, page {size}{tail}" for size in sizes for dtype in served for tail in tails)

    return cases


def _narrowest(model: KvModel) -> int:
    """Bits of the narrowest element of the cache."""
    return min(DTYPE_BITS[item.dtype] for arena in model.arenas for item in arena.fields)


def _page_sizes(model: KvModel) -> tuple[int, ...]:
    """The sizes that are allowed, or the declared one; of many the least, the greatest and the declared.

    Where records have a size of their own, those that fit into it.
    """
    sizes = sorted({*model.page_tokens_allowed, model.page_tokens})
    if model.key_tokens is not None:
        sizes = [size for size in sizes if model.key_tokens % size == 0]
    if len(sizes) > MANY_SIZES:
        sizes = sorted({sizes[0], model.page_tokens, sizes[-1]})
    return tuple(sizes)


def parts_of(case: str) -> tuple[str, int, str]:
    """Precision, page size and kind of a case."""
    dtype, page, *kind = (part.strip() for part in case.split(","))
    return dtype, int(page.split()[1]), kind[0] if kind else ""


def _check(clause: str, run: Callable[[Bench, str], str], *kinds: str, dtypes: tuple[str, ...]) -> Check:
    def judged(bench: Bench, case: str) -> str:
        _ = bench.small
        return run(bench, case)

    return Check(clause, judged, page_cases(*kinds, dtypes=dtypes))


CHECKS: Final[tuple[Check, ...]] = (
    Check("KVC-PREFIX-01", judged_map, lambda _: (THE_MAP,)),
    _check("KVC-PREFIX-01", _original, "alone", "mixed", dtypes=("fp32",)),
    _check("KVC-PREFIX-02", _device_hit, dtypes=("fp32", "bf16", OWN)),
    _check("KVC-PREFIX-03", _bounds, "original", "other split", dtypes=("bf16", OWN)),
    _check("KVC-OFFLOAD-02", _restored, "dram", RESTART, dtypes=("fp32", "bf16", OWN)),
)

"""The golden checks over an engine of a few lines: right ones pass, and each way to be wrong is told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest

from kvc_conformance.bench import CouldNotRun, Failed, NotApplicable
from kvc_conformance.checks import golden
from kvc_conformance.checks.golden import CHECKS, page_cases
from kvc_conformance.driver import ChildDied
from kvc_conformance.engine_rig import DTYPES, Batches, Job
from kvc_conformance.footprint import Batch
from kvc_conformance.golden import Logits, Run
from kvcontract import Arena, Field, Group, KvModel, WeightIdentity, Window

PAGE, VOCAB, CONTEXT = 4, 24, 2000
THE_MAP, ORIGINAL, DEVICE_HIT, BOUNDS, RESTORED = CHECKS


def model_of(dtype: str = "float32", **more: Any) -> KvModel:
    """One layer."""
    fields = (Field(name="k", dtype=dtype, axes={"dim": 2}),)
    given = {
        "contract": 1,
        "name": "toy",
        "weights": WeightIdentity(kind="unresolved"),
        "numerics": "test",
        "page_tokens": PAGE,
        "groups": (Group(name="kv"),),
        "arenas": (Arena.planes(name="a", group="kv", layer=0, fields=fields),),
    }
    return KvModel(**{**given, **more})


def computed(stream: Sequence[int]) -> Logits:
    """What the model says after each token; the best leads clearly."""
    rows = np.random.default_rng(5).normal(size=(VOCAB, VOCAB)).astype(np.float32)
    found = rows[np.asarray(stream)]
    best = (np.asarray(stream) * 7 + np.arange(len(stream))) % VOCAB
    found[np.arange(len(stream)), best] += 6
    return found


class Fleet:
    """Engines that share a disk, and what may be wrong with them."""

    def __init__(self) -> None:
        self.kept: set[tuple[int, ...]] = set()
        self.dtype = "float32"
        self.max_requests = 5
        self.context = CONTEXT
        self.after_hits = self.always = self.original = self.in_float32 = 0.0
        self.hits = True
        self.one_by_one = False
        self.source = "device"
        self.settings: list[dict[str, Any]] = []
        self.poisons: list[int | None] = []
        self.ran: list[list[Job]] = []
        self.asked: list[dict[str, Any]] = []

    @contextmanager
    def engine_rig(self, bench: Any, key: str, dtype: str, page: int, **settings: Any) -> Iterator[Engine]:
        """As the suite's."""
        assert key.endswith(f"{dtype}, page {page}") or f"{dtype}, page {page}, " in key
        self.settings.append(settings)
        model = bench.small.model_copy(update={"page_tokens": page})
        fields = (Field(name="k", dtype=self.dtype, axes={"dim": 2}),)
        arenas = tuple(arena.model_copy(update={"fields": fields}) for arena in model.arenas)
        yield Engine(self, model.model_copy(update={"arenas": arenas}), DTYPES[dtype], settings)
        if "disk" in settings:
            self.source = "disk"

    def call(self, probe: str, arguments: dict[str, Any], arrays: dict[str, Any], **_: Any) -> Any:
        """The unmodified model, whose logits move by `original` where it is run in other steps."""
        assert probe == "reference.run"
        self.asked.append(arguments)
        off = self.in_float32 if arguments["dtype"] == "float32" else 0.0
        found = {}
        for number, split in enumerate(arguments["splits"]):
            logits = computed(arrays[f"tokens_{number}"])
            logits[:, 0] += off + self.original * number
            assert sum(split) == len(logits)
            found[f"logits_{number}"] = logits
        return SimpleNamespace(arrays=found)


class Engine:
    """Steps of as many tokens as fit, first come, first served."""

    def __init__(self, fleet: Fleet, model: KvModel, dtype: str, settings: dict[str, Any]) -> None:
        self.fleet, self.model, self.dtype, self.settings = fleet, model, dtype, settings
        self.max_requests, self.max_batch_tokens = fleet.max_requests, settings["max_batch_tokens"]
        self.kept = fleet.kept if "disk" in settings else set[tuple[int, ...]]()

    def takes(self, tokens: int) -> bool:
        """Whether the context is long enough."""
        return tokens <= self.fleet.context

    def flush(self) -> None:
        """All has landed."""

    def drop(self) -> None:
        """What is left lies in a tier."""
        self.fleet.source = "dram"

    def fail(self, saw: str) -> NoReturn:
        """With a line."""
        raise Failed(saw, where="plugin.py:1")

    def run(self, jobs: Sequence[Job], *, poison: int | None = None) -> Batches:
        """To the end."""
        fleet = self.fleet
        fleet.poisons.append(poison)
        fleet.ran.append(list(jobs))
        runs = [self._run(number, job) for number, job in enumerate(jobs)]
        at, ends = [run.hit_tokens for run in runs], [len(run.stream) for run in runs]
        splits: list[list[int]] = [[] for _ in runs]
        batches: list[Batch] = []
        for step in range(1000):
            room, sizes, context = self.max_batch_tokens, [], []
            for number, (job, run) in enumerate(zip(jobs, runs, strict=True)):
                left = len(run.prompt) - at[number] if at[number] < len(run.prompt) else 1
                size = min(left, room, self.settings["max_chunk_tokens"])
                if step < job.after or at[number] == ends[number] or not size:
                    continue
                if fleet.one_by_one and sizes:
                    continue
                sizes, context = [*sizes, size], [*context, at[number]]
                splits[number].append(size)
                at[number], room = at[number] + size, room - size
            if not sizes and at == ends:
                break
            batches.append(Batch(sizes, context, {}))
        runs = [replace(run, split=tuple(split)) for run, split in zip(runs, splits, strict=True)]
        return Batches(runs, batches, [])

    def _run(self, number: int, job: Job) -> Run:
        fleet, prompt = self.fleet, np.random.default_rng(job.seed).integers(0, VOCAB, job.prompt_tokens)
        stream, tokens = prompt.tolist(), []
        for _ in range(job.new_tokens):
            tokens.append(int(computed(stream)[-1].argmax()))
            stream.append(tokens[-1])
        stream = stream[:-1]
        cached = self.settings.get("prefix_cache", False) and fleet.hits
        unit = self.model.page_tokens
        ends = range((len(prompt) - 1) // unit * unit, 0, -unit) if cached else ()
        hit = next((end for end in ends if tuple(stream[:end]) in self.kept), 0)
        self.kept |= {tuple(stream[:end]) for end in range(unit, len(stream) + 1, unit)}
        logits = computed(stream)[hit:]
        logits[:, 0] += fleet.always + (fleet.after_hits if hit else 0)
        sources = {fleet.source: hit} if hit else {}
        return Run(
            f"request {number}",
            prompt,
            tuple(tokens),
            logits,
            np.arange(hit, len(stream)),
            (),
            hit,
            sources,
        )


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """Nothing is wrong yet."""
    made = Fleet()
    monkeypatch.setattr(golden, "engine_rig", made.engine_rig)
    return made


def bench_of(fleet: Fleet, model: KvModel | None = None) -> Any:
    """A bench with no processes."""
    return SimpleNamespace(
        small=model or model_of(),
        checkpoint=Path("weights"),
        folder=Path("folder"),
        job={"device": "cpu"},
        kept={},
        reference=fleet,
    )


def test_prefix_01_a_right_engine_is_exact_over_every_kind_of_prompt(fleet: Fleet) -> None:
    """Around a page's end, over several, beyond windows; then several requests, some of which decode."""
    bench = bench_of(fleet)
    said = ORIGINAL.run(bench, "fp32, page 4, alone")
    assert str(said).startswith("largest difference 0 at 345 positions; smallest top-1 margin ")
    assert [[job.prompt_tokens for job in jobs] for jobs in fleet.ran] == [[3], [4], [5], [17], [301]]
    assert bench.kept == {"right alone 4": True}
    assert str(ORIGINAL.run(bench, "fp32, page 4, mixed")).startswith("largest difference 0 at 48 positions")
    assert bench.kept == {"right alone 4": False}
    assert set(fleet.poisons) == {0xFF}
    steps = {"max_batch_tokens": 9, "max_chunk_tokens": 3, "max_requests": 5}
    assert fleet.settings == [{"pages": 92, **steps}, {"pages": 18, **steps}]
    assert fleet.asked[0]["dtype"] == "float32"
    assert fleet.asked[0]["device"] == "cpu"
    assert fleet.asked[0]["folder"] == "weights"


def test_prefix_01_windows_and_short_contexts_change_what_is_tried(fleet: Fleet) -> None:
    """Decodes pass the moment when a page has left a window; what is longer than the context is left out."""
    groups = (Group(name="kv"), Group(name="win", reach=Window(tokens=9)))
    near = Arena.planes(
        name="b", group="win", layer=1, fields=(Field(name="k", dtype="float32", axes={"dim": 2}),)
    )
    fleet.context = 100
    ORIGINAL.run(
        bench_of(fleet, model_of(groups=groups, arenas=(*model_of().arenas, near))), "fp32, page 4, alone"
    )
    assert [[job.prompt_tokens for job in jobs] for jobs in fleet.ran] == [[3], [4], [5], [17], [10]]


def test_prefix_01_what_is_wrong_is_told_with_the_line(fleet: Fleet) -> None:
    """Of several requests the first, and how many more; and whether they are right alone."""
    fleet.always = 1e-3
    bench = bench_of(fleet)
    with pytest.raises(Failed, match="logits differ from the unmodified") as failed:
        ORIGINAL.run(bench, "fp32, page 4, alone")
    assert failed.value.evidence.where == "plugin.py:1"
    assert "4 more of 5 requests are wrong" in failed.value.evidence.saw
    assert "alone, requests are right" not in failed.value.evidence.saw
    assert not bench.kept
    bench.kept["right alone 4"] = True
    with pytest.raises(Failed, match="alone, requests are right"):
        ORIGINAL.run(bench, "fp32, page 4, mixed")


def test_prefix_01_what_cannot_be_judged_says_why(fleet: Fleet) -> None:
    """State of fewer bits, executors of one request a step, and steps that never mixed."""
    fleet.one_by_one = True
    with pytest.raises(Failed, match="no step mixed") as failed:
        ORIGINAL.run(bench_of(fleet), "fp32, page 4, mixed")
    assert failed.value.evidence.fault == "suite"
    fleet.max_requests = 1
    with pytest.raises(NotApplicable, match="one request a step"):
        ORIGINAL.run(bench_of(fleet), "fp32, page 4, mixed")
    ORIGINAL.run(bench_of(fleet), "fp32, page 4, alone")
    fleet.dtype = "bfloat16"
    with pytest.raises(CouldNotRun, match=r"needs float32 state.* declares bfloat16"):
        ORIGINAL.run(bench_of(fleet), "fp32, page 4, alone")


def test_prefix_02_a_right_hit_on_the_device_is_equal(fleet: Fleet) -> None:
    """Three pages of two requests and of one alone; a short request hits nothing."""
    bench = bench_of(fleet)
    said = DEVICE_HIT.run(bench, "fp32, page 4")
    assert said == "23 positions equal bit for bit after 36 tokens from device"
    assert bench.kept == {"right after a device hit fp32 4": True}
    assert fleet.settings == [
        {"pages": 26, "prefix_cache": True, "max_chunk_tokens": 4, "max_batch_tokens": 16}
    ]
    assert fleet.poisons == [0xFF, None, None, None]


def test_prefix_02_a_hit_that_is_wrong_or_none_is_told(fleet: Fleet) -> None:
    """One bit of logits is the plugin's, a hit too short the runtime's."""
    fleet.after_hits = 1e-3
    bench = bench_of(fleet)
    with pytest.raises(Failed, match="2 more of 4 requests are wrong") as failed:
        DEVICE_HIT.run(bench, "fp32, page 4")
    assert (failed.value.evidence.where, failed.value.evidence.fault) == ("plugin.py:1", None)
    assert not bench.kept
    fleet.hits = False
    with pytest.raises(Failed, match="hit 0 tokens") as failed:
        DEVICE_HIT.run(bench_of(fleet), "fp32, page 4")
    assert failed.value.evidence.fault == "runtime"


def test_offload_02_a_cold_run_that_hits_is_told(fleet: Fleet) -> None:
    """What nobody has run before cannot be there."""
    bench = bench_of(fleet)
    RESTORED.run(bench, "bf16, page 4, restarted over a disk tier")
    with pytest.raises(Failed, match="expected 0") as failed:
        RESTORED.run(bench, "bf16, page 4, restarted over a disk tier")
    assert failed.value.evidence.fault == "runtime"


def test_prefix_02_runs_that_were_batched_otherwise_are_not_compared(fleet: Fleet) -> None:
    """The suite's own fault, not the plugin's."""
    fleet.one_by_one = True
    with pytest.raises(Failed, match="not batched alike") as failed:
        DEVICE_HIT.run(bench_of(fleet), "fp32, page 4")
    assert failed.value.evidence.fault == "suite"


@pytest.mark.parametrize(
    ("case", "source"),
    [("bf16, page 4, dram", "dram"), ("bf16, page 4, restarted over a disk tier", "disk")],
)
def test_offload_02_a_restore_is_compared_like_a_hit(fleet: Fleet, case: str, source: str) -> None:
    """From either tier; a plugin that is right without one gets a hint."""
    bench = bench_of(fleet)
    assert RESTORED.run(bench, case) == f"16 positions equal bit for bit after 24 tokens from {source}"
    assert fleet.poisons == [0xFF, 0xFF]
    tiers = {"disk": f"folder/{case}"} if source == "disk" else {"tier_bytes": 1 << 30}
    assert all(settings.items() >= tiers.items() for settings in fleet.settings)
    assert [settings["pages"] for settings in fleet.settings] == [14] * len(fleet.settings)
    fleet.kept.clear()
    fleet.after_hits = 1.0
    with pytest.raises(Failed, match="first different: position 12") as failed:
        RESTORED.run(bench, case)
    assert "what was lost" not in failed.value.evidence.saw
    bench.kept["right after a device hit bf16 4"] = True
    fleet.kept.clear()
    with pytest.raises(Failed, match="what was lost lies beside the arenas"):
        RESTORED.run(bench, case)


def test_offload_02_hits_end_where_records_do(fleet: Fleet) -> None:
    """Records of two pages: a restore is of whole ones."""
    said = RESTORED.run(bench_of(fleet, model_of(key_tokens=2 * PAGE)), "bf16, page 4, dram")
    assert said == "16 positions equal bit for bit after 32 tokens from dram"


def test_an_executor_of_small_steps_takes_fewer_requests(fleet: Fleet) -> None:
    """As many as one step takes; if not even one, that is said."""
    fleet.max_requests = 1
    assert RESTORED.run(bench_of(fleet), "bf16, page 4, dram") == (
        "7 positions equal bit for bit after 12 tokens from dram"
    )
    assert [len(jobs) for jobs in fleet.ran] == [1, 1]
    fleet.max_requests = 0
    with pytest.raises(CouldNotRun, match="needs steps of 4 tokens"):
        RESTORED.run(bench_of(fleet), "bf16, page 4, dram")


def test_prefix_03_within_bounds_of_the_original_and_of_itself(fleet: Fleet) -> None:
    """Distances are told; a plugin that keeps less than it computes is not measured in float32."""
    for kind in ("original", "other split"):
        assert "regret 0.000" in str(BOUNDS.run(bench_of(fleet), f"bf16, page 4, {kind}"))
    assert [asked["dtype"] for asked in fleet.asked] == ["bfloat16", "float32"]
    plain = {"pages": 18, "max_batch_tokens": 7, "max_chunk_tokens": 3}
    assert fleet.settings == [plain, plain, {**plain, "max_chunk_tokens": 4, "prefix_cache": True}]
    assert fleet.poisons == [0xFF, 0xFF, 0xFF, None]
    fleet.dtype = "float8_e4m3fn"
    BOUNDS.run(bench_of(fleet), "bf16, page 4, original")
    assert [asked["dtype"] for asked in fleet.asked] == ["bfloat16", "float32", "bfloat16"]


def test_prefix_03_beyond_bounds_of_the_original(fleet: Fleet) -> None:
    """Far from it, or farther from float32 than it is by itself."""
    fleet.always = 3.0
    with pytest.raises(Failed, match="the unmodified model") as failed:
        BOUNDS.run(bench_of(fleet), "bf16, page 4, original")
    assert failed.value.evidence.where == "plugin.py:1"
    fleet.always, fleet.in_float32 = 0.05, -0.01
    with pytest.raises(Failed, match="narrower than bfloat16"):
        BOUNDS.run(bench_of(fleet), "bf16, page 4, original")


def test_prefix_03_a_split_that_moves_the_original_as_far_is_not_judged(fleet: Fleet) -> None:
    """Where the unmodified model stays where it is, the plugin is wrong; else nobody can tell."""
    fleet.after_hits = 3.0
    with pytest.raises(Failed, match="a cold run in chunks of 3 instead of 4 tokens") as failed:
        BOUNDS.run(bench_of(fleet), "bf16, page 4, other split")
    assert failed.value.evidence.where == "plugin.py:1"
    (asked,) = fleet.asked
    assert asked["splits"] == [(3,) * 9 + (2,), (4, 4, 4, 4, 4, 4, 4, 1)]
    assert asked["dtype"] == "bfloat16"
    fleet.original = 3.0
    with pytest.raises(NotApplicable, match="the unmodified model itself moves as far"):
        BOUNDS.run(bench_of(fleet), "bf16, page 4, other split")
    fleet.hits = False
    with pytest.raises(Failed, match="hit 0 tokens") as failed:
        BOUNDS.run(bench_of(fleet), "bf16, page 4, other split")
    assert failed.value.evidence.fault == "runtime"


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        (model_of(), (4,)),
        (model_of(page_tokens=8, page_tokens_allowed=(2, 32)), (2, 8, 32)),
        (model_of(page_tokens=8, page_tokens_allowed=(2, 4, 16, 32)), (2, 8, 32)),
        (model_of(page_tokens=8, page_tokens_allowed=(2, 3, 16, 32), key_tokens=16), (2, 8, 16)),
    ],
)
def test_page_sizes_are_those_that_are_served(fleet: Fleet, model: KvModel, sizes: tuple[int, ...]) -> None:
    """All; of many the least, the greatest and the declared; those that fit into records."""
    cases = page_cases("a", "b", dtypes=("fp32", "as declared"))(bench_of(fleet, model))
    assert cases == tuple(f"fp32, page {size}, {kind}" for size in sizes for kind in "ab")


def test_a_narrow_cache_is_run_as_declared_too(fleet: Fleet) -> None:
    """And where nothing is declared, a case remains that says why."""
    cases = page_cases(dtypes=("fp32", "as declared"))
    assert cases(bench_of(fleet, model_of("float8_e4m3fn"))) == ("fp32, page 4", "as declared, page 4")

    class Broken:
        @property
        def small(self) -> KvModel:
            raise ChildDied("gone")

    broken: Any = Broken()
    assert cases(broken) == ("fp32, page 0",)


def test_prefix_01_a_map_is_held_against_the_declaration(fleet: Fleet) -> None:
    """A right one is told; a wrong one with the author's line; who brings an executor has none."""
    bench = bench_of(fleet)
    said: dict[str, Any] = {"model": model_of().canonical_json(), "where": "plugin.py:9"}

    def call(probe: str, **_: Any) -> Any:
        assert probe == "engine.layer_map"
        return SimpleNamespace(body=said)

    bench.small_plugin = SimpleNamespace(call=call)
    said["layers"] = [[0, "a", "k"]]
    assert THE_MAP.run(bench, "the map") == "1 layers, each in arenas of its own"
    said["layers"] = [[1, "a", "k"]]
    with pytest.raises(Failed, match="layer 1 of the model writes into arena a") as failed:
        THE_MAP.run(bench, "the map")
    assert (failed.value.evidence.where, failed.value.evidence.fault) == ("plugin.py:9", "plugin")
    said["layers"] = None
    with pytest.raises(NotApplicable, match="its own executor"):
        THE_MAP.run(bench, "the map")


def test_pages_of_one_token_are_cut_by_themselves(fleet: Fleet) -> None:
    """Chunks are neither divisors nor multiples of a page."""
    for page, chunk in ((1, 5), (2, 5), (3, 2)):
        fleet.settings.clear()
        bench = bench_of(fleet, model_of(page_tokens=page))
        ORIGINAL.run(bench, f"fp32, page {page}, alone")
        BOUNDS.run(bench, f"bf16, page {page}, original")
        assert [item["max_chunk_tokens"] for item in fleet.settings] == [chunk, chunk]


def test_prefix_03_a_cache_of_all_bits_is_measured_in_float32(fleet: Fleet) -> None:
    """Sixteen bits are all that models compute in."""
    fleet.dtype = "bfloat16"
    BOUNDS.run(bench_of(fleet), "bf16, page 4, original")
    assert [asked["dtype"] for asked in fleet.asked] == ["bfloat16", "float32"]


def test_every_check_is_planned_for_what_is_declared(fleet: Fleet) -> None:
    """The map and the three gates, at each page size, in each precision; what is narrow as declared too."""
    bench = bench_of(fleet, model_of("float8_e4m3fn"))
    kinds = ["fp32", "bf16", "as declared"]
    assert [(check.clause, check.cases(bench)) for check in CHECKS] == [
        ("KVC-PREFIX-01", ("the map",)),
        ("KVC-PREFIX-01", ("fp32, page 4, alone", "fp32, page 4, mixed")),
        ("KVC-PREFIX-02", tuple(f"{kind}, page 4" for kind in kinds)),
        (
            "KVC-PREFIX-03",
            tuple(f"{kind}, page 4, {how}" for kind in kinds[1:] for how in ("original", "other split")),
        ),
        (
            "KVC-OFFLOAD-02",
            tuple(
                f"{kind}, page 4, {how}" for kind in kinds for how in ("dram", "restarted over a disk tier")
            ),
        ),
    ]


def test_a_single_fault_is_told_in_its_own_words(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is added where one request is wrong."""
    monkeypatch.setattr(golden, "beyond_bounds", lambda *_: "far away")
    with pytest.raises(Failed) as failed:
        BOUNDS.run(bench_of(fleet), "bf16, page 4, original")
    assert failed.value.evidence.saw == "far away"

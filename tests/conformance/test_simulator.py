"""The simulator: finds what is planted, finds nothing else, and plays again what it found."""

from __future__ import annotations

import json
import multiprocessing
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import PLANTS, Plant
from planted_beside import HYBRID, WINDOWED

from kvc_conformance.sim import fleet, trace
from kvc_conformance.sim.fleet import first_found
from kvc_conformance.sim.prompts import SPACE, Prompts
from kvc_conformance.sim.samples import sample, samples
from kvc_conformance.sim.spaces import simulated
from kvc_conformance.sim.trace import Trace, minimal, play, replay, run_seed
from kvcontract import Arena, Field, Group
from kvcontract.cli.main import main
from kvcontract.contract.errors import UsageFault
from kvcontract.contract.model import Window

SEEDS = 2000
"""Within which every planted violation must be found."""

QUIET_SEEDS = 45


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    """Streams of a declaration that is cut over workers."""
    torch.set_num_threads(1)
    return Prompts(simulated(samples()[0]))


@pytest.fixture(scope="module")
def beside() -> dict[str, Prompts]:
    """Streams of declarations that have something beside full pages."""
    torch.set_num_threads(1)
    return {name: Prompts(simulated(sample(name))) for name in ("windowed", "hybrid")}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_violation_is_found_and_plays_again(
    plant: Plant, prompts: Prompts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A2-A17, B4, C1-C12, D2, E7, R2: found within 2,000 seeds; its trace, saved and read, shows the same."""
    _found_and_plays_again(plant, prompts, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("name", "plant"),
    [*(("hybrid", plant) for plant in HYBRID), *(("windowed", plant) for plant in WINDOWED)],
    ids=lambda item: item if isinstance(item, str) else item.__name__,
)
def test_what_is_planted_beside_full_pages_is_found(
    name: str,
    plant: Plant,
    beside: dict[str, Prompts],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A4-A20, B4, C1-C11, E7, F1-F7, R2, R3: the same of windows of pages, and of states and snapshots."""
    _found_and_plays_again(plant, beside[name], tmp_path, monkeypatch)


def _found_and_plays_again(
    plant: Plant, prompts: Prompts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    found = first_found(prompts, range(SEEDS))
    assert found is not None, f"{SEEDS} seeds did not find: {plant.__doc__}"
    assert found.violation is not None
    found.save(tmp_path / "trace.json")
    again = replay(Trace.load(tmp_path / "trace.json")).violation
    assert again is not None
    assert (again.clause, again.text) == found.violation
    monkeypatch.undo()
    assert replay(Trace.load(tmp_path / "trace.json")).violation is None  # mended: the trace is silent


@pytest.mark.parametrize("number", range(len(samples())))
def test_nothing_is_found_where_nothing_is_wrong(number: int) -> None:
    """R1-R8: the first seeds of each sample, in this process."""
    found = first_found(Prompts(simulated(samples()[number])), range(QUIET_SEEDS))
    assert found is None, found and found.violation


def test_a_trace_is_cut_down_to_what_is_needed(prompts: Prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever single action is left out of a minimal trace, the clause holds."""
    next(plant for plant in PLANTS if plant.__name__.startswith("a4"))(monkeypatch)
    found = first_found(prompts, range(SEEDS))
    assert found is not None
    whole = play(prompts, found.setting, found.actions)
    short = minimal(prompts, found.setting, whole)
    assert short.violation is not None
    assert whole.violation is not None
    assert short.violation.clause == whole.violation.clause
    assert len(short.actions) < len(whole.actions) // 2
    for at in range(len(short.actions)):
        rest = play(prompts, found.setting, short.actions[:at] + short.actions[at + 1 :])
        assert rest.violation is None or rest.violation.clause != short.violation.clause


def test_a_seed_is_the_same_every_time(prompts: Prompts) -> None:
    """Design: no hidden clock, thread or order: actions and counts of a seed are repeated."""
    for seed in range(5):
        one, other = run_seed(prompts, seed), run_seed(prompts, seed)
        assert one[0] == other[0]
        assert one[1].actions == other[1].actions
        assert one[1].counts == other[1].counts


def test_several_processes_reach_every_kind(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Every fault, terminal and clause is reached and counted; `--json` says so and nothing else."""
    arguments = ["simulate", "--seeds", "800", "--json", "--out", str(tmp_path / "trace.json")]
    code = main(arguments)
    document = json.loads(capsys.readouterr().out)
    assert (code, document["violation"], document["unreached"]) == (0, None, [])
    assert document["seeds"] == 800
    assert document["median_choices"] >= 100
    for names, kind in (
        (fleet.FAULTS, "faults"),
        (fleet.TERMINALS, "terminals"),
        (fleet.CLAUSES, "clauses"),
        (fleet.SEEN, "seen"),
    ):
        assert set(names) == {name for name, count in document[kind].items() if count}
    assert not (tmp_path / "trace.json").exists()


def test_a_kind_that_is_never_reached_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """A run that is too short to say anything does not look like one that found nothing.

    Of one of the small declarations only that is expected which it can reach.
    """
    assert main(["simulate", "--model", "windowed", "--seeds", "1", "--jobs", "1"]) == 1
    said = capsys.readouterr().out.replace("\n", " ")
    assert "never reached: " in said
    assert "1 seeds in" in said
    for only_of_states in ("F1", "checkpoint ok", "fail copy"):
        assert only_of_states not in said


def test_a_model_is_simulated_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Driven by any declaration: that of an installed plugin."""
    assert main(["simulate", "qwen3", "--seeds", "20", "--json"]) == 1  # too few to reach everything
    document = json.loads(capsys.readouterr().out)
    assert (document["seeds"], document["violation"]) == (20, None)


def test_replay_says_what_it_sees(
    prompts: Prompts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`kvc replay`: 1 while the clause is broken, 0 once it holds."""
    path = tmp_path / "trace.json"
    with monkeypatch.context() as patch:
        next(plant for plant in PLANTS if plant.__name__.startswith("a13"))(patch)
        found = first_found(prompts, range(SEEDS))
        assert found is not None
        found.save(path)
        assert main(["replay", str(path)]) == 1
        assert "break A13" in capsys.readouterr().out
    assert main(["replay", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["violation"], document["recorded"]["clause"]) == (None, "A13")


def _other_schema(document: dict[str, Any]) -> None:
    document["schema"] = "kvc.trace/99"


def _other_action(document: dict[str, Any]) -> None:
    document["actions"] = [{"do": "dance", "node": 0}]


def _no_node(document: dict[str, Any]) -> None:
    del document["actions"][0]["node"]
    document["actions"][1]["do"] = "sleep"


def _huge_world(document: dict[str, Any]) -> None:
    document["setting"] |= {"pages": 10**30, "degrees": [3], "tiers": []}


def _other_model(document: dict[str, Any]) -> None:
    document["model"]["arenas"][0]["group"] = "nobody's"


def _other_checkpoints(document: dict[str, Any]) -> None:
    document["actions"] = [
        {"do": "begin", "node": 0, "id": 0, "new": 1, "checkpoints": {"stops": [-1]}},
        {"do": "step", "node": 0, "id": 0, "size": 1, "revert": False, "checkpoint": 1},
    ]
    document["setting"] |= {"blocks": {"near": 0}, "step_tokens": 0}


def _no_setting(document: dict[str, Any]) -> None:
    del document["setting"]


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (_other_schema, "plays 'kvc.trace/1'"),
        (_other_action, "no such action: dance"),
        (_no_setting, "setting"),
        (_other_checkpoints, r"blocks.near is 0; .*step_tokens is 0.*stops is \[-1\]; .*checkpoint is 1"),
        (_no_node, r"actions\[0\].node is missing; .*actions\[1\].seconds is missing"),
        (_huge_world, r"degrees\[0\] is 3; expected one of 1, 2.*pages is 10000000.*expected a number"),
        (_huge_world, "setting.tiers is"),
        (_other_model, r"model\.arenas\[0\]\.group"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(
    spoil: object, text: str, prompts: Prompts, tmp_path: Path
) -> None:
    """I3: what is wrong with it is said."""
    setting, played = run_seed(prompts, 0, steps=3)
    path = tmp_path / "trace.json"
    trace.of(prompts, 0, setting, played).save(path)
    document = json.loads(path.read_text())
    spoil(document)  # type: ignore[operator]
    path.write_text(json.dumps(document))
    with pytest.raises(UsageFault, match=text):
        Trace.load(path)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["simulate", "--seeds", "0", "--jobs", "0"], "--seeds 0: expected 1 or more; --jobs 0"),
        (["simulate", "--config", "config.json"], "without a model's name"),
        (["simulate", "--model", "hybird"], "--model hybird: expected one of sharded,"),
        (["simulate", "qwen3", "--model", "hybrid"], "--model hybrid and a model's name: give one of them"),
        (["simulate", "--out", "nowhere/trace.json"], "--out nowhere/trace.json: cannot be written"),
        (["replay", "nowhere.json"], "nowhere.json cannot be read"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """I3, I4: exit code 2, and every fault."""
    assert main(arguments) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    "group", [Group(name="kv", kind="static"), Group(name="kv", kind="bounded")], ids=lambda item: item.kind
)
def test_what_cannot_be_simulated_is_said(group: Group) -> None:
    """Groups that are written once, and models without any full pages, are not served by this version."""
    with pytest.raises(UsageFault, match="group\\(s\\) kv cannot be simulated"):
        simulated(samples()[0].model_copy(update={"groups": (group,)}))


def test_reaches_states_and_boundaries_are_cut_to_the_length_of_a_stream() -> None:
    """B14, F1: else nothing would slide out of a window, and no state would be taken at two boundaries."""
    plane = Field(name="x", dtype="float32", axes={"head": 16, "key": 128, "value": 128}, shard_axis="head")
    model = sample("hybrid")
    large = model.model_copy(
        update={
            "groups": (
                Group(name="kv"),
                Group(name="chunk", reach=Window(tokens=4096, sink_tokens=4)),
                Group(name="state", kind="bounded", boundary_tokens=64),
            ),
            "arenas": (
                *model.arenas[:2],
                Arena.planes(name="state.0", group="state", layer=0, fields=(plane,)),
            ),
        }
    )
    small = simulated(large)
    assert small == simulated(small)
    assert small.groups[1].reach == Window(tokens=5, sink_tokens=2)
    assert small.groups[2].boundary_tokens == 4
    assert small.arenas[2].fields[0].axes == {"head": 4, "key": 2, "value": 2}


def test_a_trace_of_another_declarations_spaces_is_refused(beside: dict[str, Prompts]) -> None:
    """I3: blocks of spaces that it has not, or none of those that it has."""
    setting, played = run_seed(beside["hybrid"], 0, steps=3)
    whole = trace.of(beside["hybrid"], 0, setting, played)
    with pytest.raises(UsageFault, match=r"setting\.blocks: sample-hybrid has .*: chunk-6, slots-state"):
        replay(replace(whole, setting=replace(setting, blocks={"chunk-6": 9})))


def test_an_interrupted_simulation_leaves_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C: exit code 130, said in one line, and no process goes on with what it was at."""
    before = set(multiprocessing.active_children())
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 4)  # seconds: far from the end, wherever it is by then
        code = main(["simulate", "--seeds", "1000000", "--steps", "20000", "--jobs", "1", "--json"])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    told = capsys.readouterr()
    assert (code, json.loads(told.out)["exit_code"]) == (130, 130)
    assert told.err == "kvc: interrupted\n"
    assert set(multiprocessing.active_children()) <= before


def test_d2_equal_tokens_of_two_tenants_leave_unequal_rows(prompts: Prompts) -> None:
    """D2: else a hit on another tenant's page would look right to the judge."""
    one, other = (prompts.images.of(0, scope, SPACE, 0, 1) for scope in (0, 1))
    assert (one != other).any(axis=1).all()

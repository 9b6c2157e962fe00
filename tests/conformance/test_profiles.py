"""How long is tried, what is refused by name, and that what is found can be played again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final

import pytest

from kvc_conformance import report as reports
from kvc_conformance.profiles import PROFILES
from kvc_conformance.runner import Request, run
from kvcontract.cli.main import main

SIMULATED: Final = "KVC-OFFLOAD-06"
PLANTED: Final = """
import kvc_qwen3
from kvcontract import hookimpl

KVC_CONTRACT = 1


def plant():
    from kvcontract.store.marks import Marks

    Marks.lost = lambda *_: None


@hookimpl
def kvc_model(ctx):
    if ctx.config is not None:
        plant()
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "planted"})


@hookimpl
def kvc_samples(ctx):
    return kvc_qwen3.kvc_samples(ctx)
"""
"""A sound plugin in whose process the store takes what a tier has lost for stored."""


def test_profiles_differ_in_numbers_alone() -> None:
    """Each tries more than the one before, and only the longest draws its seed."""
    quick, ci, deep = PROFILES["quick"], PROFILES["ci"], PROFILES["deep"]
    for name in ("mixes", "mix_steps", "worlds"):
        assert getattr(quick, name) < getattr(ci, name) <= getattr(deep, name)
    assert [quick.drawn, ci.drawn, deep.drawn] == [False, False, True]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--profile", "night"], "--profile 'night': expected quick, ci, deep"),
        (["--seed", "-1"], "--seed -1: expected 0 or more"),
        (["--alone"], "--alone is for --clause: name one"),
    ],
)
def test_i4_lengths_that_are_none_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """I4: before anything runs."""
    assert main(["conformance", "qwen3", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_profile_and_its_seed_are_shown_and_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    """A drawn seed stands in the report and in the command that runs it again; a given one is kept."""
    given = ["conformance", "qwen3", "--level", "L0", "--json"]
    assert main([*given, "--profile", "deep"]) == 0
    drawn = json.loads(capsys.readouterr().out)
    assert drawn["env"]["profile"] == "deep"
    assert f"--seed {drawn['env']['seed']} --profile deep" in drawn["results"][0]["again"]
    assert main([*given, "--profile", "deep", "--seed", "7"]) == 0
    assert json.loads(capsys.readouterr().out)["env"]["seed"] == 7
    assert main([*given, "--profile", "ci"]) == 0
    assert json.loads(capsys.readouterr().out)["env"]["seed"] == 0


def test_what_a_simulated_world_finds_can_be_played_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The failure says seed, clause and actions, and where the trace lies; the fault is the runtime's."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "planted.py"
    file.write_text(PLANTED)
    report = run(Request(name="planted", file=file, only=(SIMULATED,), alone=True))
    [failed] = [result for result in report.results if result.clause == SIMULATED]
    assert failed.outcome.value == "fail", "\n".join(reports.lines(report))
    assert failed.fault == "runtime"
    assert re.search(r"the world of seed \d+ breaks [A-Z]\d+: ", failed.evidence.saw)
    assert 0 < len(failed.evidence.trace) <= 12
    [place] = re.findall(r"kvc replay (\S+)", failed.evidence.saw)
    capsys.readouterr()
    assert main(["replay", place]) == 0  # nothing is planted here
    assert "no violation; when it was written it broke" in capsys.readouterr().out


def test_a_trace_that_cannot_be_kept_is_no_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure stands, and says why there is no trace."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".kvc").write_text("a file")
    file = tmp_path / "planted.py"
    file.write_text(PLANTED)
    report = run(Request(name="planted", file=file, only=(SIMULATED,), alone=True))
    [failed] = [result for result in report.results if result.clause == SIMULATED]
    assert failed.outcome.value == "fail"
    assert "its trace could not be kept in" in failed.evidence.saw


def test_h10_what_is_not_declared_is_refused_by_name() -> None:
    """H10, I4: a store, a tier and an adapter that nobody could use are refused under one clause."""
    report = run(Request(name="qwen3", only=("KVC-PREFIX-09",), alone=True))
    found = [result for result in report.results if result.clause == "KVC-PREFIX-09"]
    assert [result.case for result in found] == ["a store", "a tier", "an adapter"]
    assert all(result.outcome.value == "pass" for result in found), "\n".join(reports.lines(report))


def test_a_clause_alone_is_judged_without_what_it_requires() -> None:
    """All others are deselected; a selection certifies nothing, as ever."""
    report = run(Request(name="qwen3", only=("KVC-LAYOUT-06",), alone=True))
    outcomes = {result.clause: result.outcome.value for result in report.results}
    assert outcomes.pop("KVC-LAYOUT-06") == "pass"
    assert set(outcomes.values()) <= {"deselected", "not_applicable"}
    assert report.verdict.exit_code == 3

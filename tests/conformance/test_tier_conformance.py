"""Tiers are certified by name: ours hold, others are found, and what does not apply is refused."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from kvc_conformance.checks import TIER_CHECKS
from kvc_conformance.outcomes import Outcome, Result, fold, judge
from kvc_conformance.runner import Request, run
from kvcontract.cli.main import main
from kvcontract.contract.clauses import CLAUSES, TIER_CLAUSES, clause
from kvcontract.contract.errors import DuplicatePlugin, PluginLoadError, PluginNotFound, UsageFault
from kvcontract.contract.tier_context import TierContext
from kvcontract.tiers.base import Code
from kvcontract.tiers.dram import DramTier
from kvcontract.tiers.opening import BUILT_IN, opener

NOT_APPLICABLE = {
    "dram": {"KVC-TIER-14", "KVC-TIER-15", "KVC-TIER-16"},
    "disk": {"KVC-TIER-16"},
    "shared": set[str](),
}
"""Clauses that are about claims which a tier of ours does not make."""


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_our_tiers_are_conformant(name: str) -> None:
    """Every clause holds, or is about something that the tier does not claim to be."""
    report = run(Request(name=name, tier=True))
    assert report.verdict.sentence == f"{name}: conformant as a tier"
    assert (report.verdict.level, report.verdict.exit_code) == ("T", 0)
    worst = fold(report.results)
    assert {item for item, found in worst.items() if found is not Outcome.PASS} == NOT_APPLICABLE[name]
    assert {clause_id for clause_id, _ in report.plan} == {item.id for item in TIER_CLAUSES}


def test_clauses_on_tiers_are_complete_and_well_formed() -> None:
    """Each has a check, unique ids, sentences; what it requires comes before it; models are not mixed in."""
    ids = [item.id for item in TIER_CLAUSES]
    assert len(set(ids)) == len(ids)
    assert not {item.id for item in CLAUSES} & set(ids)
    assert {check.clause for check in TIER_CHECKS} == set(ids)
    for number, item in enumerate(TIER_CLAUSES):
        assert item.level == "T"
        assert all([item.rule.endswith("."), item.why.endswith("."), item.fix.endswith("."), item.rests_on])
        assert set(item.requires) <= set(ids[:number])
        assert clause(item.id.lower()) is item


def test_a_tier_of_which_nothing_ran_is_incomplete() -> None:
    """No results are exit 3, not 0; one that is missing is named."""
    results = [Result(item.id, "", Outcome.PASS) for item in TIER_CLAUSES]
    assert judge("t", [], "T", TIER_CLAUSES).exit_code == 3
    assert judge("t", results, "T", TIER_CLAUSES).sentence == "t: conformant as a tier"
    short = judge("t", results[:-1], "T", TIER_CLAUSES)
    assert (short.exit_code, results[-1].clause in short.sentence) == (3, True)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    """Run `kvc` and read its JSON."""
    code = main([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_selection_certifies_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """--clause runs what it names and what that requires; the verdict is incomplete."""
    code, found = told(capsys, "conformance", "--tier", "dram", "--clause", "KVC-TIER-03")
    ran = {item["clause"] for item in found["results"] if item["outcome"] == "pass"}
    assert ran == {"KVC-TIER-01", "KVC-TIER-02", "KVC-TIER-03"}
    assert (code, found["tier"], found["asked"], found["verdict"]) == (3, "dram", "T", "incomplete")
    assert "model" not in found


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--tier", "dram", "--level", "L1"], 2, "--level does not apply"),
        (["qwen3", "--tier", "dram", "--tp", "2"], 2, "a model, --tp does not apply"),
        ([], 2, "name a model"),
        (["--tier", "dram", "-O", "x=1"], 2, "no options of its own; given: x"),
        (["--tier", "dram", "--clause", "KVC-DECL-01"], 2, "KVC-DECL-01 is a clause on models"),
        (["qwen3", "--clause", "KVC-TIER-01"], 2, "KVC-TIER-01 is a clause on tiers"),
        (["--tier", "drm"], 4, "did you mean dram?"),
        (["--tier", "zzz"], 4, "known: "),
    ],
)
def test_what_does_not_apply_is_said(
    capsys: pytest.CaptureFixture[str], words: list[str], code: int, said: str
) -> None:
    """I4: wrong flags are exit 2, unknown names exit 4 with the nearest ones."""
    found, body = told(capsys, "conformance", *words)
    assert found == code
    assert said in body.get("error", body.get("sentence"))


PLUGIN = """
    from kvcontract import hookimpl
    from kvcontract.tiers.dram import DramTier

    KVC_CONTRACT = 1

    @hookimpl
    def kvc_tier(ctx):
        return DramTier(ctx.capacity_bytes // int(ctx.options.get("parts", 1)), name="mine")
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str = PLUGIN) -> None:
    """Put a distribution that announces a tier on the path."""
    info = folder / f"kvc_{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kvc-{name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[kvcontract.tiers]\n{name} = plug_tier_{name}\n")
    (folder / f"plug_tier_{name}.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(str(folder))


def test_a_tier_plugin_is_found_by_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I1: by name, from metadata, with its options; a namesake of one of ours is an error."""
    install(tmp_path / "one", monkeypatch, "mine")
    make, plugin = opener("mine", {"parts": "2"})
    ctx = TierContext(directory=tmp_path, capacity_bytes=1 << 20, options={"parts": "2"})
    tier = make(ctx)
    assert isinstance(tier, DramTier)
    assert tier.capabilities.max_record_bytes == 1 << 19
    assert plugin is not None
    with pytest.raises(PluginNotFound, match="did you mean mine"):
        opener("mime", {})
    install(tmp_path / "two", monkeypatch, "dram")
    with pytest.raises(DuplicatePlugin, match="built in"):
        opener("dram", {})


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (PLUGIN.replace("KVC_CONTRACT = 1", "KVC_CONTRACT = 2"), "written for contract 2"),
        (PLUGIN.replace("@hookimpl", ""), "not marked @hookimpl"),
        ("KVC_CONTRACT = 1", "no kvc_tier hook"),
        ("raise RuntimeError('boom')", "import raised RuntimeError: boom"),
    ],
)
def test_a_tier_plugin_that_cannot_be_loaded_says_why(tmp_path: Path, source: str, said: str) -> None:
    """I1, I2: whatever is wrong is said, before anything of it is called."""
    file = tmp_path / "mine.py"
    file.write_text(textwrap.dedent(source))
    with pytest.raises(PluginLoadError, match=said):
        opener("mine", {}, file)


def test_a_plugin_that_dies_is_not_conformant(tmp_path: Path) -> None:
    """A tier that ends the process fails its first clause; everything else is blocked."""
    file = tmp_path / "mine.py"
    dies = PLUGIN.replace("return DramTier", "import os; os._exit(7); return DramTier")
    file.write_text(textwrap.dedent(dies))
    report = run(Request(name="mine", tier=True, file=file))
    assert report.verdict.exit_code == 1
    worst = fold(report.results)
    assert worst.pop("KVC-TIER-01") is Outcome.ERROR
    assert set(worst.values()) == {Outcome.BLOCKED}


def test_our_tiers_have_no_options() -> None:
    """An option that nobody would read is refused."""
    with pytest.raises(UsageFault, match="given: a, b"):
        opener("shared", {"a": "1", "b": "2"})


def test_codes_are_what_the_clauses_speak_of() -> None:
    """The words of the clauses on tiers name codes that exist."""
    words = {word.strip(".,;()") for item in TIER_CLAUSES for word in item.fix.split()}
    assert {word for word in words if word.isupper() and "_" in word} <= set(Code.__members__)

"""How outcomes fold into a verdict: never green by omission."""

from __future__ import annotations

import pytest

from kvc_conformance.outcomes import Evidence, Outcome, Result, fold, judge
from kvcontract.contract.clauses import CLAUSES, Level


def all_pass(level: Level) -> list[Result]:
    """A passing result for every clause up to a level."""
    return [Result(item.id, "", Outcome.PASS) for item in CLAUSES if item.level <= level]


def replaced(results: list[Result], clause: str, outcome: Outcome, saw: str = "") -> list[Result]:
    """The same results with another outcome for one clause."""
    return [Result(r.clause, r.case, outcome, Evidence(saw)) if r.clause == clause else r for r in results]


@pytest.mark.parametrize("level", ["L0", "L1", "L2"])
def test_everything_passed_is_conformant(level: Level) -> None:
    """All clauses of the levels asked for hold: exit 0, and the sentence says the level."""
    verdict = judge("m", all_pass(level), level)
    assert (verdict.kind, verdict.level, verdict.exit_code) == ("conformant", level, 0)
    assert verdict.sentence == f"m: conformant at {level}"


def test_nothing_ran_is_incomplete() -> None:
    """No results at all is exit 3, not 0."""
    verdict = judge("m", [], "L2")
    assert (verdict.kind, verdict.level, verdict.exit_code) == ("incomplete", None, 3)


def test_a_missing_clause_is_incomplete() -> None:
    """A clause without any result did not run, so its level is not reached."""
    results = [result for result in all_pass("L2") if result.clause != "KVC-OFFLOAD-04"]
    verdict = judge("m", results, "L2")
    assert (verdict.kind, verdict.level, verdict.exit_code) == ("incomplete", "L1", 3)
    assert "KVC-OFFLOAD-04" in verdict.sentence


@pytest.mark.parametrize("outcome", [Outcome.FAIL, Outcome.ERROR])
def test_a_failure_anywhere_is_not_conformant(outcome: Outcome) -> None:
    """A failure or error is exit 1; lower levels that hold are still told."""
    verdict = judge("m", replaced(all_pass("L2"), "KVC-PREFIX-01", outcome), "L2")
    assert (verdict.kind, verdict.level, verdict.exit_code) == ("not conformant", "L1", 1)
    assert "KVC-PREFIX-01" in verdict.sentence


def test_a_failure_outweighs_what_could_not_run() -> None:
    """Something incomplete at a lower level does not hide a failure at a higher one."""
    results = replaced(all_pass("L2"), "KVC-LAYOUT-06", Outcome.COULD_NOT_RUN)
    verdict = judge("m", replaced(results, "KVC-PREFIX-05", Outcome.FAIL), "L2")
    assert verdict.exit_code == 1


def test_a_failure_beyond_the_level_asked_for_counts() -> None:
    """What ran and failed is told, although its level is not asked for; so is what the register lacks."""
    results = replaced(all_pass("L2"), "KVC-PREFIX-01", Outcome.FAIL)
    found = judge("m", [*results, Result("KVC-TIER-01", "", Outcome.ERROR)], "L1")
    assert (found.kind, found.level, found.exit_code) == ("not conformant", "L1", 1)
    assert found.sentence == "m: not conformant: KVC-PREFIX-01, KVC-TIER-01"


def test_what_could_not_run_is_incomplete_with_its_reason() -> None:
    """A plugin without an executor is conformant at L1, and L2 says what it needs."""
    results = replaced(all_pass("L2"), "KVC-PREFIX-01", Outcome.COULD_NOT_RUN, "needs an executor")
    verdict = judge("m", results, "L2")
    assert (verdict.level, verdict.exit_code) == ("L1", 3)
    assert verdict.sentence == "m: conformant at L1; L2 needs an executor"


def test_not_applicable_holds_and_deselected_does_not() -> None:
    """What is not declared does not count against; what was deselected does."""
    assert judge("m", replaced(all_pass("L1"), "KVC-REPACK-04", Outcome.NOT_APPLICABLE), "L1").exit_code == 0
    assert judge("m", replaced(all_pass("L1"), "KVC-REPACK-04", Outcome.DESELECTED), "L1").exit_code == 3


def test_a_clause_is_as_good_as_its_worst_case() -> None:
    """Folding is by severity, whatever the order."""
    one, two = Result("KVC-PREFIX-01", "a", Outcome.PASS), Result("KVC-PREFIX-01", "b", Outcome.FAIL)
    assert fold([one, two]) == fold([two, one]) == {"KVC-PREFIX-01": Outcome.FAIL}
    two = Result("KVC-PREFIX-01", "b", Outcome.NOT_APPLICABLE)
    assert fold([one, two]) == {"KVC-PREFIX-01": Outcome.PASS}


def test_fault_follows_the_keeper_of_the_clause() -> None:
    """Author and engine clauses are the plugin's fault, runtime ones ours, unless evidence says otherwise."""
    assert Result("KVC-PREFIX-01", "", Outcome.FAIL).fault == "plugin"
    assert Result("KVC-LAYOUT-07", "", Outcome.FAIL).fault == "runtime"
    assert Result("KVC-PREFIX-01", "", Outcome.FAIL, Evidence("", fault="suite")).fault == "suite"
    assert Result("KVC-PREFIX-01", "", Outcome.PASS).fault is None

"""Conformance in the test run of a plugin's author: one test for each clause, and one for the verdict.

    from kvc_conformance.pytest_plugin import certify

    TestConformance = certify("mymodel")

The suite runs once, in processes of its own, when the first of the tests is: nothing that this test run has
patched, configured or deselected reaches it.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from kvc_conformance import report as reports
from kvc_conformance.outcomes import BROKEN, Outcome, fold
from kvc_conformance.profiles import ProfileName
from kvc_conformance.runner import Report, Request, run
from kvcontract.contract.clauses import CLAUSES, TIER_CLAUSES, Level


def certify(
    name: str,
    *,
    level: Level = "L2",
    file: Path | str | None = None,
    config: Path | str | None = None,
    checkpoint: Path | str | None = None,
    options: dict[str, Any] | None = None,
    plugin_options: dict[str, str] | None = None,
    device: str = "cpu",
    seed: int = 0,
    profile: ProfileName = "quick",
    tier: bool = False,
) -> type:
    """A class of tests that certifies a plugin.

    Args:
        name: of the model, or of the tier.
        level: that must be reached; the verdict's test fails below it.
        file: an unpackaged plugin.
        config: see `Request`, as for all others.
        checkpoint: likewise.
        options: likewise.
        plugin_options: likewise.
        device: likewise.
        seed: likewise.
        profile: likewise.
        tier: it is a tier.
    """
    # long: the arguments, one a line, and what they mean
    request = Request(
        name=name,
        file=None if file is None else Path(file),
        config=None if config is None else Path(config),
        checkpoint=None if checkpoint is None else Path(checkpoint),
        options=options or {},
        plugin_options=plugin_options or {},
        level=level,
        seed=seed,
        profile=profile,
        device=device,
        tier=tier,
    )
    registry = TIER_CLAUSES if tier else tuple(item for item in CLAUSES if item.level <= level)
    report = functools.cache(functools.partial(run, request))

    class TestConformance:
        """The clauses, each told apart, and what they come to."""

        @pytest.mark.parametrize("clause", [item.id for item in registry])
        def test_clause(self, clause: str) -> None:
            """It holds; what did not run is skipped, and fails the verdict."""
            _judge(clause, report())

        def test_verdict(self) -> None:
            """Conformant at the level: nothing failed, and nothing that is required did not run."""
            verdict = report().verdict
            if verdict.exit_code:
                pytest.fail(verdict.sentence, pytrace=False)

    return TestConformance


def _judge(clause: str, report: Report) -> None:
    results = [result for result in report.results if result.clause == clause]
    broken = [result for result in results if result.outcome in BROKEN]
    if broken:
        pytest.fail("\n".join(reports.failure(broken[0], report.request)), pytrace=False)
    worst = fold(results).get(clause, Outcome.DESELECTED)
    if worst is not Outcome.PASS:
        why = next((", ".join(r.because) or r.evidence.saw for r in results if r.outcome is worst), "")
        pytest.skip(f"{reports.WORDS[worst]} {why}".strip())

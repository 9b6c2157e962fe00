"""Tiers that are wrong on purpose fail with the clause that says so, and with nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvc_conformance import report as reports
from kvc_conformance.outcomes import BROKEN
from kvc_conformance.runner import Request, run
from kvcontract.contract.clauses import TIER_CLAUSES

ANIMALS = {
    "claims_to_last": (1, r"it says it is persistent; 0 of 20 records"),
    "claims_to_share": (1, r"saved by another process: 2 MISS"),
    "counts_prefix": (1, r"is said to be absent; it was saved"),
    "drops_last_row": (1, r"saved with code OK; record \d+ is absent"),
    "early_flush": (1, r"flush\('\w+'\) (settled when|came to)"),
    "early_publisher": (1, r"a look-up found it and a load reported OK with other bytes"),
    "evicts_leased": (1, r"a save that had no room took a leased record away"),
    "fails_whole_batch": (1, r"in one batch ended .* one by one"),
    "fears_strangers": (1, r"strange file beside it: it does not open any more: what is strange\?"),
    "forgets_handoffs": (1, r"handed off, and thrice the quota saved since: 4 MISS"),
    "half_record": (1, r"a save ended FULL; afterwards its record is present"),
    "keeps_quiet": (1, r"can be found no more, and nobody was told"),
    "lacks_discard": (1, r"it has no discard"),
    "late_worker": (1, r"saves begun after their deadline ended \['OK', 'OK'\]"),
    "misspelt_tier_hook": (4, r"kvc_teir is not a hook; did you mean kvc_tier"),
    "over_quota": (1, r"can be loaded from a tier with a quota of"),
    "raises_on_bad_rows": (1, r"row beyond the keys: raised IndexError"),
    "remembers_hits": (1, r"was discarded; present are \[True, True\]"),
}


def trips(file: Path) -> str:
    """The clause an animal names itself."""
    [found] = re.findall(r'^TRIPS = "(KVC-[A-Z]+-\d\d)"$', file.read_text(), re.MULTILINE)
    return str(found)


@pytest.mark.parametrize("name", sorted(ANIMALS))
def test_the_animal_trips_its_clause_alone(name: str) -> None:
    """One clause fails, in words about the fault; what rests on it is blocked; the exit code is its."""
    file = Path(__file__).parent / f"{name}.py"
    exit_code, said = ANIMALS[name]
    report = run(Request(name=name, tier=True, file=file))
    broken = [result for result in report.results if result.outcome in BROKEN]
    assert {result.clause for result in broken} == {trips(file)}, "\n".join(reports.lines(report))
    assert report.verdict.exit_code == exit_code
    told = re.sub(r"\s+", " ", broken[0].evidence.saw)
    assert re.search(said, told), told
    assert {result.fault for result in broken} == {"plugin"}


def test_every_animal_is_tried_and_every_clause_has_one() -> None:
    """No file of the zoo is forgotten here, and no clause on tiers is without a tier that only it catches."""
    files = {file.stem: file for file in Path(__file__).parent.glob("*.py") if file.stem != "test_tier_zoo"}
    assert set(files) == set(ANIMALS)
    assert {trips(file) for file in files.values()} == {item.id for item in TIER_CLAUSES}

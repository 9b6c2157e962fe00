"""Plugins that are wrong on purpose fail with the clause that says so, and with nothing else."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Final

import pytest

from kvc_conformance import report as reports
from kvc_conformance.outcomes import BROKEN
from kvc_conformance.runner import Request, run
from kvcontract.contract.clauses import Level

ANIMALS = {
    "lossy_sign": (1, r"found a value that belongs nowhere: 0x[89a-f]\w+ became 0x[0-7]\w+ where layer 0 K"),
    "shifted_layers": (
        1,
        r"layer 0 of the model writes into arena layers\.1\.kv, which declares layer 1",
    ),
    "swapped_restore": (1, r"found the value of layer 0 V .* where layer 0 K .* belongs"),
    "blind_last_row": (1, r"page"),
    "short_arena": (1, r"needs \d+ blocks"),
    "misspelt_hook": (4, r"kvc_executer is not a hook; did you mean kvc_executor"),
}

LEVELS: Final[dict[str, Level]] = {"lossy_sign": "L1", "short_arena": "L1", "swapped_restore": "L1"}
"""How far an animal whose fault shows early is certified."""


def trips(file: Path) -> str:
    """The clause an animal names itself."""
    [found] = re.findall(r'^TRIPS = "(KVC-[A-Z]+-\d\d)"$', file.read_text(), re.MULTILINE)
    return str(found)


@pytest.mark.parametrize("name", sorted(ANIMALS))
def test_the_animal_trips_its_clause_alone(name: str) -> None:
    """One clause fails, in words about the fault; what rests on it is blocked; the exit code is its."""
    file = Path(__file__).parent / f"{name}.py"
    exit_code, said = ANIMALS[name]
    report = run(Request(name=name, file=file, level=LEVELS.get(name, "L2")))
    broken = [result for result in report.results if result.outcome in BROKEN]
    assert {result.clause for result in broken} == {trips(file)}, "\n".join(reports.lines(report))
    assert report.verdict.exit_code == exit_code
    told = re.sub(r"\s+", " ", broken[0].evidence.saw)
    assert re.search(said, told), told
    assert {result.fault for result in broken} == {"plugin"}


def test_every_animal_is_tried() -> None:
    """No file of the zoo is forgotten here."""
    files = {file.stem for file in Path(__file__).parent.glob("*.py")} - {"test_zoo"}
    assert files == set(ANIMALS)
    assert all(importlib.util.find_spec(name) is None for name in files)

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
    "fine_boundary": (1, r"cut at every 16 leaves another state .* cut at every 64, it leaves the same one"),
    "kept_convolution": (1, r"something a step reads lies outside the declared arenas"),
    "late_slot": (1, r"the state they began from differs"),
    "lost_parity": (1, r"the state they began from differs"),
    "narrow_window": (1, r"logits (differ|of position \d+ are NaN)"),
    "other_slot": (
        1,
        r"also wrote arena layers\.0\.state, slot 2: no request of the step has it; theirs: 1 ",
    ),
    "owns_shared_layers": (1, r"layer 6 keeps nothing of its own, but HfLayers maps it"),
    "reads_leftovers": (
        1,
        r"slot 1 \(of request 0, after position 15\) depends on what lay in memory before",
    ),
    "recomputed_state": (1, r"restore = 'recomputed': this version of the runtime does not serve it"),
    "shifted_columns": (1, r"logits differ from the unmodified model's"),
    "wide_convolution": (1, r"kernel of 4, which is \[128, 3\] to keep; declared: \[128, 4\]"),
}

ODD: Final = frozenset({"wide_window"})
"""Plugins that are unlike others, and right."""

LEVELS: Final[dict[str, Level]] = {
    "lossy_sign": "L1",
    "recomputed_state": "L1",
    "short_arena": "L1",
    "swapped_restore": "L1",
}
"""How far an animal whose fault shows early is certified."""


def trips(file: Path) -> str:
    """The clause an animal names itself."""
    [found] = re.findall(r'^TRIPS = "(KVC-[A-Z]+-\d\d)"$', file.read_text(), re.MULTILINE)
    return str(found)


@pytest.mark.parametrize("name", sorted(ANIMALS))
def test_the_animal_trips_its_clause(name: str) -> None:
    """It fails where it says, in words about the fault; what rests below holds; the exit code is its."""
    file = Path(__file__).parent / f"{name}.py"
    judged(name, run(Request(name=name, file=file, only=(trips(file),))))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ANIMALS))
def test_the_animal_trips_its_clause_alone(name: str) -> None:
    """Of all clauses one fails; what rests on it is blocked."""
    file = Path(__file__).parent / f"{name}.py"
    judged(name, run(Request(name=name, file=file, level=LEVELS.get(name, "L2"))))


def judged(name: str, report: reports.Report) -> None:
    """An animal's report says what it is to say."""
    file = Path(__file__).parent / f"{name}.py"
    exit_code, said = ANIMALS[name]
    broken = [result for result in report.results if result.outcome in BROKEN]
    assert {result.clause for result in broken} == {trips(file)}, "\n".join(reports.lines(report))
    assert report.verdict.exit_code == exit_code
    told = re.sub(r"\s+", " ", broken[0].evidence.saw)
    assert re.search(said, told), told
    assert {result.fault for result in broken} == {"plugin"}


@pytest.mark.parametrize("name", sorted(ODD))
def test_the_odd_one_is_conformant(name: str) -> None:
    """What may be is not refused: a window may be larger than what the model reads, never smaller."""
    report = run(Request(name=name, file=Path(__file__).parent / f"{name}.py"))
    assert report.verdict.exit_code == 0, "\n".join(reports.lines(report))


def test_every_animal_is_tried() -> None:
    """No file of the zoo is forgotten here."""
    files = {file.stem for file in Path(__file__).parent.glob("*.py")} - {"test_zoo"}
    assert files == {*ANIMALS, *ODD}
    assert all(importlib.util.find_spec(name) is None for name in files)

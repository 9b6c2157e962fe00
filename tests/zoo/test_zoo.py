"""Plugins that are wrong on purpose fail with the clause that says so, and with nothing else."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from keeping import GOOD, SPOILT, ZOO, Animal, animals, objections, told

from kvc_conformance.runner import run
from kvcontract.contract.clauses import CLAUSES, TIER_CLAUSES

BROKEN = animals(*SPOILT)
SOUND = animals(*GOOD)
FIRST = list({animal.trips: animal for animal in reversed(BROKEN)}.values())
"""One for each clause, so that each is tried in every run; `make zoo` tries all of them."""


def by_name(animal: Animal) -> str:
    """What a test of it is called."""
    return f"{animal.ground}/{animal.name}"


@pytest.mark.parametrize("animal", FIRST, ids=by_name)
def test_the_animal_trips_its_clause(animal: Animal) -> None:
    """It fails where it says, in words about the fault, by that clause alone; the exit code is its.

    What the runtime promises of snapshots and windows is spoilt in turn: F1, F2, F3, F4, F5, F6.
    """
    report = run(animal.request(animal.trips, alone=True))
    assert not list(objections(animal, report)), told(report)


@pytest.mark.slow
@pytest.mark.parametrize("animal", BROKEN, ids=by_name)
def test_the_animal_trips_its_clause_alone(animal: Animal) -> None:
    """Of all clauses one fails; what rests on it is blocked."""
    report = run(animal.request())
    assert not list(objections(animal, report)), told(report)


@pytest.mark.slow
@pytest.mark.parametrize("animal", SOUND, ids=by_name)
def test_the_good_one_is_conformant(animal: Animal) -> None:
    """What may be is not refused, however unlike the others it is."""
    report = run(animal.request())
    assert report.verdict.exit_code == 0, told(report)


def test_every_animal_says_what_it_is_to_fail() -> None:
    """A broken plugin names a clause and what is seen; a good one names none."""
    assert all(animal.trips and animal.says and animal.about for animal in BROKEN)
    assert all(animal.about and not animal.trips for animal in SOUND)


def test_every_clause_has_an_animal() -> None:
    """No clause of the contract could be dropped without an animal getting away."""
    assert {animal.trips for animal in BROKEN} == {item.id for item in (*CLAUSES, *TIER_CLAUSES)}


def test_the_zoo_is_large_and_nothing_of_it_is_installed() -> None:
    """At least 45 broken plugins of models, and 5 good ones; none of the zoo can be found by name."""
    assert sum(animal.ground == "models" for animal in BROKEN) >= 45
    assert len(SOUND) >= 5
    own = [animal for animal in (*BROKEN, *SOUND) if animal.file is not None]
    assert all(importlib.util.find_spec(animal.name) is None for animal in own)
    assert {animal.file for animal in own} == set(ZOO.glob("*/*.py"))


def test_the_published_matrix_is_of_these_animals() -> None:
    """docs/zoo.md has every animal with the clause that it names, no other, and nothing that got away."""
    text = (Path(__file__).parents[2] / "docs" / "zoo.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    told = {(row[0].removeprefix("| ").replace("\\", ""), row[2]) for row in rows if len(row) == 6}
    told.discard(("animal", "killed by"))
    assert told == {(animal.name, animal.trips) for animal in BROKEN}
    assert "**" not in text

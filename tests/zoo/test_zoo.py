"""Plugins that are wrong on purpose fail with the clause that says so, and with nothing else."""

from __future__ import annotations

import pytest
from keeping import GOOD, SPOILT, Animal, animals, objections, told

from kvc_conformance.runner import run

BROKEN = animals(*SPOILT)
SOUND = animals(*GOOD)


def by_name(animal: Animal) -> str:
    """What a test of it is called."""
    return f"{animal.ground}/{animal.name}"


@pytest.mark.parametrize("animal", BROKEN, ids=by_name)
def test_the_animal_trips_its_clause(animal: Animal) -> None:
    """It fails where it says, in words about the fault; what rests below holds; the exit code is its.

    What the runtime promises of snapshots and windows is spoilt in turn: F1, F2, F3, F4, F5, F6.
    """
    report = run(animal.request(animal.trips))
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

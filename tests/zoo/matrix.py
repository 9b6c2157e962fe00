"""Certify every animal whole, and write down what killed it: ``make zoo`` writes docs/zoo.md.

An animal that is not killed by the clause it names alone, that dies of a crash, or a good one that is not
conformant, is exit code 1.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from keeping import GOOD, SPOILT, Animal, animals, broken_clauses, objections, seen

from kvc_conformance.outcomes import HOLDS, Outcome, fold
from kvc_conformance.runner import run
from kvcontract.contract.clauses import CLAUSES, TIER_CLAUSES, clause

PAGE: Final = Path(__file__).parents[2] / "docs" / "zoo.md"
SEEN: Final = 150
"""Characters of what was seen that the page shows."""

GROUNDS: Final = {
    "models": "Plugins of models",
    "runtime": "Sound plugins over a runtime that was spoilt",
    "tiers": "Tiers",
}


INTRODUCTION: Final = (
    "`make zoo` writes this page. Each animal is a plugin, a runtime or a tier that is wrong on purpose, as",
    "somebody might be by mistake, and names the clause that must fail. It is certified whole, by all",
    "clauses of its level.",
)


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of one.

    Attributes:
        failed: clauses that did.
        held: how many did.
        blocked: how many were not judged, because of what failed.
        crashed: whether something raised that was not to.
        wrong: what should have been otherwise.
    """

    animal: Animal
    failed: tuple[str, ...]
    held: int
    blocked: int
    crashed: bool
    seen: str
    verdict: str
    wrong: tuple[str, ...]


def fate(animal: Animal) -> Fate:
    """Certify one whole."""
    report = run(animal.request())
    worst = fold(report.results)
    if animal.trips:
        wrong = tuple(objections(animal, report))
    else:
        wrong = () if report.verdict.exit_code == 0 else (report.verdict.sentence,)
    return Fate(
        animal,
        tuple(sorted(broken_clauses(report))),
        sum(outcome in HOLDS for outcome in worst.values()),
        sum(outcome is Outcome.BLOCKED for outcome in worst.values()),
        any(outcome is Outcome.ERROR for outcome in worst.values()),
        seen(report),
        report.verdict.sentence,
        wrong,
    )


def fates(chosen: Sequence[Animal], jobs: int) -> Iterator[Fate]:
    """All of them, as they come."""
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(fate, animal) for animal in chosen]):
            yield done.result()


def page(found: Sequence[Fate]) -> Iterator[str]:
    """The page, line by line."""
    broken = [item for item in found if item.animal.trips]
    good = [item for item in found if not item.animal.trips]
    alone = [item for item in broken if item.failed == (item.animal.trips,)]
    yield "# The zoo"
    yield ""
    yield from INTRODUCTION
    yield ""
    yield f"- {len(broken)} animals; {len(alone)} killed by the clause named and by no other"
    yield f"- {sum(item.crashed for item in broken)} killed by a crash instead of a judgement"
    yield f"- {len(good)} good plugins; {sum(bool(item.wrong) for item in good)} of them failed"
    yield ""
    yield "A clause that rests on one that failed is not judged, so one fault is told once: *blocked*."
    yield ""
    yield "## What each clause alone catches"
    yield ""
    yield "| clause | kept by | animals |"
    yield "| --- | --- | --- |"
    for rule in sorted((*CLAUSES, *TIER_CLAUSES), key=lambda item: (item.level, item.id)):
        names = ", ".join(item.animal.name for item in alone if item.animal.trips == rule.id)
        yield f"| {rule.id} | {rule.who} | {names or '**none**'} |"
    for ground, title in GROUNDS.items():
        yield from ("", f"## {title}", "")
        yield "| animal | what is wrong | killed by | held | blocked | what was seen |"
        yield "| --- | --- | --- | --- | --- | --- |"
        for item in (item for item in broken if item.animal.ground == ground):
            cells = (item.animal.name, _cell(item.animal.about), ", ".join(item.failed) or "**nothing**")
            yield f"| {' | '.join(cells)} | {item.held} | {item.blocked} | {_cell(item.seen, SEEN)} |"
    yield from ("", "## Good plugins", "")
    yield "| plugin | what it is | verdict | clauses that hold |"
    yield "| --- | --- | --- | --- |"
    for item in good:
        yield f"| {item.animal.name} | {_cell(item.animal.about)} | {_cell(item.verdict)} | {item.held} |"


def _cell(text: str, limit: int | None = None) -> str:
    short = text if limit is None or len(text) <= limit else text[: limit - 1].rstrip() + "…"
    for sign in "|<>*_`":
        short = short.replace(sign, "\\" + sign)
    return short


def main() -> int:
    """Run, tell, write."""
    parser = argparse.ArgumentParser(description="Certify the animals of the zoo, and write docs/zoo.md.")
    parser.add_argument("names", nargs="*", help="only these; then nothing is written")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    everyone = animals(*SPOILT, *GOOD)
    unknown = sorted(set(given.names) - {animal.name for animal in everyone})
    if unknown:
        parser.error(f"no such animal: {', '.join(unknown)}")
    chosen = [animal for animal in everyone if not given.names or animal.name in given.names]
    began, found = time.monotonic(), list[Fate]()
    for item in fates(chosen, given.jobs):
        found.append(item)
        how = "; ".join(item.wrong) or ", ".join(item.failed) or item.verdict
        sign = "WRONG" if item.wrong else "ok"
        spent = time.monotonic() - began
        sys.stderr.write(
            f"{len(found):>4}/{len(chosen)} {spent:>6.0f} s {sign:<5} {item.animal.name}: {how}\n"
        )
    found.sort(key=lambda item: everyone.index(item.animal))
    if not given.names:
        PAGE.write_text("\n".join(page(found)) + "\n", encoding="utf-8")
    levels = Counter(clause(name).level for item in found for name in item.failed)
    told = ", ".join(f"{number} at {level}" for level, number in sorted(levels.items()))
    wrong = sum(bool(item.wrong) for item in found)
    sys.stdout.write(f"{len(found)} animals, {wrong} otherwise than they should be; killed: {told}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""What the zoo knows of its animals: they say it themselves, in constants that are read and never imported.

A plugin that is wrong on purpose states ``TRIPS``, the clause that must fail, and ``SAYS``, a pattern that
what the failure saw must match; where it is not the usual, ``EXIT``, the exit code, and ``LEVEL``, how far it
is certified.  Its docstring's first line says what is wrong.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from kvc_conformance import report as reports
from kvc_conformance.outcomes import BROKEN, Outcome
from kvc_conformance.runner import Report, Request
from kvcontract.contract.clauses import Level

ZOO: Final = Path(__file__).parent
Ground = Literal["models", "runtime", "tiers", "good", "installed"]
"""Broken plugins of models; sound plugins over a spoilt runtime; broken tiers; plugins that must pass, of the
zoo and of the repository."""

SPOILT: Final[tuple[Ground, ...]] = ("models", "runtime", "tiers")
GOOD: Final[tuple[Ground, ...]] = ("good", "installed")
INSTALLED: Final = {
    "gemma4": "full attention and windows, some layers with the state of others",
    "qwen3": "dense attention, queries in groups",
    "qwen35": "linear attention, whose states are rewritten at each token, beside full attention",
}
"""Plugins of the repository, and what each is."""

CRASHES: Final = frozenset({"KVC-DECL-01"})
"""Clauses that a crash may be the failure of."""


@dataclass(frozen=True, slots=True)
class Animal:
    """One plugin of the zoo.

    Attributes:
        name: of its file, and of the model or tier.
        ground: where it lives.
        about: what is wrong with it, or odd.
        trips: the clause that must fail; "": none.
        says: a pattern of what that failure must have seen.
        exit_code: of the command.
        level: up to which it is certified.
    """

    name: str
    ground: Ground
    about: str
    trips: str = ""
    says: str = ""
    exit_code: int = 1
    level: Level = "L2"

    @property
    def file(self) -> Path | None:
        """Where it is; None: it is installed."""
        return None if self.ground == "installed" else ZOO / self.ground / f"{self.name}.py"

    def request(self, *clauses: str, alone: bool = False) -> Request:
        """Certify it whole, or by some clauses, with what they require or without."""
        if self.ground == "tiers":
            return Request(name=self.name, tier=True, file=self.file, only=clauses, alone=alone)
        return Request(name=self.name, file=self.file, level=self.level, only=clauses, alone=alone)


def animals(*grounds: Ground) -> list[Animal]:
    """All that live there, by name."""
    return [animal for ground in grounds for animal in _of(ground)]


def _of(ground: Ground) -> list[Animal]:
    if ground == "installed":
        return [Animal(name, ground, about) for name, about in INSTALLED.items()]
    return [_read(ground, file) for file in sorted((ZOO / ground).glob("*.py"))]


def _read(ground: Ground, file: Path) -> Animal:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    told: dict[str, Any] = {}
    for item in tree.body:
        if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
            name = item.targets[0].id
            if name in {"TRIPS", "SAYS", "EXIT", "LEVEL"}:
                told[name] = ast.literal_eval(item.value)
    about = (ast.get_docstring(tree) or "").splitlines()[0]
    about = re.sub(r"^(Wrong on purpose|Right, if odd): ", "", about)
    return Animal(
        file.stem,
        ground,
        about,
        told.get("TRIPS", ""),
        told.get("SAYS", ""),
        told.get("EXIT", 1),
        told.get("LEVEL", "L2"),
    )


def broken_clauses(report: Report) -> set[str]:
    """Those that failed; blocked ones are not among them."""
    return {result.clause for result in report.results if result.outcome in BROKEN}


def seen(report: Report) -> str:
    """What the first failure saw, on one line."""
    found = next((result.evidence.saw for result in report.results if result.outcome in BROKEN), "")
    return re.sub(r"\s+", " ", found)


def objections(animal: Animal, report: Report) -> Iterable[str]:
    """What a report says otherwise than it should of an animal, one sentence each."""
    broken = broken_clauses(report)
    if broken != {animal.trips}:
        yield f"failed: {', '.join(sorted(broken)) or 'nothing'}; expected {animal.trips}"
    if report.verdict.exit_code != animal.exit_code:
        yield f"exit code {report.verdict.exit_code}; expected {animal.exit_code}"
    if not re.search(animal.says, seen(report)):
        yield f"saw {seen(report)!r}; expected {animal.says!r}"
    for result in report.results:
        if result.outcome in BROKEN and result.fault != (
            "runtime" if animal.ground == "runtime" else "plugin"
        ):
            yield f"{result.clause} is said to be the fault of the {result.fault}"
        if result.outcome is Outcome.ERROR and result.clause not in CRASHES:
            yield f"{result.clause} was not judged, something crashed: {result.evidence.saw}"


def told(report: Report) -> str:
    """The report in words, for a test that fails."""
    return "\n".join(reports.lines(report))

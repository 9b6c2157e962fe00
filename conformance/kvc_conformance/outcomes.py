"""What a check may come to, and how outcomes fold into a verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Literal

from kvcontract.contract.clauses import CLAUSES, LEVELS, Clause, Level, clause


class Outcome(Enum):
    """How one check of one case ended."""

    PASS = "pass"  # noqa: S105 - an outcome
    FAIL = "fail"
    ERROR = "error"
    BLOCKED = "blocked"
    COULD_NOT_RUN = "could_not_run"
    NOT_APPLICABLE = "not_applicable"
    DESELECTED = "deselected"


SEVERITY: Final = (
    Outcome.FAIL,
    Outcome.ERROR,
    Outcome.BLOCKED,
    Outcome.COULD_NOT_RUN,
    Outcome.DESELECTED,
    Outcome.PASS,
    Outcome.NOT_APPLICABLE,
)
"""Worst first; a clause is as good as its worst case."""

HOLDS: Final = frozenset({Outcome.PASS, Outcome.NOT_APPLICABLE})
BROKEN: Final = frozenset({Outcome.FAIL, Outcome.ERROR})

Fault = Literal["plugin", "runtime", "suite", "environment"]

_FAULT_BY_KEEPER: Final[Mapping[str, Fault]] = {"author": "plugin", "engine": "plugin", "runtime": "runtime"}


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a check saw, in words a newcomer understands.

    Attributes:
        saw: what was expected and what was found, decoded.
        where: ``file:line`` of the author's code, if known.
        trace: the steps that led there, at most a dozen.
        fault: whose fault it is; None: the clause's keeper's.
    """

    saw: str
    where: str | None = None
    trace: tuple[str, ...] = ()
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """One check of one case.

    Attributes:
        clause: id of the clause.
        case: which geometry, page size, precision, ...
        outcome: how it ended.
        evidence: what was seen; for a pass, figures worth knowing.
        because: for `BLOCKED`, the clauses that failed before.
        seconds: how long it took.
    """

    clause: str
    case: str
    outcome: Outcome
    evidence: Evidence = field(default_factory=lambda: Evidence(""))
    because: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def fault(self) -> Fault | None:
        """Whose fault a failure is."""
        if self.outcome not in BROKEN:
            return None
        return self.evidence.fault or _FAULT_BY_KEEPER[clause(self.clause).who]


def fold(results: Iterable[Result]) -> dict[str, Outcome]:
    """The worst outcome of each clause."""
    worst: dict[str, Outcome] = {}
    for result in results:
        before = worst.get(result.clause, result.outcome)
        worst[result.clause] = min(before, result.outcome, key=SEVERITY.index)
    return worst


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a run comes to.

    Attributes:
        kind: `conformant`, `incomplete` or `not conformant`.
        level: the highest level whose clauses, and those of all lower ones, hold; None if not even L0's.
        sentence: the verdict in words.
        exit_code: see `kvc help exit-codes`.
    """

    kind: Literal["conformant", "incomplete", "not conformant"]
    level: Level | None
    sentence: str
    exit_code: int


def judge(
    name: str, results: Iterable[Result], asked: Level, registry: tuple[Clause, ...] = CLAUSES
) -> Verdict:
    """Fold results into a verdict for the level asked for.

    A clause without any result did not run: nothing ran is incomplete, never green.
    """
    results = list(results)
    worst = fold(results)
    reached: Level | None = None
    open_reasons: list[str] = []
    for level in LEVELS:
        if level > asked:
            break
        ids = [item.id for item in registry if item.level == level]
        if not ids:
            continue
        broken = [item for item in ids if worst.get(item) in BROKEN]
        if broken:
            listed = ", ".join(sorted(item for item, outcome in worst.items() if outcome in BROKEN))
            held = f"; conformant {_at(reached)}" if reached else ""
            return Verdict("not conformant", reached, f"{name}: not conformant: {listed}{held}", 1)
        lacking = [item for item in ids if worst.get(item) not in HOLDS]
        if lacking and not open_reasons:
            open_reasons = _reasons(level, lacking, results)
        if not open_reasons:
            reached = level
    if any(outcome in BROKEN for outcome in worst.values()):
        listed = ", ".join(sorted(item for item, outcome in worst.items() if outcome in BROKEN))
        return Verdict("not conformant", reached, f"{name}: not conformant: {listed}", 1)
    if open_reasons:
        held = f"conformant {_at(reached)}; " if reached else ""
        return Verdict("incomplete", reached, f"{name}: {held}{'; '.join(open_reasons)}", 3)
    return Verdict("conformant", reached, f"{name}: conformant {_at(reached)}", 0)


def _at(level: Level | None) -> str:
    return "as a tier" if level == "T" else f"at {level}"


def _reasons(level: Level, lacking: list[str], results: list[Result]) -> list[str]:
    said = [
        result.evidence.saw
        for result in results
        if result.clause in lacking and result.outcome is Outcome.COULD_NOT_RUN and result.evidence.saw
    ]
    reason = said[0] if said else f"{len(lacking)} clause(s) did not run: {', '.join(lacking[:4])}"
    return [f"{level} {reason}" if said else f"{level}: {reason}"]

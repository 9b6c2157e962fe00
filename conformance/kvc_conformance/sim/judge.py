"""What is judged in a simulated world, how often, and what was found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


class Violation(Exception):
    """Something that must hold did not.

    Attributes:
        clause: which; of behaviours or of the eight rules.
        text: what was seen.
    """

    def __init__(self, clause: str, text: str) -> None:
        super().__init__(f"{clause}: {text}")
        self.clause = clause
        self.text = text


@dataclass(slots=True)
class Counts:
    """How often what was reached.

    Attributes:
        faults: by kind and verb.
        terminals: ends of operations.
        clauses: judgements that could have failed.
        seen: clauses that were seen at work, in the reasons of shorter hits.
        choices: points at which one of several things went on.
    """

    faults: Counter[str] = field(default_factory=Counter)
    terminals: Counter[str] = field(default_factory=Counter)
    clauses: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    choices: int = 0

    def add(self, other: Counts) -> None:
        """Those of another world too."""
        self.faults.update(other.faults)
        self.terminals.update(other.terminals)
        self.clauses.update(other.clauses)
        self.seen.update(other.seen)
        self.choices += other.choices


class Judge:
    """Collects what one world shows.

    Violations are kept and raised between steps: where they are seen, code under test may be on the stack,
    which would take the exception for a tier's.
    """

    def __init__(self) -> None:
        self.counts = Counts()
        self._found: list[Violation] = []

    def holds(self, clause: str, *, ok: bool, text: str = "") -> None:
        """Judge a clause once."""
        self.counts.clauses[clause] += 1
        if not ok:
            self._found.append(Violation(clause, text))

    def judged(self, clause: str) -> None:
        """It holds; whoever saw that says so by `broken` otherwise."""
        self.counts.clauses[clause] += 1

    def broken(self, clause: str, text: str) -> None:
        """Something happened that must not."""
        self._found.append(Violation(clause, text))

    def reached(self, terminal: str) -> None:
        """An operation has ended."""
        self.counts.terminals[terminal] += 1

    def fault(self, kind: str) -> None:
        """A fault was injected."""
        self.counts.faults[kind] += 1

    def raise_found(self) -> None:
        """Raise the first violation that was seen."""
        if self._found:
            raise self._found[0]

"""Waivers: failures that a team lives with for a while, each with a reason, an owner and an end.

They change what a run exits with, never what it says: a level is what it would be without them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, Final

from kvc_conformance.outcomes import BROKEN, Outcome, Verdict
from kvcontract.contract.clauses import clause
from kvcontract.contract.errors import UsageFault

FACTS: Final = ("clause", "reason", "owner", "expires")


@dataclass(frozen=True, slots=True)
class Waiver:
    """One clause that may fail.

    Attributes:
        clause: its id.
        reason: why that is bearable.
        owner: who mends it.
        expires: the last day that it holds.
    """

    clause: str
    reason: str
    owner: str
    expires: date

    @property
    def words(self) -> str:
        """It in one line."""
        return f"{self.clause} (until {self.expires}, {self.owner}: {self.reason})"


def read(path: Path) -> tuple[Waiver, ...]:
    """The waivers of a file: ``[[waiver]]`` tables of clause, reason, owner and expires (a date).

    Raises:
        UsageFault: it cannot be read, or says something else; all faults are named.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageFault(f"waivers {path}: {error}") from error
    faults = [f"{key!r} is nothing; expected [[waiver]] tables" for key in document if key != "waiver"]
    items = document.get("waiver", [])
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        items, faults = [], [*faults, "expected [[waiver]] tables"]
    for number, item in enumerate(items, 1):
        faults += [f"waiver {number}: {fault}" for fault in _faults(item)]
    named = [str(item.get("clause", "")).upper() for item in items]
    faults += [
        f"{name} is waived {named.count(name)} times"
        for name in dict.fromkeys(named)
        if named.count(name) > 1
    ]
    if faults:
        raise UsageFault(f"waivers {path}: {'; '.join(faults)}")
    return tuple(Waiver(**{**item, "clause": clause(item["clause"]).id}) for item in items)


def _faults(item: Mapping[str, Any]) -> list[str]:
    faults = [f"it lacks {name}" for name in FACTS if name not in item]
    faults += [f"{name!r} is none of {', '.join(FACTS)}" for name in item if name not in FACTS]
    for name in ("clause", "reason", "owner"):
        value = item.get(name, "-")
        if not isinstance(value, str) or not value.strip():
            faults.append(f"{name} = {value!r}: expected words")
    if type(item.get("expires", date.min)) is not date:
        faults.append(f"expires = {item['expires']!r}: expected a date, for example 2031-12-31")
    try:
        clause(str(item.get("clause", "KVC-DECL-01")))
    except UsageFault as error:
        faults.append(str(error))
    return faults


def weighed(
    verdict: Verdict, outcomes: Mapping[str, Outcome], waivers: Iterable[Waiver], today: date
) -> Verdict:
    """A verdict beside waivers: exits with 0 if all that fails is waived, with 1 if one of them is not true.

    Args:
        verdict: without them.
        outcomes: the worst of each clause that was to run.
        waivers: of the file.
        today: the day that it is.
    """
    given = {item.clause: item for item in waivers}
    if not given:
        return verdict
    broken = [name for name, outcome in outcomes.items() if outcome in BROKEN]
    wrong = [f"the waiver of {item.words} has expired" for item in given.values() if item.expires < today]
    wrong += [
        f"the waiver of {item.words} is stale: the clause holds"
        for item in given.values()
        if outcomes.get(item.clause) in {Outcome.PASS, Outcome.NOT_APPLICABLE}
    ]
    told = [given[name].words for name in broken if name in given]
    sentence = "; ".join([verdict.sentence, *([f"waived: {', '.join(told)}"] if told else []), *wrong])
    if wrong:
        return replace(verdict, sentence=sentence, exit_code=verdict.exit_code or 1)
    if broken and len(told) == len(broken) and verdict.exit_code == 1:
        return replace(verdict, sentence=sentence, exit_code=0)
    return replace(verdict, sentence=sentence)

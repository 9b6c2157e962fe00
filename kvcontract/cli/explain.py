"""``kvc explain``: what a clause says, why, and what to do."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from kvcontract.cli import view
from kvcontract.cli.launching import JsonFlag
from kvcontract.contract.capability import CAPABILITIES
from kvcontract.contract.clauses import CLAUSES, LEVELS, TIER_CLAUSES, Clause, clause
from kvcontract.contract.errors import UsageFault


def command(
    *,
    clause_id: Annotated[
        str | None, typer.Argument(metavar="CLAUSE", help="For example KVC-LAYOUT-05.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="List every clause.")] = False,
    json: JsonFlag = False,
) -> int:
    """Explain one clause of the contract, or list them all.

    Example: kvc explain KVC-LAYOUT-05
    """
    if everything == (clause_id is not None):
        raise UsageFault("name one clause, or give --all")
    chosen = (*CLAUSES, *TIER_CLAUSES) if clause_id is None else (clause(clause_id),)
    if json:
        view.emit_json({"schema": "kvc.clauses/1", "clauses": [asdict(item) for item in chosen]})
    elif clause_id is None:
        view.table(f"{len(chosen)} clauses", ("id", "level", "kept by", "rule"), map(_row, chosen))
    else:
        _print(chosen[0])
    return 0


def _row(item: Clause) -> tuple[str, ...]:
    return item.id, item.level, item.who, item.rule


def _applies(item: Clause) -> str:
    if item.capability is None:
        return f"to every {'tier' if item.level == 'T' else 'declaration'}"
    asked = CAPABILITIES[item.capability]
    return f"where {asked.words} ({asked.attribute})"


def _print(item: Clause) -> None:
    out = view.console()
    out.print(f"{item.id}  (since contract {item.since})")
    out.print(f"  rule:     {item.rule}")
    out.print(f"  why:      {item.why}")
    out.print(f"  try:      {item.fix}")
    out.print(f"  level:    {item.level}, {LEVELS[item.level]}")
    out.print(f"  kept by:  the {item.who}")
    out.print(f"  applies:  {_applies(item)}")
    behaviours = f"behaviours {', '.join(item.rests_on)}" if item.rests_on else "none"
    out.print(f"  rests on: {behaviours}")
    out.print(f"  requires: {', '.join(item.requires) or 'nothing'}")

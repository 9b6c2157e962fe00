"""``kvc explain``: what a clause says, why, and what to do; and what an object of a declaration is for."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from typing import Annotated, Any

import typer

import kvcontract
from kvcontract.cli import view
from kvcontract.cli.launching import JsonFlag
from kvcontract.contract.capability import CAPABILITIES
from kvcontract.contract.clauses import CLAUSES, LEVELS, TIER_CLAUSES, Clause, clause
from kvcontract.contract.dtypes import DTYPE_BITS
from kvcontract.contract.errors import UsageFault


def command(
    *,
    clause_id: Annotated[
        str | None, typer.Argument(metavar="CLAUSE", help="KVC-LAYOUT-05, or an object: Group, Field, ...")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="List every clause.")] = False,
    json: JsonFlag = False,
) -> int:
    """Explain a clause of the contract, or an object of a declaration.

    Examples: kvc explain KVC-LAYOUT-05 · kvc explain Group
    """
    if everything == (clause_id is not None):
        raise UsageFault("name one clause or object, or give --all")
    if clause_id in kvcontract.__all__:
        return _explain_object(clause_id, json=json)
    chosen = (*CLAUSES, *TIER_CLAUSES) if clause_id is None else (clause(clause_id),)
    if json:
        view.emit_json({"schema": "kvc.clauses/1", "clauses": [asdict(item) for item in chosen]})
    elif clause_id is None:
        view.table(f"{len(chosen)} clauses", ("id", "level", "kept by", "rule"), map(_row, chosen))
    else:
        _print(chosen[0])
    return 0


def _explain_object(name: str, *, json: bool) -> int:
    """What is imported from `kvcontract`: how it is called, and what its docstring says."""
    found = getattr(kvcontract, name)
    text = inspect.cleandoc(found.__doc__ or "")
    fields = getattr(found, "model_fields", {})
    shown = {key: _default(item) for key, item in fields.items()}
    if json:
        view.emit_json({"schema": "kvc.object/1", "name": name, "text": text, "fields": shown})
        return 0
    out = view.console()
    out.print(name)
    for line in text.splitlines():
        out.print(f"  {line}".rstrip())
    if shown:
        out.print("  Fields: " + ", ".join(f"{key}{value}" for key, value in shown.items()))
    if name == "Field":
        out.print(f"  Dtypes: {', '.join(DTYPE_BITS)}")
    return 0


def _default(field: Any) -> str:
    return "" if field.is_required() else f"={field.get_default(call_default_factory=True)!r}"


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
    out.print(f"  requires: {', '.join(item.requires) or 'nothing'}")

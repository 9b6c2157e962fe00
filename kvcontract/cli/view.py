"""How anything reaches the reader: data on stdout, talk on stderr, colour decided once."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from kvcontract.contract.clauses import clause
from kvcontract.contract.finding import Finding

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_WIDTH = 120
SHOWN_ALIKE = 3
"""Places of one and the same finding that are shown."""


def console(stream: TextIO | None = None) -> Console:
    """A console that is plain when piped and never reads markup from user text."""
    from rich.console import Console  # noqa: PLC0415 - `kvc --help` must not pay for it

    stream = stream or sys.stdout
    plain = not stream.isatty() and not os.environ.get("FORCE_COLOR")
    return Console(
        file=stream,
        markup=False,
        emoji=False,
        highlight=False,
        no_color=True if plain else None,
        width=PLAIN_WIDTH if plain else None,
        soft_wrap=True,
    )


def emit_json(document: Any) -> None:
    """One JSON document on stdout, nothing else."""
    text = json.dumps(document, indent=2, sort_keys=False, ensure_ascii=False)
    # What UTF-8 cannot say (a lone surrogate in a name) is escaped; JSON spells it the same way.
    sys.stdout.write(text.encode("utf-8", "backslashreplace").decode() + "\n")


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A titled table on stdout: boxed on a terminal, aligned text in a pipe."""
    from rich.table import Table  # noqa: PLC0415 - as above
    from rich.text import Text  # noqa: PLC0415

    texts = [[str(cell) for cell in row] for row in rows]
    out = console()
    if out.is_terminal:
        drawn = Table(title=Text(title), title_justify="left")
        for name in columns:
            drawn.add_column(Text(name), overflow="fold")
        for row in texts:
            drawn.add_row(*(Text(cell) for cell in row))
        out.print(drawn)
        return
    widths = [max(len(line[i]) for line in [list(columns), *texts]) for i in range(len(columns))]
    out.print(title)
    for line in [list(columns), *texts]:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        out.print(("  " + "  ".join(cells)).rstrip())


def findings(subject: str, found: Sequence[Finding]) -> None:
    """Every finding with its clause's rule and what to try, on stdout; equal ones are told once."""
    from rich.text import Text  # noqa: PLC0415 - as above

    out = console()
    seen: set[str] = set()
    alike: dict[tuple[str, str, str], list[Finding]] = {}
    for item in found:
        alike.setdefault((item.clause, item.message, item.allowed), []).append(item)
    for same in alike.values():
        item = same[0]
        out.print(Text.assemble(("FAIL", "bold red"), f"  {item.clause}  {item.path} = {item.value!r}"))
        for other in same[1:SHOWN_ALIKE]:
            out.print(f"      and at   {other.path} = {other.value!r}")
        if len(same) > SHOWN_ALIKE:
            out.print(
                f"      and at   {len(same) - SHOWN_ALIKE} more ({len(same)} in all; --json lists them)"
            )
        out.print(f"      {item.message}")
        out.print(f"      allowed: {item.allowed}")
        if item.where:
            out.print(f"      where:   {item.where}")
        if item.clause not in seen:
            seen.add(item.clause)
            rule = clause(item.clause)
            out.print(f"      rule:    {rule.rule}")
            out.print(f"      try:     {rule.fix}")
    out.print(f"{subject}: {count(len(found), 'finding')}; `kvc explain CLAUSE` tells more")


def count(number: int, noun: str) -> str:
    """A number with its noun, e.g. ``1 arena`` or ``36 arenas``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def bytes_text(count: int) -> str:
    """A byte count with thousands separators, e.g. ``65,536 B``."""
    return f"{count:,} B"

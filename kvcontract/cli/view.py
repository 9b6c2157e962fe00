"""How anything reaches the reader: data on stdout, talk on stderr, colour decided once."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvcontract.contract.clauses import clause
from kvcontract.contract.finding import Finding

PLAIN_WIDTH = 120


def console(stream: TextIO | None = None) -> Console:
    """A console that is plain when piped and never reads markup from user text."""
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
    sys.stdout.write(json.dumps(document, indent=2, sort_keys=False, ensure_ascii=False) + "\n")


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A titled table on stdout: boxed on a terminal, aligned text in a pipe."""
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
    """Every finding with its clause's rule and what to try, on stdout."""
    out = console()
    seen: set[str] = set()
    for item in found:
        out.print(Text.assemble(("FAIL", "bold red"), f"  {item.clause}  {item.path} = {item.value!r}"))
        out.print(f"      {item.message}")
        out.print(f"      allowed: {item.allowed}")
        if item.where:
            out.print(f"      where:   {item.where}")
        if item.clause not in seen:
            seen.add(item.clause)
            rule = clause(item.clause)
            out.print(f"      rule:    {rule.rule}")
            out.print(f"      try:     {rule.fix}")
    out.print(f"{subject}: {len(found)} finding(s); `kvc explain CLAUSE` tells more")


def bytes_text(count: int) -> str:
    """A byte count with thousands separators, e.g. ``65,536 B``."""
    return f"{count:,} B"

"""Both sides of a comparison in one process: interleaved rounds, medians, a table and one JSON document.

A case is two callables that each prepare what they need, time one thing, and return seconds.  Rounds
alternate between them, so that whatever else the machine does hits both.  A range of ratios that straddles
its bar is measured once more with twice the rounds.
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

Timed = Callable[[], float]
"""Prepares, times, returns seconds."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row to measure.

    Attributes:
        name: what is done.
        ours: our side.
        theirs: the peer's; None without one.
        unit: of the figures: seconds are multiplied by `per_s`.
        per_s: units in a second, divided by how many things are done in one call.
        bar: what the ratio must reach, or stay below.
        sense: whether more ("at least": theirs / ours) or less ("at most": ours / theirs) is better.
        most: largest allowed median of ours, in `unit`; None: no limit.
        note: shown beside the row.
    """

    name: str
    ours: Timed
    theirs: Timed | None = None
    unit: str = "ms"
    per_s: float = 1e3
    bar: float | None = None
    sense: Literal["at least", "at most"] = "at least"
    most: float | None = None
    note: str = ""


@dataclass(slots=True)
class Row:
    """One measured row.

    Attributes:
        name, unit, bar, note: of its case.
        ours, theirs: medians, in `unit`.
        ratio: median of the rounds' ratios.
        low, high: 10th and 90th percentile of those; of ours where there is no peer.
        ok: whether every bar is met.
    """

    name: str
    unit: str
    ours: float | None
    theirs: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    bar: float | None = None
    sense: str = "at least"
    most: float | None = None
    ok: bool = True
    note: str = ""
    rounds: int = field(default=0)


def measure(case: Case, rounds: int) -> Row:
    """Run a case; once more with double rounds if its range straddles the bar."""
    row = _measure(case, rounds)
    if row.bar is not None and row.low is not None and row.high is not None and row.low < row.bar < row.high:
        row = _measure(case, 2 * rounds)
    return row


def _measure(case: Case, rounds: int) -> Row:
    case.ours()  # warm
    if case.theirs is not None:
        case.theirs()
    ours, theirs = [], []
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            ours.append(case.ours())
            if case.theirs is not None:
                theirs.append(case.theirs())
    finally:
        gc.enable()
    made = Row(case.name, case.unit, statistics.median(ours) * case.per_s, rounds=rounds, note=case.note)
    made.bar, made.sense, made.most = case.bar if theirs else None, case.sense, case.most
    spread = [mine * case.per_s for mine in ours]
    if theirs:
        made.theirs = statistics.median(theirs) * case.per_s
        pairs = zip(ours, theirs, strict=True)
        spread = [other / mine if case.sense == "at least" else mine / other for mine, other in pairs]
        made.ratio = statistics.median(spread)
    made.low, made.high = _percentile(spread, 10), _percentile(spread, 90)
    if made.ratio is not None and case.bar is not None:
        made.ok = made.ratio >= case.bar if case.sense == "at least" else made.ratio <= case.bar
    made.ok = made.ok and (case.most is None or made.ours is None or made.ours < case.most)
    return made


def _percentile(values: Sequence[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[round((len(ordered) - 1) * percent / 100)]


def document(rows: Iterable[Row], of: Mapping[str, str]) -> dict[str, Any]:
    """The JSON form: machine, versions, results."""
    results = [
        {
            **{name: getattr(row, name) for name in ("name", "ours", "theirs", "unit", "ratio", "bar", "ok")},
            "range": [row.low, row.high],
            **{name: getattr(row, name) for name in ("sense", "most", "rounds", "note")},
        }
        for row in rows
    ]
    return {"machine": machine(), "versions": dict(of), "results": results}


def versions(*packages: str) -> dict[str, str]:
    """Of Python, this project and what else is timed; what runs from its source has the one it states."""
    found = {"python": platform.python_version()}
    for name in ("kvcontract", *packages):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = str(getattr(importlib.import_module(name), "__version__", "unknown"))
    return found


def machine() -> dict[str, Any]:
    """Where it was measured."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return {"cpu": model or platform.processor(), "cores": os.cpu_count(), "system": platform.platform()}


def table(rows: Iterable[Row], title: str) -> Table:
    """The terminal form."""
    made = Table(title=title, title_justify="left")
    for name in ("", "ours", "theirs", "ratio", "10-90 %", "bar", ""):
        made.add_column(name, justify="left" if not name else "right")
    for row in rows:
        sign = ">=" if row.sense == "at least" else "<="
        bars = [f"{sign} {row.bar:g}x"] if row.bar is not None else []
        bars += [f"< {row.most:g} {row.unit}"] if row.most is not None else []
        made.add_row(
            row.name,
            _figure(row.ours, row.unit),
            _figure(row.theirs, row.unit),
            "" if row.ratio is None else f"{row.ratio:.1f}x",
            "" if row.low is None or row.high is None else f"{row.low:.3g} - {row.high:.3g}",
            ", ".join(bars),
            " ".join(filter(None, ["" if not bars else "ok" if row.ok else "MISSED", row.note])),
        )
    return made


def _figure(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:.3f} {unit}"


def publish(rows: Sequence[Row], of: Mapping[str, str], title: str, json_path: str | None) -> int:
    """Print the table, write the document; 1 if a bar is missed."""
    Console(stderr=json_path == "-", width=150).print(table(rows, title))
    if json_path is not None:
        text = json.dumps(document(rows, of), indent=2)
        if json_path == "-":
            sys.stdout.write(text + "\n")
        else:
            Path(json_path).write_text(text + "\n", encoding="utf-8")
    return int(not all(row.ok for row in rows))

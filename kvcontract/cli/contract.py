"""``kvc contract``: the contract on one page, and whether a copy of it is current."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from kvcontract.cli import view
from kvcontract.cli.launching import JsonFlag
from kvcontract.contract import page as pages
from kvcontract.contract.errors import UsageFault

COPY: Final = Path("docs/CONTRACT.md")
"""The copy that is checked if none is named."""


def command(
    *,
    path: Annotated[
        Path | None, typer.Argument(help=f"With --check: the copy.  [default: {COPY}]", show_default=False)
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Compare a copy; exit 1 if it differs.")] = False,
    json: JsonFlag = False,
) -> int:
    """Print the contract: one page, for authors of plugins.

    Examples: kvc contract · kvc contract --check CONTRACT.md
    """
    if check:
        return _check(path or COPY, json=json)
    if path is not None:
        raise UsageFault(f"{str(path)!r} is the copy that --check compares; without it, nothing is read")
    if json:
        view.emit_json({"schema": "kvc.contract/1", **pages.document()})
    else:
        sys.stdout.write(pages.page())
    return 0


def _check(path: Path, *, json: bool) -> int:
    try:
        copy = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageFault(f"{path} cannot be read: {error}") from error
    ours = pages.page()
    difference = list(
        difflib.unified_diff(copy.splitlines(), ours.splitlines(), str(path), "kvc contract", lineterm="")
    )
    current = copy == ours
    if json:
        view.emit_json(
            {"schema": "kvc.contract-check/1", "path": str(path), "current": current, "diff": difference}
        )
    elif current:
        view.console().print(f"{path} is what the registry gives")
    else:
        for line in difference or ["they differ in the ends of lines alone"]:
            view.console().print(line)
        view.console(sys.stderr).print(f"kvc: {path} is not current; `kvc contract > {path}` writes it")
    return 0 if current else 1

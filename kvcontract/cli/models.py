"""``kvc models``: which model plugins are installed."""

from __future__ import annotations

import traceback
from typing import Annotated, Any

import typer

from kvcontract.cli import view
from kvcontract.cli.launching import JsonFlag
from kvcontract.contract import plugins
from kvcontract.contract.errors import PluginFault


def command(
    *,
    load: Annotated[
        bool, typer.Option("--load", help="Import each plugin and say whether it loads.")
    ] = False,
    tb: Annotated[
        bool, typer.Option("--tb", help="With --load: show the traceback of each failure.")
    ] = False,
    json: JsonFlag = False,
) -> int:
    """List the installed model plugins.

    From package metadata alone: nothing is imported unless --load asks for it.
    """
    rows = [_row(item, load=load, tb=tb) for item in plugins.installed()]
    if json:
        view.emit_json({"schema": "kvc.models/1", "models": rows})
    elif not rows:
        view.console().print(
            "no model plugins are installed; see `kvc conformance --help` for --plugin FILE.py"
        )
    else:
        columns = list(rows[0])
        view.table(
            view.count(len(rows), "model plugin"), columns, [[row[name] for name in columns] for row in rows]
        )
    return 4 if any(row.get("status", "loads") != "loads" for row in rows) else 0


def _row(item: plugins.Installed, *, load: bool, tb: bool) -> dict[str, Any]:
    row = {"name": item.name, "distribution": item.dist, "version": item.version, "module": item.target}
    if load:
        try:
            plugins.load(item.name)
            row["status"] = "loads"
        except PluginFault as error:  # I1: one broken plugin hurts no other
            row["status"] = str(error)
            if tb:
                traceback.print_exception(error)
    return row

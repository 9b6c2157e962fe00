"""``kvc help exit-codes``: what the exit codes mean."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from kvcontract.cli import view
from kvcontract.cli.launching import JsonFlag
from kvcontract.contract.errors import UsageFault

EXIT_CODES: Final[dict[int, str]] = {
    0: "conformant at the level asked for, or the command did what was asked",
    1: "not conformant: at least one clause failed; or stored records are damaged",
    2: "usage: the command line or a file it names cannot be read",
    3: "incomplete: nothing failed, but something required did not run, or nothing ran at all",
    4: "the plugin was not found, is ambiguous, or could not be loaded",
    5: "our fault: an internal error, or a plan and results that disagree",
    130: "interrupted",
}


def command(
    *, topic: Annotated[str, typer.Argument(help="exit-codes")] = "exit-codes", json: JsonFlag = False
) -> int:
    """Explain a topic; so far: exit-codes."""
    if topic != "exit-codes":
        raise UsageFault(f"no help on {topic!r}; topics: exit-codes (for a command: kvc COMMAND --help)")
    if json:
        view.emit_json(
            {"schema": "kvc.exit-codes/1", "exit_codes": {str(k): v for k, v in EXIT_CODES.items()}}
        )
    else:
        view.table("exit codes", ("code", "meaning"), EXIT_CODES.items())
    return 0

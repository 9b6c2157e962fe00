"""``kvc help exit-codes``: what the exit codes mean."""

from __future__ import annotations

from typing import Annotated

import typer

from kvcontract.cli import view
from kvcontract.cli.launching import JsonFlag
from kvcontract.contract.errors import EXIT_CODES, UsageFault


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

"""``kvc replay``: a trace of a simulation, played again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcontract.cli import view
from kvcontract.cli.launching import JsonFlag


def command(
    file: Annotated[Path, typer.Argument(help="A trace that `kvc simulate` has written.")],
    *,
    json: JsonFlag = False,
) -> int:
    """Play the trace of a simulation again.

    Exit code 1 if it still breaks a clause.

    Example: kvc replay trace.json
    """
    from kvc_conformance.sim.trace import Trace, replay  # noqa: PLC0415 - `kvc --help` must not pay for it

    trace = Trace.load(file)
    played = replay(trace)
    found, told = played.violation, trace.violation
    if json:
        view.emit_json(
            {
                "schema": "kvc.replay/1",
                "seed": trace.seed,
                "actions": len(played.actions),
                "violation": None if found is None else {"clause": found.clause, "text": found.text},
                "recorded": None if told is None else {"clause": told[0], "text": told[1]},
            }
        )
        return 0 if found is None else 1
    talk = view.console()
    if found is None:
        before = "" if told is None else f"; when it was written it broke {told[0]}"
        talk.print(f"{len(played.actions)} actions, no violation{before}")
        return 0
    talk.print(f"{len(played.actions)} actions break {found.clause}: {found.text}")
    return 1

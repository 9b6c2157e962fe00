"""The ``kvc`` command: which subcommands there are, and how faults become exit codes."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import Final

import typer

from kvcontract.cli import view
from kvcontract.contract.errors import KvContractError

COMMANDS: Final[dict[str, str]] = {
    "models": "kvcontract.cli.models",
    "check": "kvcontract.cli.check",
    "inspect": "kvcontract.cli.inspect",
    "conformance": "kvcontract.cli.conformance",
    "explain": "kvcontract.cli.explain",
    "help": "kvcontract.cli.exit_codes",
}

app = typer.Typer(
    name="kvc",
    help="Declare a model's KV cache once; check it, inspect it, certify it.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _register() -> None:
    for name, home in COMMANDS.items():
        module = importlib.import_module(home)
        app.command(name)(module.command)


def run() -> None:
    """Entry point: run, and turn every fault into one clear message and its exit code."""
    sys.exit(main(sys.argv[1:]))


def main(arguments: list[str]) -> int:
    """Run one command line.

    Returns:
        The exit code (`kvc help exit-codes` lists them).
    """
    if not app.registered_commands:
        _register()
    as_json = "--json" in arguments
    try:
        code = app(arguments, standalone_mode=False)
    except typer.Abort:
        code = 130
    except KeyboardInterrupt:
        code = _report(130, "interrupted", as_json=as_json)
    except KvContractError as error:
        code = _report(error.exit_code, str(error), as_json=as_json)
        if "--tb" in arguments or os.environ.get("KVC_TRACEBACK"):
            traceback.print_exc()
    except Exception as error:  # noqa: BLE001 - the last line of defence: ours, said as such
        if hasattr(error, "format_message"):  # a usage error of click, which newer typers carry inside
            return _report(2, error.format_message(), as_json=as_json)
        traceback.print_exc()
        code = _report(
            5, f"internal error: {type(error).__name__}: {error}; please report it", as_json=as_json
        )
    return code if isinstance(code, int) else 0


def _report(code: int, message: str, *, as_json: bool) -> int:
    if as_json:
        view.emit_json({"schema": "kvc.error/1", "exit_code": code, "error": message})
    view.console(sys.stderr).print(f"kvc: {message}")
    return code

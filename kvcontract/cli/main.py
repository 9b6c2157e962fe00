"""The ``kvc`` command: which subcommands there are, and how faults become exit codes."""

from __future__ import annotations

import importlib
import io
import os
import sys
import traceback
from typing import Final

import typer

from kvcontract.cli import view
from kvcontract.contract.errors import InternalFault, KvContractError

COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "new-model": ("kvcontract.cli.new_model", "Write the package of a new plugin."),
    "models": ("kvcontract.cli.models", "List the installed model plugins."),
    "check": ("kvcontract.cli.check", "Check a declaration statically; all findings at once."),
    "inspect": ("kvcontract.cli.inspect", "Show a declaration's bytes, arena by arena."),
    "conformance": ("kvcontract.cli.conformance", "Certify a plugin."),
    "simulate": ("kvcontract.cli.simulate", "Simulate stores under faults, seed by seed."),
    "replay": ("kvcontract.cli.replay", "Play the trace of a simulation again."),
    "store": ("kvcontract.cli.store", "Look at, check and tidy the directory of a disk tier."),
    "contract": ("kvcontract.cli.contract", "Print the contract: one page, for authors of plugins."),
    "schema": ("kvcontract.cli.schema", "Print the JSON schema of a report, or of a declaration."),
    "explain": ("kvcontract.cli.explain", "Explain a clause of the contract, or an object of a declaration."),
    "help": ("kvcontract.cli.exit_codes", "Explain a topic; so far: exit-codes."),
}
"""Each command's module and the first line of its help, so that ``kvc --help`` imports no command."""

INTERRUPTED: Final = 130
"""The exit code of a command that Ctrl-C has ended."""

_COMPLETING: Final = "_KVC_COMPLETE"  # set by the shell's completion, which asks for any command's options


def _app(arguments: list[str]) -> typer.Typer:
    """The program; of its commands only those that the arguments name are imported."""
    app = typer.Typer(
        name="kvc",
        help="Declare a model's KV cache once; check it, inspect it, certify it.",
        add_completion=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    for name, (home, line) in COMMANDS.items():
        if name in arguments or _COMPLETING in os.environ:
            module = importlib.import_module(home)
            if hasattr(module, "app"):  # a command of several
                app.add_typer(module.app, name=name)
            else:
                app.command(name)(module.command)
        else:
            app.command(name, help=line)(_named_only)
    return app


def _named_only() -> None:
    """Stands for a command in the list of commands."""
    raise InternalFault("a command was called that the arguments do not name")


def run() -> None:
    """Entry point: run, and turn every fault into one clear message and its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a plugin's text may be what no encoding has
    sys.exit(main(sys.argv[1:]))


def main(arguments: list[str]) -> int:
    """Run one command line.

    Returns:
        The exit code (`kvc help exit-codes` lists them).
    """
    if not arguments and _COMPLETING not in os.environ:
        main(["--help"])
        return 2
    as_json = "--json" in arguments
    try:
        code = _app(arguments)(arguments, standalone_mode=False)
        if code == INTERRUPTED:  # what typer makes of a KeyboardInterrupt, without a word
            _report(code, "interrupted", as_json=as_json)
    except (typer.Abort, KeyboardInterrupt):
        code = _report(INTERRUPTED, "interrupted", as_json=as_json)
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

"""``kvc conformance``: certify a plugin."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from kvcontract.cli import view
from kvcontract.cli.launching import JsonFlag, with_source
from kvcontract.contract.clauses import LEVELS, Level
from kvcontract.contract.errors import UsageFault
from kvcontract.contract.options import LaunchOptions


@with_source
def command(
    shared: dict[str, Any],
    *,
    level: Annotated[str, typer.Option(help="The level to certify: L0, L1 or L2.")] = "L2",
    clauses: Annotated[
        list[str] | None, typer.Option("--clause", help="Only this clause and what it requires; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(help="All of the suite's randomness comes from it.")] = 0,
    device: Annotated[str, typer.Option(help="Where executors run: cpu, cuda, cuda:1, ...")] = "cpu",
    everything: Annotated[bool, typer.Option("--all", help="Tell every failure in full.")] = False,
    tb: Annotated[bool, typer.Option("--tb", help="Show the end of tracebacks.")] = False,
    json: JsonFlag = False,
) -> int:
    """Certify a plugin.

    Judges the declaration, its bytes, and the model running over them.

    Examples: kvc conformance qwen3 · kvc conformance qwen3 --checkpoint DIR --page-tokens 64 ·
    kvc conformance mine --plugin mine.py --level L1
    """
    from kvc_conformance import report as reports  # noqa: PLC0415 - `kvc --help` must not pay for the suite
    from kvc_conformance.runner import Request, run  # noqa: PLC0415

    request = Request(
        name=shared["name"],
        file=shared["plugin"],
        config=shared["config"],
        checkpoint=shared["checkpoint"],
        options={name: shared[name] for name in LaunchOptions.model_fields},
        plugin_options=shared["set_options"],
        level=_level(level),
        only=tuple(clauses or ()),
        seed=seed,
        device=device,
    )
    talk = view.console(sys.stderr)

    def tell(result: Any) -> None:
        case = f" [{result.case}]" if result.case else ""
        talk.print(f"{reports.WORDS[result.outcome]:<10} {result.clause}{case} {result.seconds:.1f} s")

    if not json:
        talk.print(f"{request.name}: certifying up to {request.level} ({LEVELS[request.level]})")
    found = run(request, progress=tell)
    if json:
        view.emit_json(reports.as_json(found))
    else:
        for line in reports.lines(found, everything=everything, tracebacks=tb):
            view.console().print(line)
    return found.verdict.exit_code


def _level(text: str) -> Level:
    served: tuple[Level, ...] = ("L0", "L1", "L2")
    for level in served:
        if text.upper() == level:
            return level
    raise UsageFault(f"--level {text!r}: this version certifies {', '.join(served)}")

"""``kvc simulate``: stores under faults, on virtual time, seed by seed."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcontract.cli import view
from kvcontract.cli.launching import JsonFlag, with_optional_model
from kvcontract.contract.errors import UsageFault
from kvcontract.core.launch import Launch

if TYPE_CHECKING:
    from kvc_conformance.sim.fleet import Summary


@with_optional_model
def command(
    opened: Launch | None,
    *,
    model: Annotated[
        str | None,
        typer.Option(help="One of the small declarations alone: windowed, hybrid, ...", show_default=False),
    ] = None,
    seeds: Annotated[int, typer.Option(help="How many seeds to play.")] = 2000,
    first: Annotated[int, typer.Option(help="The first seed.")] = 0,
    steps: Annotated[int | None, typer.Option(help="Actions of a seed.", show_default=False)] = None,
    jobs: Annotated[int | None, typer.Option(help="Processes; one for each core if not given.")] = None,
    out: Annotated[Path, typer.Option(help="Where the trace of a violation is written.")] = Path(
        "trace.json"
    ),
    json: JsonFlag = False,
) -> int:
    """Simulate stores under faults, seed by seed.

    Time is virtual, schedules are seeded, the code is that of production.  Without a name, small
    declarations of several kinds are simulated.  A violation is cut down to what it needs and written as
    a trace that `kvc replay` plays again.

    Examples: kvc simulate --seeds 20000 · kvc simulate --model hybrid · kvc simulate qwen3
    """
    from kvc_conformance.sim import fleet  # noqa: PLC0415 - `kvc --help` must not pay for the suite
    from kvc_conformance.sim.samples import mix, sample  # noqa: PLC0415
    from kvc_conformance.sim.trace import STEPS  # noqa: PLC0415

    _refuse(out, seeds=seeds, first=first, steps=steps, jobs=jobs)
    if opened is not None and model is not None:
        raise UsageFault(f"--model {model} and a model's name: give one of them")
    models = (opened.model,) if opened is not None else mix() if model is None else (sample(model),)
    started, talk = time.monotonic(), view.console(sys.stderr)

    def tell(done: int) -> None:
        if talk.is_terminal:
            talk.print(f"\r{done:,} of {seeds:,} seeds, {time.monotonic() - started:.0f} s", end="")

    found = fleet.simulate(
        models, range(first, first + seeds), jobs=jobs, steps=steps or STEPS, progress=None if json else tell
    )
    seconds = time.monotonic() - started
    if found.trace is not None:
        found.trace.save(out)
    if json:
        view.emit_json({**found.as_json(seconds), "trace": None if found.trace is None else str(out)})
    else:
        _print(found, seconds, out)
    return 1 if found.failed or found.unreached else 0


def _print(found: Summary, seconds: float, out: Path) -> None:
    from kvc_conformance.sim.told import told  # noqa: PLC0415 - as above

    talk = view.console()
    for line in found.lines():
        talk.print(line)
    talk.print(
        f"{found.seeds:,} seeds in {seconds:.1f} s; {found.median_choices:,.0f} choice points in the median"
    )
    trace = found.trace
    if trace is not None and trace.violation is not None:
        clause, text = trace.violation
        talk.print(f"seed {trace.seed} breaks {clause}: {text}")
        for number, action in enumerate(trace.actions, 1):
            talk.print(f"  {number:>3} {told(action)}")
        talk.print(f"{len(trace.actions)} actions are needed; again with: kvc replay {out}")
    elif found.failed:
        talk.print(f"seed {min(found.failed)} found something that does not come again: a fault of ours")
    elif found.unreached:
        talk.print(f"never reached: {', '.join(found.unreached)} (more seeds reach more)")
    else:
        talk.print("no violation")


def _refuse(out: Path, *, seeds: int, first: int, steps: int | None, jobs: int | None) -> None:
    faults = [
        f"--{name} {value}: expected {least} or more"
        for name, value, least in (
            ("seeds", seeds, 1),
            ("first", first, 0),
            ("steps", steps, 1),
            ("jobs", jobs, 1),
        )
        if value is not None and value < least
    ]
    if out.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK):
        faults.append(f"--out {out}: cannot be written")  # better said now than once there is a trace
    if faults:
        raise UsageFault("; ".join(faults))

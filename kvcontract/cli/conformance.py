"""``kvc conformance``: certify a plugin of a model, or a tier."""

from __future__ import annotations

import secrets
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvcontract.cli import view
from kvcontract.cli.launching import JsonFlag, with_optional_source
from kvcontract.contract.clauses import LEVELS, Level
from kvcontract.contract.errors import UsageFault
from kvcontract.contract.options import LaunchOptions

if TYPE_CHECKING:
    from kvc_conformance.runner import Report, Request


SEEDS: Final = 2**31
"""A drawn seed is below."""


@with_optional_source
def command(
    shared: dict[str, Any],
    *,
    tier: Annotated[
        str | None, typer.Option("--tier", help="Certify this tier, for example dram, instead of a model.")
    ] = None,
    level: Annotated[
        str | None, typer.Option(help="The level to certify: L0, L1 or L2.", show_default="L2")
    ] = None,
    clauses: Annotated[
        list[str] | None, typer.Option("--clause", help="Only this clause and what it requires; repeatable.")
    ] = None,
    alone: Annotated[
        bool, typer.Option("--alone", help="Without what those clauses require: quicker, less sure.")
    ] = False,
    profile: Annotated[
        str, typer.Option(help="How long to try: quick, ci or deep; deep draws its seed.")
    ] = "quick",
    seed: Annotated[
        int | None, typer.Option(help="All of the suite's randomness comes from it.", show_default="0")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Where executors run: cpu, cuda, cuda:1, ...", show_default="cpu")
    ] = None,
    junit: Annotated[Path | None, typer.Option(help="Also write JUnit's XML there.")] = None,
    html: Annotated[Path | None, typer.Option(help="Also write the report as one HTML page there.")] = None,
    waivers: Annotated[
        Path | None, typer.Option(help="A TOML file of failures that are lived with for a while.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Tell every failure in full.")] = False,
    tb: Annotated[bool, typer.Option("--tb", help="Show the end of tracebacks.")] = False,
    json: JsonFlag = False,
) -> int:
    """Certify a plugin.

    Judges the declaration, its bytes, and the model running over them; with --tier, what a tier gives back.

    Examples: kvc conformance qwen3 · kvc conformance qwen3 --checkpoint DIR --page-tokens 64 ·
    kvc conformance mine --plugin mine.py --level L1 · kvc conformance --tier dram
    """
    # long: every option, one a line
    from kvc_conformance import report as reports  # noqa: PLC0415 - `kvc --help` must not pay for the suite
    from kvc_conformance.runner import run  # noqa: PLC0415
    from kvc_conformance.waivers import read  # noqa: PLC0415

    given = {"level": level, "device": device}
    request = _model(shared, given, clauses) if tier is None else _tier(tier, shared, given, clauses)
    request = replace(request, alone=alone, **_lengths(profile, seed))
    if waivers is not None:
        request = replace(request, waivers=read(waivers))
    _refuse_places(junit=junit, html=html)
    talk = view.console(sys.stderr)

    def tell(result: Any) -> None:
        case = f" [{result.case}]" if result.case else ""
        talk.print(f"{reports.WORDS[result.outcome]:<10} {result.clause}{case} {result.seconds:.1f} s")

    if not json:
        what = LEVELS["T"] if request.tier else f"up to {request.level} ({LEVELS[request.level]})"
        talk.print(f"{request.name}: certifying {what}, profile {request.profile}, seed {request.seed}")
    found = run(request, progress=tell)
    _write(found, junit, html)
    if json:
        view.emit_json(reports.as_json(found))
    else:
        for line in reports.lines(found, everything=everything, tracebacks=tb):
            view.console().print(line)
    return found.verdict.exit_code


def _write(found: Report, junit: Path | None, html: Path | None) -> None:
    if junit is not None:
        from kvc_conformance.junit import junit as as_junit  # noqa: PLC0415 - only who asks for it pays

        junit.write_text(as_junit(found), encoding="utf-8")
    if html is not None:
        from kvc_conformance.page import page  # noqa: PLC0415 - likewise

        html.write_text(page(found), encoding="utf-8")


def _refuse_places(**given: Path | None) -> None:
    """Refuse files that cannot be written, before anything runs."""
    faults = [
        f"--{name} {place}: there is no folder {place.parent}"
        if not place.parent.is_dir()
        else f"--{name} {place}: it is a folder"
        for name, place in given.items()
        if place is not None and (not place.parent.is_dir() or place.is_dir())
    ]
    if faults:
        raise UsageFault("; ".join(faults))


def _model(shared: dict[str, Any], given: dict[str, str | None], clauses: list[str] | None) -> Request:
    from kvc_conformance.runner import Request  # noqa: PLC0415 - as above

    if shared["name"] is None:
        raise UsageFault("name a model, as `kvc models` lists it, or a tier with --tier")
    return Request(
        name=shared["name"],
        file=shared["plugin"],
        config=shared["config"],
        checkpoint=shared["checkpoint"],
        options={name: shared[name] for name in LaunchOptions.model_fields},
        plugin_options=shared["set_options"],
        level=_level(given["level"] or "L2"),
        only=tuple(clauses or ()),
        device=given["device"] or "cpu",
    )


def _tier(
    name: str, shared: dict[str, Any], given: dict[str, str | None], clauses: list[str] | None
) -> Request:
    from kvc_conformance.runner import Request  # noqa: PLC0415 - as above

    taken = {"plugin", "set_options"}
    beside = [flag for flag, value in {**shared, **given}.items() if flag not in taken and value is not None]
    if beside:
        flags = ", ".join("a model" if flag == "name" else f"--{flag.replace('_', '-')}" for flag in beside)
        raise UsageFault(f"--tier certifies a tier: {flags} does not apply")
    return Request(
        name=name,
        tier=True,
        file=shared["plugin"],
        plugin_options=shared["set_options"],
        only=tuple(clauses or ()),
    )


def _lengths(profile: str, seed: int | None) -> dict[str, Any]:
    """The profile, and the seed that it has, draws, or was given."""
    from kvc_conformance.profiles import PROFILES  # noqa: PLC0415 - as above

    if profile not in PROFILES:
        raise UsageFault(f"--profile {profile!r}: expected {', '.join(PROFILES)}")
    if seed is None:
        seed = secrets.randbelow(SEEDS) if PROFILES[profile].drawn else 0
    if seed < 0:
        raise UsageFault(f"--seed {seed}: expected 0 or more")
    return {"profile": profile, "seed": seed}


def _level(text: str) -> Level:
    served: tuple[Level, ...] = ("L0", "L1", "L2")
    for level in served:
        if text.upper() == level:
            return level
    raise UsageFault(f"--level {text!r}: this version certifies {', '.join(served)}")

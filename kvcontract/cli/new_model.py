"""``kvc new-model``: write the package of a new plugin."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcontract.cli import view
from kvcontract.cli.launching import JsonFlag
from kvcontract.contract.errors import UsageFault
from kvcontract.core.identity import load_config

if TYPE_CHECKING:
    from kvc_templates.facts import Facts, Kind
    from kvc_templates.scaffold import Package


def command(
    name: Annotated[str, typer.Argument(help="The model's name, for example mymodel.")],
    *,
    kind: Annotated[
        str | None,
        typer.Option(
            help="What the cache is: gqa, mla, sliding or hybrid.", show_default="gqa, or as --from tells"
        ),
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="A config.json of the model: what it tells is filled in.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder to write into.", show_default="kvc-NAME")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Tell what would be written, and write nothing.")
    ] = False,
    json: JsonFlag = False,
) -> int:
    """Write the package of a new plugin.

    A declaration, a map for the generic executor, a test, CI. Nothing is asked, and no file is written over.
    Without --from it runs on stand-ins, marked for you to fill in.

    Examples: kvc new-model mymodel --kind mla · kvc new-model mymodel --from config.json --out mine
    """
    from kvc_templates import scaffold  # noqa: PLC0415 - `kvc --help` must not pay for templates

    facts = _facts(kind, source)
    package = scaffold.render(name, facts, sourced=source is not None)
    folder = out if out is not None else Path(package.dist)
    if dry_run:
        scaffold.refuse_conflicts(package, folder)
    else:
        scaffold.write(package, folder)
    if json:
        view.emit_json(_document(package, folder, written=not dry_run))
    else:
        _tell(package, folder, source, written=not dry_run)
    return 0


def _facts(asked: str | None, source: Path | None) -> Facts:
    from kvc_templates.facts import bare_facts, facts_of  # noqa: PLC0415 - as above

    kind = None if asked is None else _kind(asked)
    return bare_facts(kind or "gqa") if source is None else facts_of(load_config(source), kind)


def _kind(text: str) -> Kind:
    from kvc_templates.facts import KINDS  # noqa: PLC0415 - as above

    for kind in KINDS:
        if text == kind:
            return kind
    known = "; ".join(f"{kind}: {keeps}" for kind, keeps in KINDS.items())
    raise UsageFault(f"--kind {text!r}: there is no such kind ({known})")


def _next(package: Package, folder: Path) -> list[str]:
    return [
        f"cd {folder}",
        "python -m pip install --editable '.[dev]'",
        f"kvc check {package.name}",
        f"kvc conformance {package.name}",
    ]


def _document(package: Package, folder: Path, *, written: bool) -> dict[str, Any]:
    facts = package.facts
    return {
        "schema": "kvc.new-model/1",
        "model": package.name,
        "kind": facts.kind,
        "folder": str(folder),
        "written": written,
        "files": list(package.files),
        "to_fill_in": facts.missing,
        "derived": facts.derived,
        "assumed": facts.assumed,
        "left_out": list(facts.left_out),
        "next": _next(package, folder),
    }


def _tell(package: Package, folder: Path, source: Path | None, *, written: bool) -> None:
    out, facts = view.console(), package.facts
    count = view.count(len(package.files), "file")
    out.print(f"{package.dist}, of kind {facts.kind}: {count} {'written to' if written else 'for'} {folder}")
    for path in package.files:
        out.print(f"  {path}")
    for fact, how in facts.derived.items():
        out.print(f"derived: {fact} = {how}")
    for text in facts.assumed:
        out.print(f"assumed: {text}")
    if facts.left_out:
        out.print(f"left out of SAMPLE: {', '.join(facts.left_out)}")
    if facts.missing:
        why = f"{source} lacks them" if source else "no config.json was given"
        out.print(f"to fill in ({why}): {', '.join(facts.missing)}")
        out.print(f"  each is marked fill_in(...) in kvc_{package.name}/__init__.py")
    out.print("next:")
    for line in _next(package, folder):
        out.print(f"  {line}")

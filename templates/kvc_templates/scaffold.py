"""From a name and facts to the files of a plugin package: rendered in memory, checked, then written."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jinja2

from kvc_templates.facts import KINDS, Facts
from kvc_templates.literal import Missing, literal
from kvc_templates.names import check_name
from kvcontract.contract.errors import InternalFault, UsageFault

_FILES: Final[dict[str, str]] = {
    ".github/workflows/conformance.yml": "conformance.yml.j2",
    ".gitignore": "gitignore.j2",
    "AGENTS.md": "AGENTS.md.j2",
    "LICENSE": "LICENSE.j2",
    "README.md": "README.md.j2",
    "pyproject.toml": "pyproject.toml.j2",
    "tests/test_conformance.py": "test_conformance.py.j2",
    "{module}/__init__.py": "{kind}.py.j2",
    "{module}/py.typed": "py.typed.j2",
}
"""Path in the package, and the template it comes from."""

_IMPORTS: Final[dict[str, tuple[str, ...]]] = {
    "gqa": (),
    "mla": (),
    "sliding": ("Window",),
    "hybrid": ("Recurrent",),
}
_ALWAYS: Final = (
    "Arena",
    "Attention",
    "Config",
    "Context",
    "Field",
    "Group",
    "HfLayers",
    "KvModel",
    "hookimpl",
)
_BOUNDARY_TOKENS: Final = 64


@dataclass(frozen=True, slots=True)
class Package:
    """A plugin package that is not written yet.

    Attributes:
        name: the model's name.
        facts: what it was made from.
        files: text by path in the package.
    """

    name: str
    facts: Facts
    files: Mapping[str, str]

    @property
    def dist(self) -> str:
        """Name of the distribution."""
        return dist_name(self.name)


def dist_name(name: str) -> str:
    """Name of the distribution of a plugin."""
    return f"kvc-{name.replace('_', '-')}"


def render(name: str, facts: Facts, *, sourced: bool) -> Package:
    """Make the files of a plugin package, in memory.

    Args:
        name: the model's name.
        facts: of the model.
        sourced: whether they come from a config.json.

    Raises:
        UsageFault: the name cannot be one.
    """
    check_name(name)
    module = f"kvc_{name}"
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kvc_templates", "tree"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # noqa: S701 - what is rendered is source, not HTML
    )
    known = {"name": name, "dist": dist_name(name), "module": module, **_known(facts), "sourced": sourced}
    files = {
        path.format(module=module): environment.get_template(source.format(kind=facts.kind)).render(known)
        for path, source in sorted(_FILES.items())
    }
    _check(files)
    return Package(name, facts, files)


def _known(facts: Facts) -> dict[str, Any]:
    """What templates are given of the facts."""
    marked = bool(facts.missing)
    boundary = (
        Missing("boundary_tokens", _BOUNDARY_TOKENS)
        if "boundary_tokens" in facts.missing
        else _BOUNDARY_TOKENS
    )
    imports = {*_ALWAYS, *_IMPORTS[facts.kind], *(["fill_in"] if marked else [])}
    return {
        "kind": facts.kind,
        "keeps": KINDS[facts.kind],
        "rules": facts.rules,
        "nested": facts.nested,
        "inherited": facts.inherited,
        "placeholder_ids": facts.placeholder_ids,
        "missing": facts.missing,
        "marked": marked,
        "sample": literal(facts.sample),
        "boundary": literal(boundary),
        "imports": sorted(imports, key=lambda item: (item.islower(), item)),
    }


def _check(files: Mapping[str, str]) -> None:
    """What is written parses: a template that went wrong is our fault, and nothing of it is written."""
    for path, text in files.items():
        try:
            if path.endswith(".py"):
                ast.parse(text)
            elif path.endswith(".toml"):
                tomllib.loads(text)
        except (SyntaxError, tomllib.TOMLDecodeError) as error:
            raise InternalFault(f"the template of {path} gave what cannot be read: {error}") from error
        if path != "LICENSE" and not path.endswith(".py") and re.search(r"\{\{|\{%|\{#", text):
            raise InternalFault(f"the template of {path} left a mark of its own")


def refuse_conflicts(package: Package, folder: Path) -> None:
    """See to it that nothing would be written over.

    Raises:
        UsageFault: something is in the way, all of it is named; or the folder cannot be looked at.
    """
    parents = sorted({parent for path in package.files for parent in (folder / path).parents})
    try:
        taken = [path for path in package.files if (folder / path).exists() or (folder / path).is_symlink()]
        taken += [f"{parent} (no folder)" for parent in parents if parent.exists() and not parent.is_dir()]
    except OSError as error:
        raise _unwritten(error) from error
    if taken:
        raise UsageFault(
            f"nothing was written: in {folder} there is already {', '.join(taken)};"
            " remove what is in the way, or choose another folder with --out"
        )


def write(package: Package, folder: Path) -> None:
    """Write the files of a package; if one cannot be, those before it are removed again.

    Raises:
        UsageFault: something is in the way, or the folder cannot be written to.
    """
    refuse_conflicts(package, folder)
    made: list[Path] = []
    try:
        for path, text in package.files.items():
            file = folder / path
            for parent in reversed([item for item in file.parents if not item.exists()]):
                parent.mkdir()
                made.append(parent)
            with file.open("x", encoding="utf-8", newline="\n") as stream:
                made.append(file)
                stream.write(text)
    except OSError as error:
        raise _unwritten(error, left=_remove(made)) from error


def _unwritten(error: OSError, left: Sequence[str] = ()) -> UsageFault:
    where = f": {error.filename}" if error.filename else ""
    also = f"; {', '.join(left)} could not be removed again" if left else ""
    done = f"nothing was written: {error.strerror}{where}"
    return UsageFault(f"{done}; choose a folder that can be written to with --out{also}")


def _remove(made: list[Path]) -> list[str]:
    """Take back what was made, the last first; what stays is returned."""
    left = []
    for path in reversed(made):
        try:
            path.rmdir() if path.is_dir() else path.unlink()
        except OSError:
            left.append(str(path))
    return left

"""The contract on one page: what an author of a model's plugin has to read, rendered from the code.

`page.md` beside this module has the words and the example; clauses, hooks, objects and exit codes are filled
in from where they are defined.
"""

from __future__ import annotations

import inspect
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from importlib.resources import files
from typing import Any, Final, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from kvcontract.contract import executor, hooks, model, options
from kvcontract.contract.clause import Clause
from kvcontract.contract.clauses import CLAUSES
from kvcontract.contract.dtypes import DTYPE_BITS
from kvcontract.contract.errors import EXIT_CODES, InternalFault
from kvcontract.contract.revision import revision

WIDTH: Final = 100
"""Columns of the page."""

TEMPLATE: Final = "page.md"
EXAMPLE: Final = re.compile(r"```python\n(.*?)```", re.DOTALL)

HOOKS: Final[tuple[Callable[..., Any], ...]] = (
    hooks.kvc_model,
    hooks.kvc_samples,
    hooks.kvc_executor,
    hooks.kvc_options,
)
"""Those of a model's plugin, the required one first."""

OBJECTS: Final[tuple[type, ...]] = (
    options.Context,
    options.LaunchOptions,
    model.KvModel,
    model.Group,
    model.Arena,
    model.Field,
    model.Repack,
    model.Window,
    model.Chunk,
    model.Conversion,
    executor.HfLayers,
    executor.Combined,
    model.StaticScale,
    executor.Attention,
    executor.Recurrent,
)
"""What an author reads from, declares with, and maps layers by; in an order that fills lines."""

SCALARS: Final = frozenset({"str", "int", "float"})
"""What is said by a field's name."""

CONSTRUCTORS: Final[dict[type, str]] = {model.Arena: "Arena.planes|rows"}
"""How an object is made that is not made by its name."""


def author_clauses() -> tuple[Clause, ...]:
    """The clauses on models that their authors keep, lower levels first, then by id."""
    kept = (item for item in CLAUSES if item.who == "author")
    return tuple(sorted(kept, key=lambda item: (item.level, item.id)))


def page() -> str:
    """The page, as Markdown."""
    text = (files(__package__) / TEMPLATE).read_text(encoding="utf-8")
    filled = {
        "revision": revision().title,
        "exit_codes": "; ".join(f"{code} {words}" for code, words in EXIT_CODES.items()),
        "hooks": _packed(signature(hook) for hook in HOOKS),
        "objects": _packed(signature(item) for item in OBJECTS),
        "clauses": "\n".join(f"- {item.id} {item.rule}" for item in author_clauses()),
    }
    return _refilled(re.sub(r"@(\w+)@", lambda found: filled[found[1]], text))


def _refilled(text: str) -> str:
    """The words before the first code, in full lines; what begins in bold begins a line."""
    title, rest = text.split("\n", 1)
    words, code = rest.split("```", 1)
    whole = "\n".join(_wrapped(part) for part in re.split(r"\n(?=\*\*[ATE])", words))
    return f"{title}\n{whole}\n```{code}"


def example() -> str:
    """The page's plugin, as Python."""
    (found,) = EXAMPLE.findall(page())
    return str(found)


def document() -> dict[str, Any]:
    """What the page lists, as plain JSON."""
    served = revision()
    return {
        "contract": served.number,
        "draft": served.draft,
        "clauses": [
            {"id": item.id, "level": item.level, "rule": item.rule, "why": item.why, "fix": item.fix}
            for item in author_clauses()
        ],
        "hooks": {hook.__name__: signature(hook) for hook in HOOKS},
        "objects": {item.__name__: signature(item) for item in OBJECTS},
        "dtypes": list(DTYPE_BITS),
        "exit_codes": {str(code): words for code, words in EXIT_CODES.items()},
        "example": example(),
    }


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text, WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def _packed(texts: Iterable[str]) -> str:
    """Short ones share a line; one that is longer than a line is wrapped."""
    lines = [""]
    for text in texts:
        joined = f"{lines[-1]}  {text}".lstrip()
        if len(joined) <= WIDTH:
            lines[-1] = joined
        else:
            lines.append(text)
    return "\n".join(_wrapped(line, "  ") if len(line) > WIDTH else line for line in lines if line)


def signature(item: Callable[..., Any] | type) -> str:
    """How a hook or an object is called: names, types where they are no text, defaults."""
    if isinstance(item, type):
        shown = _declared(item) if issubclass(item, BaseModel) else _plain(item)
        return f"{CONSTRUCTORS.get(item, item.__name__)}({', '.join(shown)})"
    return f"{item.__name__}{inspect.signature(item)}".replace("'", "")


def _declared(item: type[BaseModel]) -> list[str]:
    """Fields of a pydantic model that its author gives: not what the name of the constructor says."""
    given = (pair for pair in item.model_fields.items() if pair[0] != "arrangement")
    return [_field(name, info) for name, info in given if len(typing.get_args(info.annotation)) != 1]


def _field(name: str, info: FieldInfo) -> str:
    kind = _type(info.annotation).removesuffix("|None")
    if info.is_required():
        return name if kind == "str" else f"{name}: {kind}"
    default = info.get_default()
    if default is None:
        return f"{name}=None" if kind in SCALARS else f"{name}: {kind}=None"
    if isinstance(default, BaseModel):
        return f"{name}={kind.replace(type(default).__name__, f'{type(default).__name__}()', 1)}"
    return f"{name}={kind}" if kind.startswith(f'"{default}"') else f"{name}={_literal(default)}"


def _plain(item: type) -> list[str]:
    """Fields of a dataclass."""
    if not is_dataclass(item):
        raise InternalFault(f"{item!r} has no fields to show")
    defaults = [(part.name, part.default) for part in fields(item)]
    whole = item is options.Context  # made by the host: names alone
    return [name if whole or value is MISSING else f"{name}={_literal(value)}" for name, value in defaults]


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _type(annotation: Any) -> str:
    """A type as an author would write it."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return "|".join(f'"{value}"' for value in arguments)
    if origin in {typing.Union, types.UnionType}:
        return "|".join(_type(item) for item in arguments)
    if origin is tuple:
        return f"({_type(arguments[0])}, ...)"
    if origin is Mapping:
        return "{axis: size}"
    return "None" if annotation is type(None) else str(getattr(annotation, "__name__", annotation))

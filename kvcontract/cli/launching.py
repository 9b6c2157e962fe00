"""The parameters that every command on a model shares, drawn from the options table."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.options import LaunchOptions, option_table
from kvcontract.core.launch import Launch, Source, launch

JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]

_FIXED: dict[str, Any] = {
    "name": Annotated[str, typer.Argument(help="The model's name, as `kvc models` lists it.")],
    "config": Annotated[Path | None, typer.Option(help="A config.json to declare from, without weights.")],
    "checkpoint": Annotated[Path | None, typer.Option(help="A folder of config.json and *.safetensors.")],
    "plugin": Annotated[Path | None, typer.Option(help="An unpackaged plugin: a Python file named NAME.py.")],
    "set_options": Annotated[
        list[str] | None,
        typer.Option("--set", "-O", metavar="NAME=VALUE", help="An option of the plugin's own."),
    ],
}

_MAYBE_NAMED = Annotated[str | None, typer.Argument(help="The model's name; may be left out.")]


def with_source(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command the shared parameters; it receives their values as a dict, before its own."""
    return _with_source(command, named=True)


def with_optional_source(command: Callable[..., int]) -> Callable[..., int]:
    """Like `with_source`, for a command that also runs without a name."""
    return _with_source(command, named=False)


def _with_source(command: Callable[..., int], *, named: bool) -> Callable[..., int]:
    @functools.wraps(command)
    def wrapped(**given: Any) -> int:
        shared = {name: given.pop(name) for name in (*_FIXED, *_core_names())}
        shared["set_options"] = pairs(shared["set_options"] or [])
        return command(shared, **given)

    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    keyword = inspect.Parameter.KEYWORD_ONLY
    kinds = _FIXED if named else {**_FIXED, "name": _MAYBE_NAMED}
    defaults = dict.fromkeys(_FIXED) | ({"name": inspect.Parameter.empty} if named else {})
    fixed = [
        inspect.Parameter(name, keyword, annotation=kind, default=defaults[name])
        for name, kind in kinds.items()
    ]
    core = [inspect.Parameter(name, keyword, annotation=kind, default=None) for name, kind in _core_flags()]
    parameters = [*fixed, *core, *(item.replace(kind=keyword) for item in own)]
    signature = inspect.Signature(parameters, return_annotation=int)
    wrapped.__signature__ = signature  # type: ignore[attr-defined] # typer reads it
    wrapped.__annotations__ = {item.name: item.annotation for item in parameters}
    return wrapped


def with_model(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command the shared parameters; it receives the launch they describe, before its own."""

    @with_source
    @functools.wraps(command)
    def opened(shared: dict[str, Any], **own: Any) -> int:
        return command(_open(shared), **own)

    return opened


def with_optional_model(command: Callable[..., int]) -> Callable[..., int]:
    """Like `with_model`, for a command that also runs without a name; it receives None then."""

    @functools.wraps(command)
    def opened(shared: dict[str, Any], **own: Any) -> int:
        if shared["name"] is not None:
            return command(_open(shared), **own)
        given = [name for name, value in shared.items() if value]
        if given:
            raise UsageFault(f"without a model's name nothing can be said of {', '.join(given)}")
        return command(None, **own)

    return with_optional_source(opened)


def _core_names() -> tuple[str, ...]:
    return tuple(LaunchOptions.model_fields)


def _core_flags() -> list[tuple[str, Any]]:
    types: dict[str, type] = {"int": int, "str": str}
    return [
        (
            row.name,
            Annotated[types[row.kind] | None, typer.Option(help=_sentence(row.help), show_default=False)],
        )
        for row in option_table()
    ]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _open(shared: dict[str, Any]) -> Launch:
    source = Source(shared["name"], shared["plugin"], shared["config"], shared["checkpoint"])
    core = {name: shared[name] for name in _core_names()}
    return launch(source, options=core, plugin_options=shared["set_options"])


def pairs(texts: list[str]) -> dict[str, str]:
    """Parse ``NAME=VALUE`` texts.

    Raises:
        UsageFault: naming every text that has no ``=``.
    """
    wrong = [text for text in texts if "=" not in text]
    if wrong:
        raise UsageFault(f"-O takes NAME=VALUE, not {', '.join(map(repr, wrong))}")
    return dict(text.split("=", 1) for text in texts)

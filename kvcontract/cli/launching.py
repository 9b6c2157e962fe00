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
from kvcontract.core.launch import Launch, Runtime, Source, launch

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


def with_model(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command the shared parameters; it receives `open_model`, a callable that launches.

    The wrapped function takes ``(open_model, **own parameters)``; `open_model(runtime=None)` is lazy so
    that a command can choose its runtime first.
    """

    @functools.wraps(command)
    def wrapped(**given: Any) -> int:
        shared = {name: given.pop(name) for name in (*_FIXED, *_core_names())}
        return command(functools.partial(_open, shared), **given)

    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    keyword = inspect.Parameter.KEYWORD_ONLY
    fixed = [
        inspect.Parameter(
            name, keyword, annotation=kind, default=inspect.Parameter.empty if name == "name" else None
        )
        for name, kind in _FIXED.items()
    ]
    core = [inspect.Parameter(name, keyword, annotation=kind, default=None) for name, kind in _core_flags()]
    parameters = [*fixed, *core, *(item.replace(kind=keyword) for item in own)]
    wrapped.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined] # typer reads it
    wrapped.__annotations__ = {item.name: item.annotation for item in parameters}
    return wrapped


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


def _open(shared: dict[str, Any], runtime: Runtime | None = None) -> Launch:
    source = Source(shared["name"], shared["plugin"], shared["config"], shared["checkpoint"])
    core = {name: shared[name] for name in _core_names()}
    return launch(source, options=core, plugin_options=pairs(shared["set_options"] or []), runtime=runtime)


def pairs(texts: list[str]) -> dict[str, str]:
    """Parse ``NAME=VALUE`` texts.

    Raises:
        UsageFault: naming every text that has no ``=``.
    """
    wrong = [text for text in texts if "=" not in text]
    if wrong:
        raise UsageFault(f"-O takes NAME=VALUE, not {', '.join(map(repr, wrong))}")
    return dict(text.split("=", 1) for text in texts)

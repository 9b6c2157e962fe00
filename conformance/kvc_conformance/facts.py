"""Keys of a parsed config.json by their paths, and where two declarations differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def keys_of(config: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every key whose value is no object itself."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from keys_of(value, (*path, key))
        else:
            yield (*path, key)


def without(config: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """The same without one key."""
    first, *rest = path
    if rest:
        return {**config, first: without(config[first], rest)}
    return {key: value for key, value in config.items() if key != first}


def with_value(config: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """The same with another value of one key."""
    first, *rest = path
    return {**config, first: with_value(config[first], rest, value) if rest else value}


def first_difference(one: Any, other: Any, path: str = "") -> str | None:
    """Where two documents of plain JSON differ first, as ``path: this, not that``; None: nowhere."""
    if isinstance(one, dict) and isinstance(other, dict) and list(one) == list(other):
        pairs = [(f"{path}.{key}" if path else key, one[key], other[key]) for key in one]
    elif _named(one) and _named(other) and [name for name, _ in one] == [name for name, _ in other]:
        pairs = [(f"{path}.{name}", value, dict(other)[name]) for name, value in one]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = [(f"{path}[{i}]", *pair) for i, pair in enumerate(zip(one, other, strict=True))]
    else:
        return (
            None
            if type(one) is type(other) and one == other
            else f"{path}: {_short(one)}, not {_short(other)}"
        )
    return next((found for pair in pairs if (found := first_difference(pair[1], pair[2], pair[0]))), None)


def _named(value: Any) -> bool:
    """Whether it is what axes are written as: pairs of a name and a size."""
    return isinstance(value, list) and all(
        isinstance(item, list) and [type(part) for part in item] == [str, int] for item in value
    )


def _short(value: Any) -> str:
    return f"{len(value)} of them" if isinstance(value, list) else repr(value)[:60]

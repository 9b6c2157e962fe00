"""Judge the shape of a declaration anew, for objects that went round pydantic.

`model_copy(update=...)` and `model_construct` take any value unseen, and everything downstream computes with
what they took.  Each object is validated on its own, so that a finding has its path and its author's line;
the objects themselves stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from pydantic import ValidationError

from kvcontract.contract.finding import Finding
from kvcontract.contract.model import Declared, KvModel
from kvcontract.contract.options import in_words

CLAUSE: Final = "KVC-DECL-04"
_SHOWN_CHARACTERS: Final = 80


def revalidate(model: KvModel) -> tuple[Finding, ...]:
    """Everything in a declaration that its constructors would not have taken (KVC-DECL-04)."""
    return tuple(_object(model, ""))


def _object(value: Declared, path: str) -> Iterator[Finding]:
    kind = type(value)
    if kind.__module__ != KvModel.__module__:
        message = "a subclass may loosen what the contract demands"
        yield Finding(CLAUSE, path or "kvc_model", kind.__name__, "the contract's own classes", message)
        return
    given = {name: item for name, item in vars(value).items() if name != "_where"}
    try:
        sound = kind.model_validate(given)
    except ValidationError as error:
        for item in error.errors(include_url=False):
            found = None if item["type"] == "missing" else shown(item["input"])
            words = in_words(item, f"see `kvc explain {kind.__name__}`")
            yield Finding(CLAUSE, _join(path, item["loc"]), found, words, item["msg"], value.where)
    else:
        yield from _unlike(value, given, sound, path)
    for location, part in _parts(given):
        yield from _object(part, _join(path, location))


def _unlike(value: Declared, given: dict[str, Any], sound: Declared, path: str) -> Iterator[Finding]:
    for name, item in vars(sound).items():
        ours = given.get(name, item)
        if name != "_where" and (type(ours) is not type(item) or ours != item):
            message = "it was put there past validation, by model_copy or model_construct"
            allowed = f"{type(item).__name__} {item!r}"[:_SHOWN_CHARACTERS]
            yield Finding(CLAUSE, _join(path, (name,)), shown(ours), allowed, message, value.where)


def _parts(given: dict[str, Any]) -> Iterator[tuple[tuple[str | int, ...], Declared]]:
    for name, item in given.items():
        if isinstance(item, Declared):
            yield (name,), item
        elif isinstance(item, tuple):
            yield from (((name, i), part) for i, part in enumerate(item) if isinstance(part, Declared))


def _join(path: str, location: tuple[Any, ...]) -> str:
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path


def shown(value: object) -> Any:
    """A refused value as a finding shows it: plain, or how Python writes it, cut short."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    try:
        return repr(value)[:_SHOWN_CHARACTERS]
    except Exception:  # noqa: BLE001 - whatever an unsound object's repr does, its type can be named
        return f"a {type(value).__name__}"

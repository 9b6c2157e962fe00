"""Values as Python source, laid out as formatters leave it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

WIDTH: Final = 110
_STEP: Final = 4
_SHORT: Final = 4
_LONG_RUN: Final = 3


@dataclass(frozen=True, slots=True)
class Missing:
    """A fact that is not known.

    Attributes:
        fact: its name.
        stand_in: what stands there until it is filled in.
    """

    fact: str
    stand_in: Any


def literal(value: Any, indent: int = 0, used: int = 0) -> str:
    """The source of a value that came from JSON, or of a `Missing` fact.

    Args:
        value: a mapping, a list, text, a number, true, false or null.
        indent: spaces before its lines after the first.
        used: characters of its first line that stand before it, and one for the comma after it.
    """
    if isinstance(value, Missing):
        return f"fill_in({_text(value.fact)}, {literal(value.stand_in, indent, used + len(value.fact) + 13)})"
    if isinstance(value, str):
        return _text(value)
    inner = " " * (indent + _STEP)
    if isinstance(value, Mapping):
        lines = [_line(inner, f"{_text(key)}: ", item, indent) for key, item in value.items()]
        return "{\n" + "".join(lines) + " " * indent + "}" if lines else "{}"
    if isinstance(value, list):
        short = _short(value)
        if short is not None and indent + used + len(short) <= WIDTH:
            return short
        return "[\n" + "".join(_line(inner, "", item, indent) for item in value) + " " * indent + "]"
    return repr(value)


def _line(inner: str, key: str, value: Any, indent: int) -> str:
    return f"{inner}{key}{literal(value, indent + _STEP, len(key) + 1)},\n"


def _text(value: str) -> str:
    plain = json.dumps(value, ensure_ascii=False)
    if '"' in value and "'" not in value:  # as formatters do: the quote that needs no escape
        return "'" + plain[1:-1].replace('\\"', '"') + "'"
    return plain


def _short(items: list[Any]) -> str | None:
    """A list in one line, repeated parts told once; None where it holds what has lines of its own."""
    if any(isinstance(item, Mapping | list) for item in items):
        return None
    texts = [literal(item) for item in items]
    start, period = _pattern(texts)
    if len(texts) < _SHORT or start + period == len(texts):
        return f"[{', '.join(_runs(texts))}]"
    body = f"[{', '.join(_runs(texts[start : start + period]))}] * {(len(texts) - start) // period}"
    return f"[{', '.join([*_runs(texts[:start]), f'*{body}'])}]" if start else body


def _pattern(texts: Sequence[str]) -> tuple[int, int]:
    """(items before, period): the shortest start after which the items repeat, whole, to the end."""
    total = len(texts)
    found = [
        (start, period)
        for start in range(total)
        for period in range(1, (total - start) // 2 + 1)
        if (total - start) % period == 0
        and all(texts[i] == texts[i + period] for i in range(start, total - period))
    ]
    return min(found, key=lambda pair: (sum(pair), pair[0]), default=(0, total))


def _runs(texts: Sequence[str]) -> list[str]:
    """Items in order; three or more alike become one."""
    runs = [(text, len(list(same))) for text, same in itertools.groupby(texts)]
    return [
        piece
        for text, count in runs
        for piece in ([f"*[{text}] * {count}"] if count >= _LONG_RUN else [text] * count)
    ]

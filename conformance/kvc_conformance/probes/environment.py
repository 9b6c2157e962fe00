"""Which variables of the environment somebody's code looks at."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

BETWEEN: Final = frozenset({"os", "_collections_abc", "collections.abc", __name__})
"""Modules whose frames lie between the mapping and whoever looks a variable up."""


@contextmanager
def watched(looked: set[tuple[str, str]]) -> Iterator[None]:
    """Note who looks up what, while it is open.

    Args:
        looked: takes the asking module's top package, and the variable's name.
    """
    kind: Any = type(os.environ)
    plain = kind.__getitem__

    def noted(self: Any, name: str) -> str:
        looked.add((_asking().partition(".")[0], str(name)))
        found: str = plain(self, name)
        return found

    kind.__getitem__ = noted
    try:
        yield
    finally:
        kind.__getitem__ = plain


def _asking() -> str:
    frame = sys._getframe(1)  # noqa: SLF001 - there is no other way to a caller that costs as little
    while frame.f_back is not None and frame.f_globals.get("__name__") in BETWEEN:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))

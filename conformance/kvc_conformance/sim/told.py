"""An action of a trace, in words."""

from __future__ import annotations

from collections.abc import Mapping


def told(action: Mapping[str, object]) -> str:
    """What is done, and with what."""
    rest = " ".join(f"{name}={value}" for name, value in action.items() if name != "do")
    return f"{action['do']} {rest}".strip()

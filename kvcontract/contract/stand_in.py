"""Facts that are still to be filled in, and how a plugin marks them.

A new plugin runs before its author knows everything: where a fact is missing stands a value that works.
`fill_in` marks it, and what is marked keeps the plugin from any level (KVC-DECL-11).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Final, TypeVar

from kvcontract.contract.errors import UsageFault

Value = TypeVar("Value")

_KEPT: Final = "__kvc_stand_ins__"
"""Where a module remembers its marks; they live and die with it."""


@dataclass(frozen=True, slots=True)
class StandIn:
    """One fact that is still to be filled in.

    Attributes:
        fact: what is missing, in the author's words.
        where: ``file:line`` of the mark.
    """

    fact: str
    where: str


def fill_in(fact: str, stand_in: Value) -> Value:
    """Mark a value that only stands in for a fact of the model.

    It is called where a module is imported, never in a function: so it is known at once, whatever is run.

    Args:
        fact: what is to be put there, for example a key of config.json.
        stand_in: what stands there until then.

    Returns:
        The stand-in.

    Raises:
        UsageFault: it is called in a function, or the fact has no name.
    """
    frame = sys._getframe(1)  # noqa: SLF001 - the mark belongs to the module that makes it
    faults = []
    if not isinstance(fact, str) or not fact.strip():
        faults.append(f"the first argument names the fact that is missing, not {fact!r}")
    if frame.f_code.co_name != "<module>":
        faults.append(f"it is called at the top of a module, not in {frame.f_code.co_name}")
    if faults:
        raise UsageFault(f"fill_in: {'; '.join(faults)}")
    mark = StandIn(fact, f"{frame.f_code.co_filename}:{frame.f_lineno}")
    frame.f_globals.setdefault(_KEPT, []).append(mark)
    return stand_in


def stand_ins(module: ModuleType) -> tuple[StandIn, ...]:
    """The marks of a plugin's modules, in the order of its lines."""
    package = module.__name__.partition(".")[0]
    own = [item for name, item in sorted(sys.modules.items()) if name.partition(".")[0] == package]
    return tuple(mark for item in own for mark in vars(item).get(_KEPT, ()))


def facts_of(marks: tuple[StandIn, ...]) -> str:
    """The facts that marks name, each once, in one line."""
    return ", ".join(dict.fromkeys(mark.fact for mark in marks))

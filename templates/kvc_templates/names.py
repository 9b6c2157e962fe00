"""The name of a new plugin: what it may be, and what to take instead."""

from __future__ import annotations

import itertools
import keyword
import re
import sys
import unicodedata
from importlib.machinery import PathFinder
from typing import Final

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.plugins import installed

LONGEST: Final = 40
RESERVED: Final = frozenset({"kvc", "kvcontract"})
_PREFIX: Final = "kvc_"
_SOUND: Final = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", re.ASCII)


def check_name(name: str) -> None:
    """Refuse what cannot be the name of a plugin, of its module and of its distribution.

    Raises:
        UsageFault: every reason, and a name to take instead.
    """
    faults = _faults(name)
    if faults:
        raise UsageFault(f"{name!r} is no name for a plugin: {'; '.join(faults)}; try {_instead(name)!r}")


def _faults(name: str) -> list[str]:
    faults = []
    if not _SOUND.fullmatch(name):
        faults.append("it has a-z first, then a-z, 0-9, and single _ between them")
    if len(name) > LONGEST:
        faults.append(f"it has {len(name)} characters, {LONGEST} are allowed")
    if keyword.iskeyword(name) or keyword.issoftkeyword(name):
        faults.append("it is a word of Python")
    if name in RESERVED:
        faults.append("it is the name of this project")
    elif name.startswith(_PREFIX):
        faults.append(f"the module's name begins with {_PREFIX} anyway")
    elif _imports(name):
        faults.append("a module of that name can be imported, which a plugin file would hide")
    taken = [item.dist for item in installed() if item.name == name]
    faults += [f"the distribution {dist} has a plugin of that name" for dist in taken]
    return faults


def _imports(name: str) -> bool:
    """Whether ``import name`` finds something here; nothing is imported."""
    if name in sys.stdlib_module_names:
        return True
    # On the path alone: what this process has loaded from elsewhere says nothing of others.
    return name.isidentifier() and PathFinder.find_spec(name) is not None


def _instead(name: str) -> str:
    """The nearest name without a fault."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    words = itertools.dropwhile(RESERVED.__contains__, re.findall(r"[a-z0-9]+", plain))
    near = "_".join(words)
    if not near:
        near = "my_model"
    elif near[0].isdigit():
        near = f"model_{near}"
    near = near[:LONGEST].rstrip("_")
    number, tried = 2, near
    while _faults(tried):
        tail = "_model" if number == 2 else f"_model_{number}"  # noqa: PLR2004 - the second try is unnumbered
        tried = f"{near[: LONGEST - len(tail)].rstrip('_')}{tail}"
        number += 1
    return tried

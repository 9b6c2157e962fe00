"""The one error tree.

::

    KvContractError                what every error of this package is
    ├── UsageFault                 a caller passed something that cannot be (exit 2)
    │   └── Undeclared             ... or what the declaration or executor does not offer
    ├── NotConformant              a declaration breaks clauses; carries every finding (exit 1)
    ├── MissingFacts               a config lacks what a plugin needs (exit 1; in options.py)
    ├── Refused                    a plugin refuses an option or a config (exit 1; in options.py)
    ├── PluginFault                a plugin is missing, broken or ambiguous (exit 4)
    │   ├── PluginNotFound
    │   ├── PluginLoadError
    │   ├── DuplicatePlugin
    │   └── HookQuit
    ├── EnvironmentFault           this machine lacks something (exit 3)
    │   └── MissingExtra           an optional dependency; the message says what to install
    └── InternalFault              we are wrong; please report it (exit 5)

A message says what is wrong, where, the value found, what is allowed, and what to do.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Final

from kvcontract.contract.finding import Finding

EXIT_CODES: Final[dict[int, str]] = {
    0: "conformant as asked, or done",
    1: "a clause failed, or stored records are damaged",
    2: "what was asked for cannot be read",
    3: "incomplete, something required did not run",
    4: "no such plugin, or it does not load",
    5: "our fault, please report it",
    130: "interrupted",
}
"""What the commands' exit codes mean."""


class KvContractError(Exception):
    """Base of every error raised on purpose by this package."""

    exit_code = 5


class UsageFault(KvContractError, ValueError):
    """A caller passed a value that cannot be served; the message names every fault."""

    exit_code = 2


class Undeclared(UsageFault):
    """Something was asked for that the declaration, or the executor, does not offer.

    Attributes:
        clause: that it must be refused by.
    """

    clause = "KVC-PREFIX-09"

    def __init__(self, message: str) -> None:
        super().__init__(f"{message} ({self.clause})")


class NotConformant(KvContractError):
    """A declaration breaks clauses of the contract.

    Attributes:
        findings: every violation found, in clause order.
    """

    exit_code = 1

    def __init__(self, subject: str, findings: tuple[Finding, ...]) -> None:
        self.subject = subject
        self.findings = findings
        lines = [f"{subject}: {len(findings)} finding(s)", *(f"  {finding.line()}" for finding in findings)]
        super().__init__("\n".join(lines))


class PluginFault(KvContractError):
    """A plugin is missing, broken or ambiguous."""

    exit_code = 4


class PluginNotFound(PluginFault):
    """No installed plugin has the name asked for."""


class DuplicatePlugin(PluginFault):
    """Two distributions register the same name."""


class PluginLoadError(PluginFault):
    """A plugin could not be imported or registered.

    Attributes:
        clause: the clause that the failure breaks.
        name: entry-point name.
        cause: the exception the plugin raised, if it raised one.
    """

    def __init__(self, name: str, message: str, *, clause: str, cause: BaseException | None = None) -> None:
        self.name = name
        self.clause = clause
        self.cause = cause
        super().__init__(f"plugin {name!r}: {message}")


class HookQuit(PluginFault):
    """A hook tried to end the process (``SystemExit`` and the like), which is the host's to decide."""


class EnvironmentFault(KvContractError):
    """This machine lacks something the command needs."""

    exit_code = 3


class MissingExtra(EnvironmentFault):
    """An optional dependency is not installed."""

    def __init__(self, module: str, extra: str) -> None:
        self.module = module
        self.extra = extra
        super().__init__(f"{module} is not installed; run: pip install 'kvcontract[{extra}]'")


class InternalFault(KvContractError):
    """An invariant of ours does not hold; please report it with the message."""

    exit_code = 5


def require(module: str, extra: str) -> ModuleType:
    """Import an optional dependency, or raise `MissingExtra` with its install line.

    Args:
        module: dotted name to import.
        extra: the extra of this distribution that brings it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] == module.split(".", maxsplit=1)[0]:
            raise MissingExtra(module, extra) from error
        raise

"""Which adapters are loaded, and under what identity.

An adapter changes every key and value, so it is part of the name of every page: its name and its revision
stand in the scope (D1).  A revision is the caller's word that the weights are those; a name alone gets a
number that no other load anywhere has, so that another adapter under the same name never meets old pages.
"""

from __future__ import annotations

import difflib
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from kvcontract.contract.errors import KvContractError, Undeclared, UsageFault
from kvcontract.contract.executor import Adapter, Executor, TakesAdapters
from kvcontract.contract.model import Scope
from kvcontract.core.pending import Pending


@dataclass(frozen=True, slots=True)
class Loaded:
    """An adapter that requests can name.

    Attributes:
        revision: stands in the scope of its requests.
        digest: of its content.
    """

    revision: str
    digest: str


class Adapters:
    """The adapters of one executor; changed only while no step runs, read from any thread.

    Args:
        executor: runs them, if it can.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._loaded: dict[str, Loaded] = {}
        self._digests: dict[tuple[str, str], str] = {}  # of every revision that was ever loaded

    @property
    def loaded(self) -> dict[str, Loaded]:
        """Adapters by name."""
        return dict(self._loaded)

    def taker(self) -> TakesAdapters:
        """The executor, as one that takes adapters.

        Raises:
            Undeclared: it does not.
        """
        if not isinstance(self._executor, TakesAdapters):
            raise Undeclared(f"{type(self._executor).__name__} takes no adapters (see TakesAdapters)")
        return self._executor

    def read(self, folder: Path) -> Pending[Adapter | str]:
        """Read a folder on a thread of its own: an adapter, or what is wrong with it."""
        read, found = self.taker().read_adapter, Pending[Adapter | str]()

        def work() -> None:
            try:
                found.settle(read(folder))
            except KvContractError as fault:
                found.settle(str(fault))
            except Exception as error:  # noqa: BLE001 - told to whoever loads it
                found.settle(f"{folder}: {error!r}")

        threading.Thread(target=work, name="kvc-adapter", daemon=True).start()
        return found

    def load(self, name: str, revision: str | None, adapter: Adapter) -> Loaded:
        """Let requests name an adapter.

        Args:
            name: by which they do.
            revision: of the adapter; None: a number that no other load has.
            adapter: as it was read.

        Raises:
            UsageFault: the name is taken, or the revision was of another adapter.
        """
        if name in self._loaded:
            raise UsageFault(f"adapter {name!r} is loaded; unload it first")
        made = Loaded(f"load-{uuid4().hex}" if revision is None else revision, adapter.digest)
        known = self._digests.get((name, made.revision), made.digest)
        if known != made.digest:
            raise UsageFault(
                f"adapter {name!r}: revision {revision!r} has digest {made.digest}; it was loaded with"
                f" {known} before, and pages of that may still be kept: give this one another revision"
            )
        self.taker().load_adapter(name, adapter)
        self._digests[name, made.revision] = made.digest
        self._loaded[name] = made
        return made

    def unload(self, name: str) -> Loaded:
        """Forget an adapter.

        Raises:
            UsageFault: it is not loaded.
        """
        if name not in self._loaded:
            raise UsageFault(self._unknown(name))
        self.taker().unload_adapter(name)
        return self._loaded.pop(name)

    def scoped(self, scope: Scope) -> Scope | str:
        """The scope of a request, with the revision of its adapter; or why there is none."""
        if scope.lora is None:
            if scope.lora_revision is None:
                return scope
            return f"revision {scope.lora_revision!r} of no adapter: name it in Scope.lora"
        loaded = self._loaded.get(scope.lora)
        if loaded is None:
            return self._unknown(scope.lora)
        if scope.lora_revision not in (None, loaded.revision):
            return f"adapter {scope.lora!r} is loaded as {loaded.revision!r}, not {scope.lora_revision!r}"
        return scope.model_copy(update={"lora_revision": loaded.revision})

    def _unknown(self, name: str) -> str:
        if not isinstance(self._executor, TakesAdapters):
            return f"adapter {name!r}: this executor takes none"
        near = difflib.get_close_matches(name, self._loaded, n=3)
        known: Any = near or sorted(self._loaded)
        hint = f"nearest: {', '.join(near)}" if near else f"loaded: {', '.join(known) or 'none'}"
        return f"adapter {name!r} is not loaded; {hint}"

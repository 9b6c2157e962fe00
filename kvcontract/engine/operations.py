"""What the control operations do: adapters, the reset of all that is kept, and the two switches."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvcontract.contract.errors import UsageFault
from kvcontract.core.pending import Pending, wait_until
from kvcontract.engine.adapters import Adapters
from kvcontract.engine.control import CONTROL_DEADLINE_S, Control, ControlReport, Operation
from kvcontract.pool.pool import BlockPool
from kvcontract.store.control import ResetReport

if TYPE_CHECKING:
    from kvcontract.store.store import KvStore


class Controls:
    """The control verbs of an engine.

    Each gives a report that settles once, whatever becomes of the operation, and blocks nobody.  It comes
    after what was submitted before it and before what is submitted after it.  One that cannot run until its
    deadline, or until the engine closes, has not run at all, and says so.

    Args:
        store: of the engine; None without one.
        pool: its pages.
        adapters: of its executor.
        control: the line they stand in.
    """

    def __init__(self, store: KvStore | None, pool: BlockPool, adapters: Adapters, control: Control) -> None:
        self.store = store
        self.pool = pool
        self._adapters = adapters
        self._control = control

    @property
    def adapters(self) -> dict[str, str]:
        """Revision of each loaded adapter by name, as it stands in the scope of its requests."""
        return {name: loaded.revision for name, loaded in self._adapters.loaded.items()}

    def load_adapter(
        self,
        name: str,
        folder: Path | str,
        *,
        revision: str | None = None,
        deadline_s: float = CONTROL_DEADLINE_S,
    ) -> Pending[ControlReport]:
        """Load an adapter once the engine is idle; requests name it by ``Scope(lora=name)``.

        The folder is read and judged at once, beside what runs; what is wrong with it stands in the report,
        every fault of it.

        Args:
            name: not taken by then.
            folder: of the adapter; what is in it is the executor's to say.
            revision: names its content for good, so that its pages can be found again later; None: a number
                that no other load has.
            deadline_s: longest time until it has happened.

        Raises:
            UsageFault: the executor takes no adapters, the name is empty, a deadline that is none, or the
                engine is closed.
        """
        if not name:
            raise UsageFault("an adapter has a name: its requests carry it in Scope.lora")
        _refuse_deadline(deadline_s)
        read = self._adapters.read(Path(folder))

        async def ready(operation: Operation) -> None:
            found = await wait_until(read, operation.deadline)
            if isinstance(found, str):
                raise UsageFault(found)
            await self._settled(operation)

        async def act(_: Operation) -> ControlReport:
            adapter = read.value
            if isinstance(adapter, str):
                raise UsageFault(adapter)
            loaded = self._adapters.load(name, revision, adapter)
            return ControlReport(done=True, revision=loaded.revision, digest=loaded.digest)

        return self._submit(f"load adapter {name!r}", deadline_s, ready, act)

    def unload_adapter(self, name: str, *, deadline_s: float = CONTROL_DEADLINE_S) -> Pending[ControlReport]:
        """Forget an adapter once the engine is idle; requests for it that come later are refused.

        Raises:
            UsageFault: the executor takes no adapters, a deadline that is none, or the engine is closed.
        """
        self._adapters.taker()

        async def act(_: Operation) -> ControlReport:
            gone = self._adapters.unload(name)
            return ControlReport(done=True, revision=gone.revision, digest=gone.digest)

        return self._submit(f"unload adapter {name!r}", deadline_s, self._settled, act)

    def reset(
        self, tiers: Sequence[str] | None = None, *, deadline_s: float = CONTROL_DEADLINE_S
    ) -> Pending[ControlReport]:
        """Forget everything kept once the engine is idle: on the device, and in these tiers, or in all.

        Raises:
            UsageFault: tiers are named and there is no store, a deadline that is none, or the engine is
                closed.
        """
        if tiers is not None and self.store is None:
            raise UsageFault(f"tiers {', '.join(tiers)}: this engine has no store")

        async def act(operation: Operation) -> ControlReport:
            if self.store is None:
                report = ResetReport(done=True, pages=self.pool.clear())
            else:
                report = await self.store.areset(tiers, operation.left_s)
            why = "" if report.done else "reset: the store did not become idle in time"
            return ControlReport(report.done, why, report.waited_for, reset=report)

        return self._submit("reset", deadline_s, self._settled, act)

    def set_prefix_cache(self, on: bool, *, deadline_s: float = CONTROL_DEADLINE_S) -> Pending[ControlReport]:
        """Switch prefix caching.  Needs no idleness: what was submitted before resolves as it was.

        Raises:
            UsageFault: there is no store, a deadline that is none, or the engine is closed.
        """
        return self._switch("set prefix cache", lambda store: store.set_prefix_cache(on), deadline_s)

    def set_retention(self, on: bool, *, deadline_s: float = CONTROL_DEADLINE_S) -> Pending[ControlReport]:
        """Switch whether the device keeps released pages.  Needs no idleness, like `set_prefix_cache`.

        Raises:
            UsageFault: there is no store, a deadline that is none, or the engine is closed.
        """
        return self._switch("set retention", lambda store: store.set_retention(on), deadline_s)

    def _switch(
        self, name: str, flip: Callable[[KvStore], object], deadline_s: float
    ) -> Pending[ControlReport]:
        """Waiting for idleness would stall new requests behind old ones, and protect nothing."""
        store = self.store
        if store is None:
            raise UsageFault(f"{name}: this engine has no store, so it reuses nothing")

        async def ready(_: Operation) -> None:
            # A round through the store's loop: the resolves that were sent there before have begun by then,
            # and finish under the setting that they found.
            await store.flush_loads(0.0)

        async def act(_: Operation) -> ControlReport:
            flip(store)
            return ControlReport(done=True)

        return self._submit(name, deadline_s, ready, act, idle=False)

    def _submit(
        self,
        name: str,
        deadline_s: float,
        ready: Callable[[Operation], Awaitable[object]],
        act: Callable[[Operation], Awaitable[ControlReport]],
        *,
        idle: bool = True,
    ) -> Pending[ControlReport]:
        _refuse_deadline(deadline_s)
        operation = Operation(name, time.monotonic() + deadline_s, ready, act, idle)
        if not self._control.submit(operation):
            raise UsageFault("the engine is closed: it takes no more work")
        return operation.report

    async def _settled(self, operation: Operation) -> None:
        """Wait for all saves and loads; with the engine idle, none comes after."""
        if self.store is None:
            return
        # Whether tiers could flush does not matter: what was submitted has ended.
        await self.store.flush_saves("landed", operation.left_s)
        await self.store.flush_loads(operation.left_s)
        if not operation.left_s:
            raise TimeoutError


def _refuse_deadline(deadline_s: float) -> None:
    if not deadline_s >= 0:
        raise UsageFault(f"deadline_s {deadline_s}: expected a number of seconds, 0 or more")

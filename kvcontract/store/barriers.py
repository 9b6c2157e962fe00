"""Barriers over saves: landed, visible, durable; each covers everything that was submitted before it (C8).

Barriers are ordered: one asks the tiers only after those before it have been answered, also if their waiter
went away.  What an earlier one has drained is thereby covered by the later one, and nobody is told sooner
than somebody who asked first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvcontract.core.pending import Pending, all_of, wait_until
from kvcontract.tiers.base import Clock, Level, Tier


class Barriers:
    """The barriers of one store; on its loop.

    Args:
        tiers: all of them.
        submitted: gives what has to settle first, as it is when a barrier is asked for.
        clock: what deadlines are measured on.
    """

    def __init__(
        self, tiers: Sequence[Tier], submitted: Callable[[], Sequence[Pending[Any]]], clock: Clock
    ) -> None:
        self._tiers = tuple(tiers)
        self._submitted = submitted
        self._clock = clock
        self._last: Pending[None] = Pending.of(None)

    def ask(self, level: Level, deadline: float) -> Pending[bool]:
        """A barrier, ordered from this call on; settles, when all is answered, with whether it was reached.

        `durable` asks the tiers that outlive the process; without one it cannot be reached.
        """
        before, self._last = self._last, Pending()
        mine, answer = self._last, Pending[bool]()
        tiers = [tier for tier in self._tiers if level != "durable" or tier.capabilities.persistent]

        def flush(_: object) -> None:
            if self._clock() > deadline:  # A9: whoever asked has been told
                end((False,))
                return
            all_of([tier.flush(level, deadline) for tier in tiers]).on_done(end)

        def end(reached: tuple[bool, ...]) -> None:
            answer.settle(all(reached) and (bool(tiers) or level != "durable"))
            mine.settle(None)

        all_of([before, *self._submitted()]).on_done(flush)
        return answer


async def reached(answer: Pending[bool], deadline: float) -> bool:
    """Wait for a barrier; False at the deadline."""
    try:
        return await wait_until(answer, deadline)
    except TimeoutError:
        return False

"""Waiting for room on a rank: in order of arrival, woken by releases, one at a time (A19).

Whoever needs room that is not there joins the end of a line and holds nothing while it waits (R6).  Only the
head is woken; it keeps its turn until it has what it needs or gives up, so a big waiter is not starved by
small ones that come later.  Admission passes all of them: it is authoritative, a restore takes what is left.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turn:
    """A place in the line of one rank; a resolve has at most one."""

    __slots__ = ("event", "rank")

    def __init__(self, rank: str) -> None:
        self.rank = rank
        self.event = asyncio.Event()


class Lines:
    """The lines of all ranks; on the store's loop, apart from `awaited`."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[Turn]] = {}

    def awaited(self, rank: str) -> bool:
        """Whether somebody waits for room on a rank; from any thread."""
        return bool(self._lines.get(rank))

    def may_take(self, rank: str, turn: Turn | None = None) -> bool:
        """Whether nobody stands before whoever has this turn, or none."""
        line = self._lines.get(rank)
        return not line or line[0] is turn

    def join(self, rank: str) -> Turn:
        """A turn at the end of the line."""
        turn = Turn(rank)
        self._lines.setdefault(rank, deque()).append(turn)
        return turn

    def leave(self, turn: Turn) -> None:
        """Give a turn up; the next one may look whether it fits."""
        self._lines[turn.rank].remove(turn)
        self.came_back(turn.rank)

    def came_back(self, rank: str) -> None:
        """Pages of a rank may have come back: wake the head."""
        line = self._lines.get(rank)
        if line:
            line[0].event.set()

    @property
    def waiting(self) -> int:
        """Resolves that wait for room."""
        return sum(len(line) for line in self._lines.values())

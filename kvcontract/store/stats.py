"""Counters and gauges of a store (I6): every operation ends in exactly one of them (R8)."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Literal

Direction = Literal["load", "save"]


@dataclass(frozen=True, slots=True)
class Moved:
    """What went one way between the device and one tier.

    Attributes:
        operations: that settled.
        pages: that arrived whole.
        record_bytes: of those pages, frames included, over all workers.
        seconds: that the operations took, added up; they overlap.
    """

    operations: int = 0
    pages: int = 0
    record_bytes: int = 0
    seconds: float = 0.0

    @property
    def bytes_per_s(self) -> float | None:
        """Mean speed of one operation; None before anything was measured."""
        return self.record_bytes / self.seconds if self.seconds > 0 and self.record_bytes else None


@dataclass(frozen=True, slots=True)
class StoreStats:
    """One consistent reading.

    Attributes:
        counters: monotonic counts, e.g. ``resolves``, ``loads_abandoned``, ``pages_saved``.
        hit_tokens: tokens by source: ``device``, a tier's name, or ``computed``; together the prompts.
        degraded: why hits were shorter than they might have been.
        gauges: what is open now; all 0 when idle.
        moved: by tier, then by direction, ``load`` or ``save``.
    """

    counters: dict[str, int]
    hit_tokens: dict[str, int]
    degraded: dict[str, int]
    gauges: dict[str, int]
    moved: dict[str, dict[Direction, Moved]] = field(default_factory=dict)


class Tally:
    """Thread-safe counters."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: Counter[str] = Counter()
        self._hit_tokens: Counter[str] = Counter()
        self._degraded: Counter[str] = Counter()
        self._moved: dict[tuple[str, Direction], Moved] = {}

    def count(self, name: str, by: int = 1) -> None:
        """Raise a counter."""
        with self._lock:
            self._counters[name] += by

    def hit(self, source: str, tokens: int) -> None:
        """Count tokens of a prompt by source."""
        with self._lock:
            self._hit_tokens[source] += tokens

    def degrade(self, reason: str) -> None:
        """Count a reason for a shorter hit (R4)."""
        with self._lock:
            self._degraded[reason] += 1

    def moved(self, tier: str, direction: Direction, pages: int, record_bytes: int, seconds: float) -> None:
        """Count what an operation has moved."""
        with self._lock:
            old = self._moved.get((tier, direction), Moved())
            self._moved[tier, direction] = replace(
                old,
                operations=old.operations + 1,
                pages=old.pages + pages,
                record_bytes=old.record_bytes + record_bytes,
                seconds=old.seconds + seconds,
            )

    def speed(self, tier: str, direction: Direction, *, above_bytes: int) -> float | None:
        """Measured bytes a second; None before that much was moved."""
        with self._lock:
            found = self._moved.get((tier, direction), Moved())
        return found.bytes_per_s if found.record_bytes >= above_bytes else None

    def read(self, gauges: dict[str, int]) -> StoreStats:
        """All of it at one moment, with these gauges."""
        with self._lock:
            moved: dict[str, dict[Direction, Moved]] = {}
            for (tier, direction), found in self._moved.items():
                moved.setdefault(tier, {})[direction] = found
            return StoreStats(
                dict(self._counters), dict(self._hit_tokens), dict(self._degraded), gauges, moved
            )

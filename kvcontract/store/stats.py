"""Counters and gauges of a store (I6): every operation ends in exactly one of them (R8)."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreStats:
    """One consistent reading.

    Attributes:
        counters: monotonic counts, e.g. ``resolves``, ``loads_abandoned``, ``pages_saved``.
        hit_tokens: tokens by source: ``device``, a tier's name, or ``computed``; together the prompts.
        degraded: why hits were shorter than they might have been.
        gauges: what is open now; all 0 when idle.
    """

    counters: dict[str, int]
    hit_tokens: dict[str, int]
    degraded: dict[str, int]
    gauges: dict[str, int]


class Tally:
    """Thread-safe counters."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: Counter[str] = Counter()
        self._hit_tokens: Counter[str] = Counter()
        self._degraded: Counter[str] = Counter()
        self._gauges: Counter[str] = Counter()

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

    def gauge(self, name: str, by: int) -> None:
        """Move a gauge."""
        with self._lock:
            self._gauges[name] += by

    def read(self, **more: int) -> StoreStats:
        """All of it at one moment, with further gauges."""
        with self._lock:
            gauges = {**self._gauges, **more}
            return StoreStats(dict(self._counters), dict(self._hit_tokens), dict(self._degraded), gauges)

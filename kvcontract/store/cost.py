"""Restore or recompute: whichever is sooner, once there are figures to tell by (A21).

Off until calibrated or given figures; a full-hit resolve restores whatever it costs, since nothing may be
recomputed there.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from kvcontract.contract.errors import UsageFault
from kvcontract.store.stats import Tally

MIN_MEASURED_BYTES: Final = 64 * 2**20
"""A tier's speed is believed once this much was loaded from it."""


@dataclass(frozen=True, slots=True)
class CostFigures:
    """What is known of a machine.

    Attributes:
        prefill_tokens_per_s: how fast prompts are computed; None: measured (`KvStore.computed`).
        tier_bytes_per_s: how fast each tier is read, by its name; a missing one is measured.
        tier_setup_s: what a restore from a tier takes before its first byte, by its name.
    """

    prefill_tokens_per_s: float | None = None
    tier_bytes_per_s: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    tier_setup_s: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        named = {f"tier_bytes_per_s[{name!r}]": value for name, value in self.tier_bytes_per_s.items()}
        if self.prefill_tokens_per_s is not None:
            named["prefill_tokens_per_s"] = self.prefill_tokens_per_s
        wrong = [f"{name} is {value}" for name, value in named.items() if not value > 0]
        wrong += [
            f"tier_setup_s[{name!r}] is {value}" for name, value in self.tier_setup_s.items() if value < 0
        ]
        if wrong:
            raise UsageFault(f"{'; '.join(wrong)}; speeds are above 0, times not below")


class CostModel:
    """Judges restores by given figures, and by what was measured where none is given.

    Args:
        figures: None: off.
        tally: what tiers were measured to do.
    """

    def __init__(self, figures: CostFigures | None, tally: Tally) -> None:
        self.figures = figures
        self._tally = tally
        self._lock = threading.Lock()
        self._tokens = 0
        self._seconds = 0.0

    def computed(self, tokens: int, seconds: float) -> None:
        """An executor has prefilled so many tokens in that time."""
        with self._lock:
            self._tokens += tokens
            self._seconds += seconds

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Given, else measured, else None."""
        if self.figures is not None and self.figures.prefill_tokens_per_s is not None:
            return self.figures.prefill_tokens_per_s
        with self._lock:
            return self._tokens / self._seconds if self._seconds > 0 and self._tokens else None

    def restore_s(self, tier: str, record_bytes: int) -> float | None:
        """How long a restore takes; None if that is not known."""
        if self.figures is None:
            return None
        speed = self.figures.tier_bytes_per_s.get(tier) or self._tally.speed(
            tier, "load", above_bytes=MIN_MEASURED_BYTES
        )
        return None if speed is None else self.figures.tier_setup_s.get(tier, 0.0) + record_bytes / speed

    def worth(self, tier: str, tokens: int, record_bytes: int) -> bool:
        """Whether restoring is expected to be sooner than recomputing; yes where nothing is known."""
        restore, speed = self.restore_s(tier, record_bytes), self.prefill_tokens_per_s
        return restore is None or speed is None or restore < tokens / speed

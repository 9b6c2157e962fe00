"""What a caller may ask of a resolve, and what it gets: policy in, prefix out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from kvcontract.contract.errors import UsageFault
from kvcontract.pool.handles import Hold

DEVICE: Final = "device"
"""The source of pages that were resident already."""


@dataclass(frozen=True, slots=True)
class ResolvePolicy:
    """How far a resolve goes.

    Attributes:
        deadline_s: longest time the whole resolve may take, waits of every kind included (A1, A20).
        full_hit: a miss or a partial hit means "not landed yet": ask again until the deadline (A7).
        full_pages: a prompt may be covered entirely; otherwise one token stays to compute (A12).

    Raises:
        UsageFault: a deadline that is no number of seconds.
    """

    deadline_s: float = 15.0
    full_hit: bool = False
    full_pages: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.deadline_s, int | float) or not self.deadline_s >= 0:
            raise UsageFault(f"deadline_s {self.deadline_s!r}: expected a number of seconds, 0 or more")


PLAIN: Final = ResolvePolicy()


@dataclass(frozen=True, slots=True)
class KvPrefix:
    """A resident prefix, passed by value: `RequestKv.start` or `admit` consumes it.

    Attributes:
        rank: the rank whose pool holds it (A26).
        hit_tokens: its length; the hold pins exactly its pages (A13).
        valid_tokens: per group, the tokens whose state is valid.
        hold: pins the pages; None where there is nothing to pin.
        sources: tokens by where they came from: `device`, or a tier's name (I6).
        degraded: why the hit is shorter than it might be; empty if nothing went wrong.
    """

    rank: str
    hit_tokens: int
    valid_tokens: Mapping[str, int]
    hold: Hold | None
    sources: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    degraded: tuple[str, ...] = ()

    @classmethod
    def none(cls, rank: str = "") -> KvPrefix:
        """No prefix: lets an engine without a store run the same code."""
        return cls(rank, 0, MappingProxyType({}), None)

    def release(self) -> None:
        """Give the pages back unconsumed; doing so again does nothing."""
        if self.hold is not None and self.hold.live:
            self.hold.release()

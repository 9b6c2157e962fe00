"""What waits on the way from one tier to the next, and what is being copied there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from kvcontract.core.pending import Pending
from kvcontract.pool.index import Keys, Pages
from kvcontract.store.known import Known
from kvcontract.store.marks import Generations
from kvcontract.store.rank import Berth
from kvcontract.store.saves import Run
from kvcontract.store.tier_policy import TierPolicy
from kvcontract.tiers.base import Code, Codes, Lease


@dataclass(slots=True, eq=False)
class Relay:
    """Some records of one run on their way to one tier.

    Attributes:
        numbers: int64[n], which records of the run.
        pages: int32[n], where the last page of each lay; what lies there now may be something else.
        generations: uint32[n], of the occupants those had.
        keys: uint64[n, 2].
        codes: u8[n].
        left: how many have not ended.
        done: settles with the codes when all have.
    """

    rank: Berth
    run: Run
    numbers: Any
    pages: Pages
    generations: Generations
    keys: Keys
    codes: Codes = field(init=False)
    left: int = field(init=False)
    done: Pending[Codes] = field(default_factory=Pending)

    def __post_init__(self) -> None:
        self.codes = np.full(len(self.keys), Code.FAILED, np.uint8)
        self.left = len(self.keys)


Item = tuple[Relay, int]
"""A relay and a row of it."""


@dataclass(slots=True, eq=False)
class Hop:
    """From one tier to the next.

    Attributes:
        expected: by name, records on their way to the source.
        queue: those that are there.
        names: of all that have not ended.
        batch: those that are being copied.
        lease: on them, while they are being read.
        driving: somebody looks for the next batch.
    """

    number: int
    source: Known
    target: Known
    policy: TierPolicy
    buffer_bytes: int
    expected: dict[bytes, Item] = field(default_factory=dict)
    queue: deque[Item] = field(default_factory=deque)
    names: dict[bytes, None] = field(default_factory=dict)
    batch: list[Item] = field(default_factory=list)
    lease: Lease | None = None
    driving: bool = False
    memory: Any = None

    def buffer(self) -> Any:
        """Memory of a batch; made when first needed, kept from then on."""
        if self.memory is None:
            self.memory = np.empty(self.buffer_bytes, np.uint8)
        return self.memory


def keys_of(items: Sequence[Item]) -> Keys:
    """Their keys, uint64[n, 2]."""
    keys: Keys = np.stack([relay.keys[row] for relay, row in items])
    return keys


def by_relay(items: Sequence[Item]) -> Iterator[tuple[Relay, Any]]:
    """Runs of items of one relay: it, and its rows int64[n]."""
    for _, run in groupby(items, key=lambda item: id(item[0])):
        found = list(run)
        yield found[0][0], np.array([row for _, row in found], np.int64)

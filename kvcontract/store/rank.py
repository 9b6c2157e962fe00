"""A rank: one scheduler with one pool, one index and its workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvcontract.contract.errors import UsageFault
from kvcontract.memory.binding import Binding
from kvcontract.pool.index import Pages
from kvcontract.pool.pool import BlockPool
from kvcontract.pool.side import SidePool


class Blocks(Protocol):
    """What a save needs of a pool."""

    @property
    def pages(self) -> int:
        """Of the arenas, block 0 included."""
        ...

    @property
    def total(self) -> int:
        """Usable ones."""
        ...

    @property
    def generation(self) -> NDArray[np.uint32]:
        """uint32 [pages], raised each time a block gets a new occupant."""
        ...

    def pin(self, pages: Pages) -> None:
        """See `Guards.pin`."""
        ...

    def unpin(self, pages: Pages) -> None:
        """See `Guards.unpin`."""
        ...


class Berth(Protocol):
    """A rank, as far as one part is concerned: where the part's blocks are."""

    @property
    def name(self) -> str:
        """Of the rank."""
        ...

    @property
    def pool(self) -> Blocks:
        """Of the part's space."""
        ...


@dataclass(frozen=True, slots=True)
class SideBerth:
    """A rank, as far as one space beside the full pages is concerned.

    Attributes:
        name: of the rank.
        pool: of the space.
    """

    name: str
    pool: SidePool


class Rank:
    """What a store serves.

    Args:
        pool: the pages.
        bindings: the memory of each block-id space, by its key; with several workers one mapping for each,
            laid out for that worker.
        name: unique within the store.
        tp: workers that the model is cut over; None: as many as there are mappings.

    Attributes:
        memory: one mapping a worker.

    Raises:
        UsageFault: not one mapping for each worker.
    """

    def __init__(
        self,
        pool: BlockPool,
        bindings: Mapping[str, Binding] | Sequence[Mapping[str, Binding]],
        *,
        name: str = "0",
        tp: int | None = None,
    ) -> None:
        given = [bindings] if isinstance(bindings, Mapping) else list(bindings)
        self.name = name
        self.pool = pool
        self.memory = tuple(dict(item) for item in given)
        self.tp = len(given) if tp is None else tp
        if not given or self.tp != len(given):
            raise UsageFault(
                f"rank {name!r}: memory of {len(given)} workers for tp {self.tp}; give one mapping for each"
            )

    @property
    def bindings(self) -> dict[str, Binding]:
        """The memory of the first worker."""
        return self.memory[0]

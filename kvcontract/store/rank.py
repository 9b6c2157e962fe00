"""A rank: one scheduler with one pool, one index and its workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvcontract.contract.errors import UsageFault
from kvcontract.memory.binding import Binding
from kvcontract.pool.pool import BlockPool


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

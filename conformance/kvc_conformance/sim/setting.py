"""What a simulated world is made of, drawn from its seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any, Final, Self

from kvc_conformance.sim.spaces import Space

AMPLE: Final = 0
"""Capacity of a tier in which nothing is ever evicted."""


TWO_STORES: Final = 0.3
TWO_RANKS: Final = 0.2
PRIVATE_TIER: Final = 0.7
MIDDLE_TIER: Final = 0.15
SHARED_TIER: Final = 0.5
WRITTEN_BACK: Final = 0.4
LIMITED: Final = 0.25
TELLING: Final = 0.7
ROOMY: Final = 0.7
BY_SCHEDULE: Final = 0.5
DEFERRED: Final = 0.4
"""Shares of the worlds that are so."""

STEP_TOKENS: Final = (3, 9)
"""Most tokens of a step, from, to."""

SPARE_BLOCKS: Final = (0, 1, 2, 4, 8)
SPARE_SLOTS: Final = (0, 0, 1, 1, 2, 4)
"""Blocks of a space above the fewest that can serve one request and one prefix."""


@dataclass(frozen=True, slots=True)
class TierSetting:
    """One tier.

    Attributes:
        name: unique in its world.
        shared: all stores see it, and it outlives them; else each has its own.
        telling: it says what it loses, and can forget.
        pages: records of how many pages it takes; `AMPLE` for any number.
        back: it is written back from the tier above.
        load_s: longest time a look-up or load may take; 0: until the resolve's deadline.
        saving: most pages on their way there; 0: any number.
    """

    name: str
    shared: bool
    telling: bool
    pages: int
    back: bool
    load_s: float
    saving: int


@dataclass(frozen=True, slots=True)
class Setting:
    """One world.

    Attributes:
        degrees: of tensor parallelism, of each store.
        ranks: of each store.
        pages: of each pool, page 0 included.
        manual: copies are run by the schedule too, instead of at once.
        deferred: copies inside a device are done when a step, or who waits for them, needs them.
        save_budget: see `StoreOptions`.
        tiers: fastest first.
        step_tokens: most of one step, where there are windows.
        blocks: of each space beside the full pages, block 0 included.
    """

    degrees: tuple[int, ...]
    ranks: int
    pages: int
    manual: bool
    save_budget: float
    tiers: tuple[TierSetting, ...]
    step_tokens: int = STEP_TOKENS[1]
    blocks: Mapping[str, int] = field(default_factory=dict)
    deferred: bool = False

    @classmethod
    def draw(cls, rng: Random, degrees: tuple[int, ...], spaces: Sequence[Space] = ()) -> Self:
        """A world.

        Args:
            rng: all randomness comes from it.
            degrees: those that the model can be cut to.
            spaces: beside the full pages.
        """
        stores = 2 if rng.random() < TWO_STORES else 1
        chosen = tuple(rng.choice(degrees) for _ in range(stores))
        tiers = []
        if rng.random() < PRIVATE_TIER:
            tiers.append(_tier(rng, "dram", shared=False, telling=True, top=True))
            if rng.random() < MIDDLE_TIER:
                tiers.append(_tier(rng, "disk", shared=False, telling=True, top=False))
        if stores > 1 or not tiers or rng.random() < SHARED_TIER:
            telling = rng.random() < TELLING
            tiers.append(_tier(rng, "far", shared=True, telling=telling, top=not tiers))
        step = rng.randint(*STEP_TOKENS)
        return cls(
            degrees=chosen,
            ranks=2 if rng.random() < TWO_RANKS else 1,
            pages=rng.randint(8, 18),
            manual=rng.random() < BY_SCHEDULE,
            save_budget=rng.choice((0.25, 0.5, 1.0)),
            tiers=tuple(tiers),
            step_tokens=step,
            blocks={
                space.key: space.least_blocks(step)
                + rng.choice(SPARE_BLOCKS if space.group is None else SPARE_SLOTS)
                for space in spaces
            },
            deferred=rng.random() < DEFERRED,
        )

    def as_json(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)

    @classmethod
    def of_json(cls, given: dict[str, Any]) -> Self:
        """Back from `as_json`."""
        tiers = tuple(TierSetting(**item) for item in given["tiers"])
        return cls(**{**given, "degrees": tuple(given["degrees"]), "tiers": tiers})


def _tier(rng: Random, name: str, *, shared: bool, telling: bool, top: bool) -> TierSetting:
    return TierSetting(
        name,
        shared=shared,
        telling=telling,
        pages=_capacity(rng),
        back=not top and rng.random() < WRITTEN_BACK,
        load_s=rng.choice((0.2, 5.0)) if rng.random() < LIMITED else 0.0,
        saving=rng.randint(1, 6) if rng.random() < LIMITED else 0,
    )


def _capacity(rng: Random) -> int:
    return AMPLE if rng.random() < ROOMY else rng.randint(4, 10)

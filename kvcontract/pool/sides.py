"""What a rank keeps beside the chain of full pages: pools of windowed pages, and slabs of slots.

`Windowed` and `Slotted` join a pool of blocks with the rule of its groups: what a request may own of it at
one time, and what must be resident at a boundary for a prefix to be continued from there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.layout import space_key
from kvcontract.contract.model import Chunk, Full, Group, KvModel, Window
from kvcontract.contract.snapshot import kept_key, ring_rows
from kvcontract.pool.side import Flags, SidePool

Boundaries = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Windowed:
    """Pages of which a request keeps the latest: groups of one windowed or chunked reach.

    Attributes:
        pool: their blocks.
        reach: which past tokens are read.
        max_step_tokens: most tokens of one step.
        record_pages: pages that are saved, and so kept, together.
    """

    pool: SidePool
    reach: Window | Chunk
    max_step_tokens: int
    record_pages: int = 1

    @property
    def key(self) -> str:
        """Of the space."""
        return self.pool.key

    @property
    def index(self) -> SidePool:
        """Where what others can go on from is found."""
        return self.pool

    @property
    def sink_pages(self) -> int:
        """Pages at the beginning that are read for ever."""
        sink = self.reach.sink_tokens if isinstance(self.reach, Window) else 0
        return -(-sink // (self.pool.page_tokens * self.record_pages)) * self.record_pages

    def lifetime(self, pages: int) -> int:
        """The most blocks that a request of so many pages owns at one time.

        Behind a frontier of any alignment lie ``tokens - 1`` tokens that are read, before it those of a step.
        """
        size = self.pool.page_tokens
        most = -(-(self.reach.tokens - 1 + self.max_step_tokens) // size) + 1
        return min(pages, most + self.record_pages - 1 + self.sink_pages)

    def first(self, tokens: Boundaries) -> Boundaries:
        """Number of the first page, after the sink pages, that is read beyond each boundary."""
        if isinstance(self.reach, Window):
            reads = np.maximum(0, tokens - (self.reach.tokens - 1))
        else:
            reads = tokens // self.reach.tokens * self.reach.tokens
        step = self.pool.page_tokens * self.record_pages
        return reads // step * self.record_pages

    def needed(self, pages: int) -> npt.NDArray[np.int64]:
        """Numbers of the pages that must be there at a boundary of so many pages, int64[n]."""
        first = int(self.first(np.array([pages * self.pool.page_tokens]))[0])
        return np.concatenate([np.arange(min(self.sink_pages, first)), np.arange(first, pages)])

    def covered(self, present: Flags) -> Flags:
        """At which boundaries of 0 to n pages all that is needed is there.

        Args:
            present: bool [n], which pages are.

        Returns:
            bool [n + 1].
        """
        pages = np.arange(len(present) + 1)
        holes = np.concatenate([[0], np.cumsum(~present)])
        first = np.minimum(self.first(pages * self.pool.page_tokens), pages)
        sink = np.minimum(self.sink_pages, first)
        found: Flags = (holes[pages] == holes[first]) & (holes[sink] == 0)
        return found


@dataclass(frozen=True, slots=True)
class Slotted:
    """Slots of one bounded group: a live one a request, the others snapshots.

    Attributes:
        pool: their blocks.
        group: name of the group.
        boundary_tokens: snapshots are taken at multiples of this.
        stored: whether there are snapshots at all.
        narrow: what is kept, in blocks of its own, where that has another form than the live slots.
        window: of a ring, which is kept in pages: the rule of those.
        ring_pages: of a ring, how many pages its rows are.
    """

    pool: SidePool
    group: str
    boundary_tokens: int = 1
    stored: bool = True
    narrow: SidePool | None = None
    window: Windowed | None = None
    ring_pages: int = 1

    @property
    def key(self) -> str:
        """Of the space."""
        return self.pool.key

    @property
    def index(self) -> SidePool:
        """Where snapshots are found."""
        return self.pool if self.narrow is None else self.narrow

    def lifetime(self, pages: int) -> int:
        """One, however long."""
        return min(pages, 1)

    def needed(self, pages: int) -> npt.NDArray[np.int64]:
        """Of all snapshots the one at the boundary, named like the page before it; of a ring, its pages."""
        if self.window is not None:
            return self.window.needed(pages)
        return np.arange(max(0, pages - 1), pages) if self.stored else np.arange(0)

    def covered(self, present: Flags) -> Flags:
        """As `Windowed.covered`; `present`: at the end of which pages there is a snapshot."""
        if self.window is not None:
            return self.window.covered(present)
        return np.concatenate([[True], present]) if self.stored else np.ones(len(present) + 1, np.bool_)


Side = Windowed | Slotted


@dataclass(frozen=True, slots=True)
class Sides:
    """All of one rank.

    Attributes:
        windows: in the order of the declaration.
        slots: likewise.
        granule_tokens: checkpoints lie at multiples of this.
    """

    windows: tuple[Windowed, ...] = ()
    slots: tuple[Slotted, ...] = ()
    granule_tokens: int = 1

    def __iter__(self) -> Iterator[Side]:
        return iter((*self.windows, *self.slots))

    def __bool__(self) -> bool:
        return bool(self.windows or self.slots)

    @property
    def pools(self) -> tuple[SidePool, ...]:
        """Of every space."""
        found = [pool for side in self for pool in (side.pool, side.index)]
        return tuple(dict.fromkeys(found))

    @property
    def max_step_tokens(self) -> int | None:
        """Most tokens of one step of a request; None: any number."""
        return min((window.max_step_tokens for window in self.windows), default=None)


NO_SIDES = Sides()


def make_sides(
    model: KvModel, blocks: Mapping[str, int], max_step_tokens: int, *, retention: bool = True
) -> Sides:
    """The pools that a declaration asks for beside that of its full pages.

    Args:
        model: the declaration.
        blocks: of each other space, by its key, block 0 included.
        max_step_tokens: most tokens of one step of a request.
        retention: keep released blocks for reuse.

    Raises:
        UsageFault: sizes are missing, or too small for one request and one snapshot; all are named, with the
            number needed (F6, F8).
    """
    windows, slots, least = [], [], dict[str, int]()
    for group in model.groups:
        key = space_key(group)
        if key in least or (group.kind == "paged" and isinstance(group.reach, Full)):
            continue
        pool = SidePool(key, max(2, blocks.get(key, 0)), model.page_tokens, retention=retention)
        if group.kind == "bounded" or isinstance(group.reach, Full):
            slots.append(_slotted(model, group, pool, blocks, least, retention=retention))
        else:
            windows.append(Windowed(pool, group.reach, max_step_tokens, model.record_pages))
            least[key] = windows[-1].lifetime(2**62) + 1
    faults = [
        f"{blocks.get(key, 0)} blocks in {key}: expected at least {count} (block 0 is padding), or nothing"
        " could ever be reused"
        for key, count in least.items()
        if blocks.get(key, 0) < count
    ]
    if faults:
        raise UsageFault("; ".join(faults))
    return Sides(tuple(windows), tuple(slots), granule_tokens(model))


def _slotted(
    model: KvModel,
    group: Group,
    pool: SidePool,
    blocks: Mapping[str, int],
    least: dict[str, int],
    *,
    retention: bool,
) -> Slotted:
    """The slots of a bounded group; what it needs at least is noted by space."""
    stored, boundary = group.restore == "stored" and model.prefix_caching, group.boundary_tokens or 1
    key = kept_key(group)
    if not stored or key == pool.key:
        least[pool.key] = 3 if stored else 2
        return Slotted(pool, group.name, boundary, stored)
    kept = SidePool(key, max(2, blocks.get(key, 0)), model.page_tokens, retention=retention)
    least[pool.key] = least[key] = 2
    if isinstance(group.reach, Window):
        window = Windowed(kept, group.reach, 0, model.record_pages)
        least[key] = window.lifetime(2**62) + 1
        pages = ring_rows(model, group) // model.page_tokens
        return Slotted(pool, group.name, boundary, stored, kept, window, pages)
    return Slotted(pool, group.name, boundary, stored, kept)


def granule_tokens(model: KvModel) -> int:
    """Checkpoints lie at multiples of this: where records are whole and every bounded state may be taken."""
    return math.lcm(model.record_tokens, *(group.boundary_tokens or 1 for group in model.groups))

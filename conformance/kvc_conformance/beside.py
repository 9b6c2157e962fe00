"""What a declaration keeps beside its full pages, worked out from the declaration alone.

The store's checks compare with this: which pages a hit must hold in each space, where it may end at all.  It
shares no code with the runtime; spans and pages are counted one by one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvcontract.contract.layout import space_key
from kvcontract.contract.model import Chunk, KvModel, Window


@dataclass(frozen=True, slots=True)
class Beside:
    """The rules of one declaration.

    Attributes:
        page_tokens: tokens of a page.
        record_pages: pages that are saved together.
        granule_tokens: hits on the device end at multiples of this.
        stored_tokens: hits from a tier do.
        windows: reach of each windowed or chunked space, by its key.
        slots: names of the bounded groups that are stored.
    """

    page_tokens: int
    record_pages: int
    granule_tokens: int
    stored_tokens: int
    windows: dict[str, Window | Chunk]
    slots: tuple[str, ...]

    @classmethod
    def of(cls, model: KvModel) -> Beside:
        """Of a declaration."""
        windows = {
            space_key(group): group.reach
            for group in model.groups
            if group.kind == "paged" and isinstance(group.reach, Window | Chunk)
        }
        bounded = [group for group in model.groups if group.kind == "bounded"]
        record = model.record_tokens
        stored = math.lcm(record, *(group.boundary_tokens or 1 for group in bounded))
        granule = stored if windows or bounded else model.page_tokens
        names = tuple(group.name for group in bounded if group.restore == "stored")
        return cls(model.page_tokens, record // model.page_tokens, granule, stored, windows, names)

    def __bool__(self) -> bool:
        return bool(self.windows or self.slots)

    def floor(self, tokens: int) -> int:
        """Where a hit on the device ends that could be so long."""
        return tokens // self.granule_tokens * self.granule_tokens

    def stored_floor(self, tokens: int) -> int:
        """Where a hit from a tier does."""
        return tokens // self.stored_tokens * self.stored_tokens

    def stops(self, tokens: int) -> list[int]:
        """Every position of a prompt that can be a checkpoint; none, where pages are all there is."""
        return list(range(self.granule_tokens, tokens + 1, self.granule_tokens)) if self else []

    def needed(self, key: str, boundary: int) -> list[int]:
        """Numbers of the pages of a windowed space without which nobody goes on from a boundary."""
        read = {
            position // (self.page_tokens * self.record_pages)
            for first, end in self.windows[key].needed(boundary)
            for position in range(first, end)
        }
        pages = (record * self.record_pages + page for record in read for page in range(self.record_pages))
        return sorted(pages)

    def step_end(self, start: int, end: int, stops: list[int]) -> int:
        """Where a step over known tokens ends that could reach `end`."""
        return min([end, *(position for position in stops if start < position < end)])

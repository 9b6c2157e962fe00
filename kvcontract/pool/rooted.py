"""The pool of full pages as the root of a rank: what is done to it is done to every pool beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvcontract.contract.errors import UsageFault
from kvcontract.pool.events import EventLog
from kvcontract.pool.guards import Guards
from kvcontract.pool.sides import NO_SIDES, Sides


class Rooted(Guards):
    """Verbs that are for all pools of a rank; arguments and errors are those of `Guards`.

    Args:
        sides: what the rank keeps beside the full pages.
    """

    def __init__(
        self,
        pages: int,
        page_tokens: int,
        *,
        retention: bool = True,
        events: EventLog | None = None,
        sides: Sides = NO_SIDES,
    ) -> None:
        super().__init__(pages, page_tokens, retention=retention, events=events)
        self.sides = sides
        wrong = [pool.key for pool in sides.pools if pool.page_tokens != page_tokens]
        if wrong:
            raise UsageFault(f"{', '.join(wrong)}: pages of another size than {page_tokens} tokens")

    def check_capacity(self, bound_blocks: Mapping[str, int]) -> None:
        """Refuse a pool larger than any bound arena (B22).

        Args:
            bound_blocks: blocks of each bound arena, by name.

        Raises:
            UsageFault: names every arena that is too small.
        """
        needed = {pool.key: pool.pages for pool in self.sides.pools}
        small = [
            f"{name}: {blocks}"
            for name, blocks in bound_blocks.items()
            if blocks < needed.get(name.partition(" of worker ")[0], self.pages)
        ]
        if small:
            raise UsageFault(
                f"the pool has {self.pages} pages (page 0 included)"
                f"{''.join(f', {key} {blocks}' for key, blocks in needed.items())};"
                f" too small, in blocks: {', '.join(small)}"
            )

    def on_release(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back, outside the lock, whenever room has grown here or beside.

        Returns:
            A function that ends it.
        """
        ends = [super().on_release(callback), *(pool.on_release(callback) for pool in self.sides.pools)]

        def end() -> None:
            for each in ends:
                each()

        return end

    def set_retention(self, on: bool) -> None:
        """Switch whether released pages are kept for reuse; switching off drains the cache once (B12)."""
        super().set_retention(on)
        for pool in self.sides.pools:
            pool.set_retention(on)

    def clear(self, reason: str = "reset") -> int:
        """Forget all cached content and begin a new epoch of events; returns how many full pages that were.

        Raises:
            UsageFault: the pools are not idle: there are requests, reservations, or named pages in use (C11).
        """
        cleared = super().clear(reason)
        for pool in self.sides.pools:
            pool.clear(reason)
        return cleared

    def check_books(self) -> None:
        """Audit every array of every pool against every promise.

        Raises:
            InternalFault: something disagrees; the message names all of it.
        """
        super().check_books()
        for pool in self.sides.pools:
            pool.check_books()

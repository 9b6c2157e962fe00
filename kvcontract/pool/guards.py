"""Verbs beside a request's path: guards on pages, reset marks, retention, clearing; and what they check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcontract.contract.errors import UsageFault
from kvcontract.pool.books import Books
from kvcontract.pool.events import RETENTION_OFF, Content, EventLog
from kvcontract.pool.handles import Entitlement, Run
from kvcontract.pool.index import Keys, Pages
from kvcontract.pool.kernels import STAGED
from kvcontract.pool.ledger import Ledger

_NAMED_FAULTS = 8


class Guards(Ledger):
    """The side verbs of a pool.

    Args:
        pages: pages of the arenas, page 0 included: it is padding and never given out (B21).
        page_tokens: tokens of a page.
        retention: keep released pages for reuse.
        events: told of every change of the index; None: nobody is.
        chained: see `Books`.

    Raises:
        UsageFault: fewer than 2 pages, or fewer than 1 token a page.
    """

    def __init__(
        self,
        pages: int,
        page_tokens: int,
        *,
        retention: bool = True,
        events: EventLog | None = None,
        chained: bool = True,
    ) -> None:
        if pages < 2 or page_tokens < 1:  # noqa: PLR2004 - page 0 and one to use
            raise UsageFault(
                f"pages = {pages}, page_tokens = {page_tokens}; allowed are at least 2 pages"
                " (page 0 is padding) of at least 1 token"
            )
        self.pages = pages
        self.page_tokens = page_tokens
        self.events = events
        super().__init__(Books(pages, retention=retention, events=events, chained=chained))

    def pin(self, pages: Pages) -> None:
        """Keep owned pages (int32 [n]) from being reissued until `unpin`, whatever their owner does (C1).

        Raises:
            UsageFault: a page twice, out of range, not owned by anybody, or staged and nowhere pinned yet.
        """
        with self._gate() as books:
            self._check_pages(
                pages,
                lambda valid: (
                    (books.refs[valid] == 0) | ((books.state[valid] == STAGED) & (books.pins[valid] == 0))
                ),
            )
            books.pin(pages)

    def unpin(self, pages: Pages) -> None:
        """Undo one `pin` of each page (int32 [n]).

        Raises:
            UsageFault: a page twice, out of range, or not pinned (B16).
        """
        with self._gate() as books:
            self._check_pages(pages, lambda valid: books.pins[valid] == 0)
            books.unpin(pages)

    def copied(self, entitlement: Entitlement) -> None:
        """The copies that a request asked for (`Entitlement.copies`) are done: their sources are let go (E4).

        Raises:
            UsageFault: the entitlement is spent.
        """
        with self._gate() as books:
            run = self._peek(entitlement)
            sources, run.sources = run.sources, run.sources[:0]
            books.unpin(sources)

    def mark_reset(self, entitlement: Entitlement, first_page: int = 0) -> None:
        """Free the pages of a request at its end where they would be cached, from page `first_page` on.

        Pages that others use by then are freed when the last of them lets go. The mark goes with the
        occupant: whoever is given the page next starts without it (B13).

        Raises:
            UsageFault: `first_page` is negative, or the entitlement is spent.
        """
        if first_page < 0:
            raise UsageFault(f"a mark from page {first_page} on; allowed is 0 or more")
        with self._gate():
            self._peek(entitlement).reset_from = first_page

    def set_retention(self, on: bool) -> None:
        """Switch whether released pages are kept for reuse; switching off drains the cache once (B12)."""
        with self._gate() as books:
            books.retention = on
            if not on:
                books.evict(books.cached, RETENTION_OFF)

    def clear(self, reason: str = "reset") -> int:
        """Forget all cached content and begin a new epoch of events; returns how many pages that were.

        Raises:
            UsageFault: the pool is not idle: there are requests, reservations, or named pages in use (C11).
        """
        with self._gate() as books:
            named = len(books.index) - books.cached
            requests, staged = self._live["entitlement"], self._live["reservation"]
            if named or requests or staged:
                raise UsageFault(
                    f"a pool is cleared when it is idle; it has {requests} requests, {staged} reservations"
                    f" and {named} named pages in use"
                )
            cleared = books.cached
            books.evict(cleared, None)
            if books.events is not None:
                books.events.cleared(reason)
            return cleared

    # Checks

    def _check_pages(self, pages: Pages, wrong: Callable[[Pages], npt.NDArray[Any]]) -> None:
        ordered = np.sort(pages)
        same = ordered[1:] == ordered[:-1]
        if len(ordered) and (ordered[0] < 1 or ordered[-1] >= self.pages or same.any()):
            outside = pages[(pages < 1) | (pages >= self.pages)].tolist()
            twice = np.unique(ordered[1:][same]).tolist()
            raise UsageFault(f"pages outside 1 .. {self.pages - 1}: {outside}; listed twice: {twice}")
        bad = pages[wrong(pages)].tolist()
        if bad:
            more = f" and {len(bad) - _NAMED_FAULTS} more" if len(bad) > _NAMED_FAULTS else ""
            raise UsageFault(f"pages that are not yours to name here: {bad[:_NAMED_FAULTS]}{more}")

    def _told(self, content: Content | None, pages: int) -> Content | None:
        """The content of `pages` full pages, if there is somebody to tell.

        Raises:
            UsageFault: events are on, and token ids are missing or too few.
        """
        if self.events is None:
            return None
        tokens = pages * self.page_tokens
        have = -1 if content is None else len(content.token_ids)
        if content is None or have < tokens:
            raise UsageFault(
                f"events are on: {pages} pages need their {tokens} token ids, "
                + ("none were given" if have < 0 else f"{have} were given")
            )
        extras = {page: identity for page, identity in content.extras.items() if page < pages}
        return Content(content.token_ids[:tokens], content.scope, extras)


def as_keys(keys: Keys) -> Keys:
    """Checked, contiguous and writable, as the kernels are compiled.

    Raises:
        UsageFault: not uint64 [n, 2].
    """
    if keys.ndim != 2 or keys.shape[1] != 2 or keys.dtype != np.uint64:  # noqa: PLR2004 - two halves
        raise UsageFault(f"keys are uint64 [n, 2], not {keys.dtype} {list(keys.shape)}")
    return keys if keys.flags.c_contiguous and keys.flags.writeable else keys.copy()


def leading(run: Run, keys: Keys, ok: npt.NDArray[np.bool_] | int) -> int:
    """How many leading pages of a reservation are complete.

    Raises:
        UsageFault: keys or outcomes are not one for each page.
    """
    flags = ok if isinstance(ok, np.ndarray) else np.arange(run.count) < ok
    if len(keys) != run.count or len(flags) != run.count:
        raise UsageFault(f"{run.count} staged pages, {len(keys)} keys, {len(flags)} outcomes")
    return run.count if flags.all() else int(flags.argmin())

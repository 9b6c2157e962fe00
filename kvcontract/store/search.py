"""One resolve on its way: what it looks for, what it holds, and what it has learnt."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvcontract.contract.model import Scope
from kvcontract.core.pending import Pending
from kvcontract.pool.events import Content
from kvcontract.pool.handles import Hold, Reservation
from kvcontract.pool.index import Keys
from kvcontract.pool.keys import TokenIds
from kvcontract.pool.media import Media
from kvcontract.store.explain import Cut
from kvcontract.store.policy import CancelToken, ResolvePolicy
from kvcontract.store.rank import Rank
from kvcontract.store.workers import Workers
from kvcontract.tiers.cipher import NO_KEY, KeyId

COLD_MISSES_TO_OPEN: Final = 3


class Breaker:
    """Whether full-hit resolves may still park: cold producers are not waited for again and again (A8)."""

    def __init__(self) -> None:
        self._cold: Counter[tuple[str, ResolvePolicy]] = Counter()

    def open(self, rank: str, policy: ResolvePolicy) -> bool:
        """Whether later requests should not park."""
        return self._cold[rank, policy] >= COLD_MISSES_TO_OPEN

    def hit(self, rank: str, policy: ResolvePolicy) -> None:
        """A request hit in full; while open nobody parks, so only a first shot closes it."""
        del self._cold[rank, policy]

    def cold(self, rank: str, policy: ResolvePolicy) -> None:
        """A request waited in vain."""
        self._cold[rank, policy] += 1


@dataclass(slots=True, eq=False)
class Ask:
    """What a caller wants.

    Attributes:
        id: of the resolve; nothing else tells two of them apart (A14).
        deadline: on the loop's clock.
        label: the caller's name for it; only ever shown.
        key: that records of its scope are encrypted with; None: none is known.
    """

    id: int
    rank: Rank
    workers: Workers
    tokens: TokenIds
    scope: Scope
    policy: ResolvePolicy
    deadline: float
    media: Media
    cancel: CancelToken | None = None
    label: str | None = None
    key: KeyId | None = NO_KEY

    @property
    def limit_tokens(self) -> int:
        """The longest hit there can be: full pages, a token left to compute, no item cut (A12)."""
        page, count = self.rank.pool.page_tokens, len(self.tokens)
        covered = count if self.policy.full_pages else max(0, count - 1)
        return self.media.floor_pages(covered, page) * page

    @property
    def cancelled(self) -> bool:
        """Whether the caller has left."""
        return self.cancel is not None and self.cancel.cancelled


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The pages' content, kept only where somebody is told of it (I7).

    Attributes:
        ids: integers of all pages.
        scope: tag of the scope.
        extras: extra identity by page.
        page_tokens: of a page.
    """

    ids: NDArray[np.integer[Any]]
    scope: str
    extras: Mapping[int, bytes]
    page_tokens: int

    def of(self, first: int, end: int) -> Content:
        """Of some pages."""
        extras = {page - first: item for page, item in self.extras.items() if first <= page < end}
        return Content(self.ids[first * self.page_tokens : end * self.page_tokens], self.scope, extras)


@dataclass(slots=True, eq=False)
class Search:
    """One resolve on its way.

    Attributes:
        keys: uint64[n, 2], the pages that may be hit (A12).
        records: uint64[n // pages of a record, 2], what tiers have of them; once it is needed.
        hold: what is pinned now; replaced as the hit grows, let go before a pause.
        tokens: what the pages hold, if anybody is to be told.
        origin: int16[n], where each page of the hold came from: 0 the device, else 1 + number of the tier.
        reserved: room that was waited for, until it is used.
        most_pages: how many pages may be loaded at once; below what is there, where only that fits (A18).
        reasons: why the hit is shorter than it might be.
        cuts: what each place had to say.
        partial: by number of the tier, the first missing record and which of its shards are there.
        news: settle when a tier has heard of something.
        reached: how many pages were resident when it began, whether a request could go on from there or not.
    """

    ask: Ask
    keys: Keys
    records: Keys
    hold: Hold
    tokens: Tokens | None
    origin: NDArray[np.int16]
    reserved: Reservation | None = None
    most_pages: int | None = None
    reasons: list[str] = field(default_factory=list)
    cuts: dict[str, Cut] = field(default_factory=dict)
    partial: dict[int, tuple[int, NDArray[np.bool_]]] = field(default_factory=dict)
    news: list[Pending[None]] = field(default_factory=list)
    reached: int = 0

    @property
    def rank(self) -> Rank:
        """Where."""
        return self.ask.rank

    @property
    def workers(self) -> Workers:
        """Of the rank."""
        return self.ask.workers

    @property
    def policy(self) -> ResolvePolicy:
        """How far it goes."""
        return self.ask.policy

    @property
    def deadline(self) -> float:
        """Of every wait (A20)."""
        return self.ask.deadline

    @property
    def at(self) -> int:
        """Number of the first page that is missing."""
        return self.hold.hit_pages

    @property
    def step(self) -> int:
        """Pages of a record."""
        return self.workers.record_pages

    @property
    def record(self) -> int:
        """Number of the first record of which a page is missing."""
        return self.at // self.step

    @property
    def short(self) -> int:
        """How many whole records might still be hit: all that a tier could add."""
        return len(self.keys) // self.step - self.record

    @property
    def missing(self) -> Keys:
        """Keys of the records not held whole yet."""
        return self.records[self.record :]

    def content(self, first: int, end: int) -> Content | None:
        """What some pages hold, if anybody is to be told."""
        return None if self.tokens is None else self.tokens.of(first, end)

    def record_content(self, end: int) -> Content | None:
        """What the first records hold, if anybody is to be told."""
        if self.tokens is None:
            return None
        size = self.step * self.tokens.page_tokens
        return Content(self.tokens.ids[: end * size], self.tokens.scope, self.ask.media.extras(size, end))

    def degrade(self, reason: str) -> None:
        """Note why the hit is shorter."""
        if reason not in self.reasons:
            self.reasons.append(reason)

    def late(self) -> bool:
        """Whether its time is over: nothing further is issued (A9)."""
        if asyncio.get_running_loop().time() < self.deadline:
            return False
        self.degrade("deadline")
        return True

    def match(self) -> None:
        """Hold what is resident now, where nothing is held: it was let go."""
        held = self.rank.pool.match(self.keys)
        self.origin[held.hit_pages :] = 0
        self.hold = held

    def regrow(self, end: int | None = None) -> None:
        """Pages that arrived on the device meanwhile, up to `end`, are not loaded (A17)."""
        if self.rank.pool.probe(self.keys[:end]) > self.at:
            grown = self.rank.pool.match(self.keys[:end])
            if grown.hit_pages > self.at:
                self.hold, grown = grown, self.hold
            grown.release()

    def limit(self, pages: int) -> None:
        """Look no further than that: nobody could go on from beyond."""
        if pages < len(self.keys):
            self.keys, self.records = self.keys[:pages], self.records[: pages // self.step]
            if self.at > pages:
                self.hold.trim(pages)

    def holds_room_for(self, pages: int) -> bool:
        """Whether exactly that much room was staged for it."""
        return self.reserved is not None and len(self.reserved.pages) == pages

    def spare(self) -> None:
        """Give room back that was not used."""
        reserved, self.reserved, self.most_pages = self.reserved, None, None
        if reserved is not None:
            reserved.release()

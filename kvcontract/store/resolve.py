"""Resolve: the longest prefix that is resident, or can be made so before a deadline.

One coroutine per request, all on the store's loop, so that its state has one owner.  The device is asked
first, then each tier in order for what is still missing, until nothing more is found.  Whatever goes wrong is
a shorter hit with a counted reason (R4); nothing found is lost (A4), and nothing taken is kept (A6).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvcontract.core.pending import Pending, wait_until
from kvcontract.pool.index import Keys
from kvcontract.pool.keys import Keyer, token_array
from kvcontract.store.answer import Answers
from kvcontract.store.explain import Cut
from kvcontract.store.fetch import Fetcher
from kvcontract.store.policy import DEVICE, KvPrefix
from kvcontract.store.search import Ask, Breaker, Search, Tokens
from kvcontract.store.side_fetch import SideFetcher, settle
from kvcontract.store.stats import Tally

FIRST_PAUSE_S: Final = 0.005
LONGEST_PAUSE_S: Final = 0.1
NEWS_PAUSE_S: Final = 1.0
"""How long to wait for a tier that says when something has come, before asking it all the same."""

HASHED_AT_ONCE_TOKENS: Final = 16_384
"""Tokens that are hashed between two looks at the loop: some 70 us (A22)."""

Soon = Callable[[Callable[[], object]], object]


class Resolver:
    """Runs resolves.

    Args:
        keyer: derives keys of pages.
        record_keyer: derives keys of records.
        fetcher: brings pages from the tiers.
        answers: makes prefixes.
        tally: where everything is counted.
        soon: calls a function on the loop, from any thread.
        tell: whether somebody is to be told what pages hold.
        sides: finds and brings what is kept beside full pages; None: nothing is.
    """

    def __init__(
        self,
        keyer: Keyer,
        record_keyer: Keyer,
        fetcher: Fetcher,
        answers: Answers,
        tally: Tally,
        *,
        soon: Soon,
        tell: bool,
        sides: SideFetcher | None = None,
    ) -> None:
        self._keyer = keyer
        self._record_keyer = record_keyer
        self._fetcher = fetcher
        self._answers = answers
        self._tally = tally
        self._soon = soon
        self._tell = tell
        self._sides = sides
        self._breaker = Breaker()
        self._open: dict[asyncio.Timeout, Ask] = {}  # in order: who ends first must not depend on addresses
        self._begun = 0  # without those that wait for a reset to end
        self._idle: Pending[None] = Pending.of(None)

    @property
    def searching(self) -> int:
        """Resolves that have not ended."""
        return len(self._open)

    @property
    def idle(self) -> Pending[None]:
        """Settles when no resolve is under way, but for those that wait for a gate."""
        return self._idle

    async def conclude(self) -> None:
        """End every search now, with what it holds; returns when the last has ended."""
        while self._open:
            for scope in list(self._open):
                self._expire(scope)
            await asyncio.sleep(0)  # they end within a few rounds of the loop: nothing waits after a cancel

    async def resolve(self, ask: Ask, gate: Pending[None] | None, *, cache: bool) -> KvPrefix:
        """The longest prefix; on any exception nothing stays taken.

        Args:
            ask: what is wanted.
            gate: waited for first: something that must come before (C11).
            cache: whether prefixes are looked for at all, now that it begins.
        """
        self._tally.count("resolves")
        if ask.policy.per_position:  # A23
            return self._answers.nothing(ask, "outputs of every position are wanted")
        if not cache:
            return self._answers.nothing(ask, "prefix caching is off")
        found: list[Search] = []
        try:
            reason = await self._until_told(ask, self._work(ask, gate, found))
            if ask.cancelled or not found:  # A11
                self._tally.count("resolves_cancelled", int(ask.cancelled))
                return self._answers.nothing(ask, "cancelled" if ask.cancelled else reason or "not begun")
            if not found[0].hold.live:
                found[0].match()  # let go for a pause that did not end
            if reason is not None:
                found[0].degrade(reason)
            settle(found[0])
            answer = self._answers.prefix(found[0])
            found.clear()  # its hold is the caller's now
        except BaseException as error:
            cancelled = isinstance(error, asyncio.CancelledError)
            self._tally.count("resolves_cancelled" if cancelled else "resolves_failed")
            raise
        else:
            return answer
        finally:
            for search in found:
                if search.hold.live:
                    search.hold.release()

    async def _work(self, ask: Ask, gate: Pending[None] | None, found: list[Search]) -> str | None:
        if gate is None:
            self._enter()
        elif not await self._through(gate, ask.deadline):
            return "a reset was under way"
        try:
            if not ask.cancelled:
                search = self._searched(ask, await self._names(ask, self._keyer))
                found.append(search)
                if search.step > 1 and (search.short or self._sides is not None):
                    search.records = await self._names(ask, self._record_keyer)
                if self._sides is not None:
                    await self._joint(self._sides, search)
                elif search.short and not ask.cancelled:
                    await self._ask_tiers(search)
        finally:
            self._leave()
        return None

    async def _through(self, gate: Pending[None], deadline: float) -> bool:
        """Wait at a gate, and enter in the very moment it opens: a reset that comes later waits (C11)."""

        def enter(_: None) -> None:
            self._enter()

        gate.on_done(enter)
        try:
            await wait_until(gate, deadline)
        except BaseException as error:
            if not gate.forget(enter):
                self._leave()
            if not isinstance(error, TimeoutError):
                raise
            return False
        return True

    def _enter(self) -> None:
        if not self._begun:
            self._idle = Pending()
        self._begun += 1

    def _leave(self) -> None:
        self._begun -= 1
        if not self._begun:
            self._idle.settle(None)

    async def _until_told(self, ask: Ask, work: Coroutine[Any, Any, str | None]) -> str | None:
        """Run until it has ended, or has to; returns why, if it could not do its work."""
        scope = asyncio.timeout(None)
        self._open[scope] = ask
        end = lambda: self._soon(lambda: self._expire(scope))  # noqa: E731 - two threads, two calls
        forget = None if ask.cancel is None else ask.cancel.on_cancel(end)
        try:
            async with scope:
                return await work
        except TimeoutError:
            if not scope.expired():
                raise
            return "the store was closed"
        finally:
            work.close()
            if forget is not None:
                forget()
            del self._open[scope]

    def _expire(self, scope: asyncio.Timeout) -> None:
        if scope in self._open and not scope.expired():
            scope.reschedule(asyncio.get_running_loop().time())

    async def _names(self, ask: Ask, keyer: Keyer) -> Keys:
        """Keys of the pages, or records, that may be hit, uint64[n, 2]; others go on meanwhile (A22)."""
        page = keyer.page_tokens
        limit = ask.limit_tokens // page * page
        extras = ask.media.extras(page, limit // page)
        step = max(page, HASHED_AT_ONCE_TOKENS // page * page)
        keys: NDArray[np.uint64] = np.empty((limit // page, 2), np.uint64)
        for at in range(0, limit, step):
            if at:
                await asyncio.sleep(0)
            end, first = min(limit, at + step), at // page
            mine = {number - first: item for number, item in extras.items() if at <= number * page < end}
            parent = keys[first - 1] if first else None
            piece = ask.tokens[at:end]
            keys[first : end // page] = keyer.chain(piece, ask.scope, extras=mine, parent=parent)
        return keys

    def _searched(self, ask: Ask, keys: Keys) -> Search:
        """Begin with what is resident."""
        page, told = ask.rank.pool.page_tokens, None
        if self._tell or ask.rank.pool.events is not None:
            extras = ask.media.extras(page, len(keys))
            ids = token_array(ask.tokens[: len(keys) * page])
            told = Tokens(ids, self._keyer.scope_tag(ask.scope), extras, page)
        hold = ask.rank.pool.match(keys)
        records = keys[:0] if ask.workers.record_pages > 1 else keys
        search = Search(ask, keys, records, hold, told, np.zeros(len(keys), np.int16))
        if search.at < len(keys):
            groups = search.workers.part.groups
            search.cuts[DEVICE] = Cut(DEVICE, search.at, "not resident when asked", groups)
        return search

    async def _joint(self, sides: SideFetcher, search: Search) -> None:
        """A prefix that every part can be continued from: boundaries first, then what they need (R2)."""
        search.reached, full = search.at, search.policy.full_hit
        rank, policy, pause = search.rank.name, search.policy, FIRST_PAUSE_S
        while not search.ask.cancelled:
            offers = await sides.offers(search)
            deepest = offers.boundaries[0] if offers.boundaries else 0
            if deepest < len(search.keys):
                beside = tuple(side.key for side in search.rank.pool.sides)
                search.cuts["beside"] = Cut("beside", deepest, "no state at a deeper boundary", beside)
            if not full:
                search.limit(deepest)
            if search.short and not search.ask.cancelled:
                await self._ask_tiers(search)
            landed = not search.short
            await sides.bring(search, offers)
            if search.at == len(search.keys) or not (full and landed) or self._breaker.open(rank, policy):
                return
            if not await self._paused(search, pause):
                search.degrade("full hit did not land in time")
                self._breaker.cold(rank, policy)
                return
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _ask_tiers(self, search: Search) -> None:
        rank, policy = search.rank.name, search.policy
        parks = policy.full_hit and not self._breaker.open(rank, policy)
        pause = FIRST_PAUSE_S
        await self._fetcher.round(search)
        while search.short and parks:
            if not await self._paused(search, pause):
                search.degrade("full hit did not land in time")
                self._breaker.cold(rank, policy)
                break
            pause = min(2 * pause, LONGEST_PAUSE_S)
            if await self._fetcher.landed(search):
                await self._fetcher.round(search)
        if policy.full_hit and not search.short:
            self._breaker.hit(rank, policy)

    async def _paused(self, search: Search, pause: float) -> bool:
        """Wait a little for a producer, holding nothing; False once the deadline leaves no time (A7, R6)."""
        loop = asyncio.get_running_loop()
        news, search.news = search.news, []
        until = loop.time() + (NEWS_PAUSE_S if news else pause)
        if loop.time() + pause >= search.deadline:
            return False
        search.hold.release()
        heard = asyncio.Event()

        def wake(_: None) -> None:
            self._soon(heard.set)

        for item in news:
            item.on_done(wake)
        try:
            async with asyncio.timeout_at(min(until, search.deadline)):
                await heard.wait()
        except TimeoutError:
            pass
        finally:
            for item in news:
                item.forget(wake)
        search.match()
        return True

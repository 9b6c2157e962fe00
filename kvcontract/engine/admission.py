"""Admission: resolved requests that wait for pages and slots, in order, without deadlocks (B8).

The order: higher priority first; among equals those that were preempted, the oldest first, since they had
been admitted before; then by arrival.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np

from kvcontract.contract.errors import UsageFault
from kvcontract.engine.active import Active
from kvcontract.engine.intake import Arrival
from kvcontract.engine.request import Finish, Request, Result
from kvcontract.engine.sampling import Sampler
from kvcontract.pool.checkpoints import NO_CHECKPOINTS, CheckpointPolicy, Checkpoints
from kvcontract.pool.handles import NO_PAGES, Later, Never
from kvcontract.pool.index import Pages
from kvcontract.pool.keys import Keyer
from kvcontract.pool.pool import BlockPool
from kvcontract.pool.queue import AdmissionQueue, Waiter
from kvcontract.pool.request import admit
from kvcontract.store.policy import KvPrefix


@dataclass(frozen=True, slots=True, eq=False)
class Lack:
    """Who is next in order, and what it lacks.

    Attributes:
        request: the request.
        pages: it lacks, even if all other requests that wait let their holds go; 0 or less: none.
        own: int32 [n], pages that it holds itself.
        held: int32 [m], pages that any request in line holds.
    """

    request: Request
    pages: int
    own: Pages
    held: Pages


@dataclass(frozen=True, slots=True)
class Admission:
    """The line in front of one pool.

    Attributes:
        pool: where pages come from.
        keyer: derives page keys.
        checkpoints: where it is wanted that others can go on from.
        vocab_size: token ids lie below it.
        interior: whether states can be had inside a step.
    """

    pool: BlockPool
    keyer: Keyer
    checkpoints: CheckpointPolicy
    vocab_size: int
    interior: bool
    _queue: AdmissionQueue[Arrival]

    @classmethod
    def of(
        cls,
        pool: BlockPool,
        keyer: Keyer,
        checkpoints: CheckpointPolicy,
        vocab_size: int,
        *,
        interior: bool,
    ) -> Admission:
        """An empty line."""
        return cls(pool, keyer, checkpoints, vocab_size, interior, AdmissionQueue(pool))

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Arrival]:
        return (_current(waiter) for waiter in self._queue)

    def push(self, arrival: Arrival) -> Result | None:
        """Queue a request; a result where it ends here."""
        if arrival.error is not None:
            return arrival.end(Finish.FAILED, f"resolve: {arrival.error!r}")
        request = arrival.request
        lifetime = -(-(len(request.prompt) + request.max_new_tokens) // self.pool.page_tokens)
        behind = [waiter for waiter in self._queue if _turn(arrival) < _turn(waiter.item)]
        self._queue.push(arrival, lifetime, arrival.prefix.hold)
        for waiter in behind:  # the queue has no verb for a place further ahead: the others go behind it
            self._queue.remove(waiter)
            moved = self._queue.push(waiter.item, waiter.lifetime_pages, waiter.hold)
            moved.shed, moved.passed = waiter.shed, waiter.passed
        return None

    @property
    def has_slots(self) -> bool:
        """Whether there is a live slot in each bounded group for one request more."""
        return all(side.pool.gauges().budget > 0 for side in self.pool.sides.slots)

    def next(self) -> Active | tuple[Request, Result] | None:
        """The next request that fits, admitted; or with its result where it ends here; None if none fits."""
        waiter = self._queue.next()
        if waiter is None:
            return None
        arrival = _current(waiter)
        item = arrival.item
        answer = self._admitted(arrival) if item is None else self._resumed(arrival, item)
        if answer is None:
            return None  # somebody was faster; nothing has changed
        if isinstance(answer, Result):
            self._queue.remove(waiter)
            return arrival.request, answer
        self._queue.admitted(waiter)
        return answer

    def head(self) -> Lack | None:
        """Who is next in order, and what it lacks; None if nobody waits."""
        waiters = list(self._queue)
        if not waiters:
            return None
        head, plain = waiters[0], [other.hold for other in waiters[1:] if other.hold is not None]
        held = 0 if head.hold is None else head.hold.hit_pages
        room = self.pool.rooms_without(plain)[-1]  # plain holds are shed for the head
        own = NO_PAGES if head.hold is None else head.hold.pages
        holds = np.concatenate([own, *(hold.pages for hold in plain)])
        return Lack(head.item.request, head.lifetime_pages - held - room, own, holds)

    def _resumed(self, arrival: Arrival, item: Active) -> Active | Result | None:
        try:
            if item.resume(arrival.prefix) is not None:
                return None
        except UsageFault as fault:
            return arrival.end(Finish.FAILED, f"resume: {fault}")
        return item

    def _admitted(self, arrival: Arrival) -> Active | Result | None:
        try:
            answer = admit(
                self.pool,
                prompt_tokens=arrival.request.prompt,
                max_new_tokens=arrival.request.max_new_tokens,
                keyer=self.keyer,
                scope=arrival.request.scope,
                prefix=arrival.prefix,
                checkpoints=self._wanted(arrival),
            )
        except UsageFault as fault:
            answer = Never(str(fault))
        if isinstance(answer, Later):
            return None
        if isinstance(answer, Never):
            return arrival.end(Finish.REFUSED, answer.reason)
        return Active(
            arrival.request,
            arrival.prefix,
            answer,
            arrival.sampler or Sampler(arrival.request.sampling),
            forced=arrival.forced,
            vocab_size=self.vocab_size,
        )

    def _wanted(self, arrival: Arrival) -> Checkpoints:
        """Where a request is to be cut; nowhere, for a model whose pages are all it keeps."""
        if not self.pool.sides:
            return NO_CHECKPOINTS
        prompt = len(arrival.request.prompt)
        granule = self.pool.sides.granule_tokens
        branches = (*arrival.prefix.branches, *arrival.request.turns)
        return self.checkpoints.of(granule, prompt, branches, interior=self.interior)

    def drop(self, request_ids: Collection[int]) -> list[Arrival]:
        """Take requests out that give up; what they hold is the caller's to give back."""
        gone = [waiter for waiter in self._queue if waiter.item.request.id in request_ids]
        for waiter in gone:
            self._queue.remove(waiter)
        return [_current(waiter) for waiter in gone]


def _turn(arrival: Arrival) -> tuple[int, float]:
    """Lower goes first; equals go by arrival."""
    return -arrival.request.priority, math.inf if arrival.item is None else arrival.request.id


def _current(waiter: Waiter[Arrival]) -> Arrival:
    """The arrival with the hold it has now: one that waits may have had to let it go."""
    arrival, hold = waiter.item, waiter.hold
    if hold is arrival.prefix.hold:
        return arrival
    if hold is None:
        return replace(arrival, prefix=KvPrefix.none(arrival.prefix.rank))
    tokens = hold.hit_pages * hold.pool.page_tokens
    valid = dict.fromkeys(arrival.prefix.valid_tokens, tokens)
    prefix = replace(
        arrival.prefix, hold=hold, hit_tokens=tokens, valid_tokens=valid, sources={"device": tokens}
    )
    return replace(arrival, prefix=prefix)

"""Admission: resolved requests that wait for pages and slots, in order, without deadlocks (B8)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from kvcontract.contract.errors import UsageFault
from kvcontract.engine.active import Active
from kvcontract.engine.intake import Arrival
from kvcontract.engine.request import Finish, Request, Result, refusal
from kvcontract.engine.sampling import Sampler
from kvcontract.pool.handles import Later, Never
from kvcontract.pool.keys import Keyer
from kvcontract.pool.pool import BlockPool
from kvcontract.pool.queue import AdmissionQueue, Waiter
from kvcontract.pool.request import admit
from kvcontract.pool.slab import LiveSlots
from kvcontract.store.policy import KvPrefix


@dataclass(frozen=True, slots=True)
class Admission:
    """The line in front of one pool.

    Attributes:
        pool: where pages come from.
        keyer: derives page keys.
        slots: live slots of each bounded group, by its name.
        vocab_size: token ids lie below it.
    """

    pool: BlockPool
    keyer: Keyer
    slots: Mapping[str, LiveSlots]
    vocab_size: int
    _queue: AdmissionQueue[Arrival]

    @classmethod
    def of(cls, pool: BlockPool, keyer: Keyer, slots: Mapping[str, LiveSlots], vocab_size: int) -> Admission:
        """An empty line."""
        return cls(pool, keyer, slots, vocab_size, AdmissionQueue(pool))

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Arrival]:
        return (_current(waiter) for waiter in self._queue)

    def push(self, arrival: Arrival) -> Result | None:
        """Queue a request; a result where it ends here."""
        request, error = arrival.request, arrival.error
        if error is not None:
            arrival.prefix.release()
            return refusal(request, Finish.FAILED, f"resolve: {error!r}")
        lifetime = -(-(len(request.prompt) + request.max_new_tokens) // self.pool.page_tokens)
        self._queue.push(arrival, lifetime, arrival.prefix.hold)
        return None

    def next(self) -> Active | tuple[Request, Result] | None:
        """The next request that fits, admitted; or with its result where it ends here; None if none fits."""
        if any(slots.free == 0 for slots in self.slots.values()):
            return None
        waiter = self._queue.next()
        if waiter is None:
            return None
        arrival = _current(waiter)
        sampler = arrival.sampler or Sampler(arrival.request.sampling)
        try:
            answer = admit(
                self.pool,
                prompt_tokens=arrival.request.prompt,
                max_new_tokens=arrival.request.max_new_tokens,
                keyer=self.keyer,
                scope=arrival.request.scope,
                prefix=arrival.prefix,
            )
        except UsageFault as fault:
            answer = Never(str(fault))
        if isinstance(answer, Later):
            return None  # somebody was faster; nothing has changed
        if isinstance(answer, Never):
            self._queue.remove(waiter)
            arrival.prefix.release()
            return arrival.request, refusal(arrival.request, Finish.REFUSED, answer.reason)
        self._queue.admitted(waiter)
        slots = self.take_slots()
        return Active(
            arrival.request,
            arrival.prefix,
            answer,
            sampler,
            slots=slots,
            forced=arrival.forced,
            vocab_size=self.vocab_size,
        )

    def take_slots(self) -> dict[str, int]:
        """A live slot in each bounded group; there is one in each, or `next` had not answered."""
        taken = {group: slots.take() for group, slots in self.slots.items()}
        return {group: slot for group, slot in taken.items() if slot is not None}

    def release_slots(self, item: Active) -> None:
        """Take an ended request's slots back."""
        for group, slot in item.slots.items():
            self.slots[group].release(slot)

    def drop(self, request_ids: Collection[int]) -> list[Arrival]:
        """Take requests out that give up; their holds are back."""
        gone = []
        for waiter in self._queue:
            if waiter.item.request.id in request_ids:
                self._queue.remove(waiter)
                arrival = _current(waiter)
                arrival.prefix.release()
                gone.append(arrival)
        return gone


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

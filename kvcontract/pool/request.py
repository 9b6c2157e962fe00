"""A request's view of the pool: admission, then steps that each name exactly the tokens and pages they use.

::

    answer = admit(pool, prompt_tokens=ids, max_new_tokens=64, keyer=keyer, scope=scope, prefix=prefix)
    with answer as req:                          # RequestKv; or Later, or Never(reason)
        while req.committed_tokens < req.prompt_len:
            chunk = req.schedule_prefill(512)
            req.apply_prefill(chunk, run(chunk)) # a token from the last chunk, None before
        while not req.finished:
            chunk = req.schedule_decode()
            req.apply_decode(chunk, run(chunk))

A chunk is a proposal: `apply_*` says that its KV has been written, `revert` that the step came to nothing.
Pages are drawn when a chunk needs them and named when their KV is complete (B19). A request belongs to one
thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.model import Scope
from kvcontract.pool.handles import Entitlement, Hold, Later, Never
from kvcontract.pool.index import Keys, Pages
from kvcontract.pool.keys import Keyer, PageKeys, TokenIds, token_array
from kvcontract.pool.pool import BlockPool

FULL = "full"
"""Name of the block-id space of groups that reach back to the first token."""

Tokens = npt.NDArray[np.int64]
_Scalar = TypeVar("_Scalar", bound=np.generic)


class Prefix(Protocol):
    """What a resolve gives a request: the resident prefix it may start from."""

    @property
    def hold(self) -> Hold | None:
        """Pins exactly `hit_tokens / page_tokens` pages; None for an empty prefix."""

    @property
    def hit_tokens(self) -> int:
        """Length of the prefix."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """One step of one request.

    Attributes:
        token_ids: int64 [n], the tokens to run.
        start: position of the first; as many tokens are in the cache before the step.
        pages: page table of each block-id space, int32 [ceil((start + n) / page_tokens)], read-only (B17).
        emits: whether a token is sampled after the last position (B19).
        slots: live slot of each bounded group.
        restore: snapshots to copy into live slots first.
        checkpoint: token boundary at which the step's end is to be sealed.
    """

    token_ids: Tokens
    start: int
    pages: dict[str, Pages]
    emits: bool
    slots: dict[str, int] = field(default_factory=dict)
    restore: tuple[tuple[int, int], ...] = ()
    checkpoint: int | None = None

    @property
    def context_len(self) -> int:
        """Tokens in the cache before the step."""
        return self.start

    @property
    def end(self) -> int:
        """Tokens in the cache after the step."""
        return self.start + len(self.token_ids)


def admit(
    pool: BlockPool,
    *,
    prompt_tokens: TokenIds,
    max_new_tokens: int,
    keyer: Keyer,
    scope: Scope,
    prefix: Prefix | None = None,
) -> RequestKv | Later | Never:
    """Promise a request its lifetime pages, ceil((prompt + max_new) / page_tokens) (B1).

    Args:
        pool: where its pages come from.
        prompt_tokens: at least one token id.
        max_new_tokens: most tokens to sample, at least 1.
        keyer: derives its page keys; of the pool's page size.
        scope: who may share its pages.
        prefix: start from it; consumed if the request is admitted, untouched otherwise.

    Returns:
        The request; `Later` if it does not fit now; `Never` if it never can.

    Raises:
        UsageFault: token ids out of range, an empty prompt, or a prefix that is not this request's.
    """
    tokens = _checked_prompt(pool, prompt_tokens, max_new_tokens, keyer)
    lifetime = -(-(len(tokens) + max_new_tokens) // pool.page_tokens)
    if lifetime > pool.total:
        return Never(
            f"{lifetime} pages for {len(tokens)} + {max_new_tokens} tokens; the pool has {pool.total}"
        )
    prompt_keys = keyer.chain(tokens, scope)
    hold = None if prefix is None else _usable_hold(prefix, pool, len(tokens), prompt_keys)
    answer = pool.try_admit(lifetime, hold)
    if answer is None:
        gauges = pool.gauges()
        credit = 0 if hold is None else hold.hit_pages
        return Later(max(1, lifetime - credit - (gauges.available - gauges.entitled)))
    if isinstance(answer, Never):
        return answer
    return RequestKv(
        pool,
        answer,
        keyer=keyer,
        scope=scope,
        prompt=tokens,
        max_new_tokens=max_new_tokens,
        prompt_keys=prompt_keys,
        started=prefix is not None,
    )


class RequestKv:
    """An admitted request: a context that cannot leak. Made by `admit`.

    Attributes:
        scope: who may share its pages.
        prompt_len: tokens of the prompt.
        max_new_tokens: most tokens that it may sample.
        hit_tokens: tokens it started with.
        committed_tokens: tokens whose KV has been written.
    """

    def __init__(
        self,
        pool: BlockPool,
        entitlement: Entitlement,
        *,
        keyer: Keyer,
        scope: Scope,
        prompt: npt.NDArray[np.integer[Any]],
        max_new_tokens: int,
        prompt_keys: PageKeys,
        started: bool,
    ) -> None:
        self.scope = scope
        self.prompt_len = len(prompt)
        self.max_new_tokens = max_new_tokens
        self._pool = pool
        self._entitlement = entitlement
        self._keyer = keyer
        self._tokens: Tokens = np.empty(len(prompt) + max_new_tokens, np.int64)
        self._tokens[: len(prompt)] = prompt
        self._length = len(prompt)
        self._keys: Keys = np.empty((entitlement.lifetime_pages, 2), np.uint64)
        self._keys[: len(prompt_keys)] = prompt_keys
        self._keyed = len(prompt_keys)
        self._started = started
        self._chunk: Chunk | None = None
        self.hit_tokens = entitlement.registered_pages * pool.page_tokens
        self.committed_tokens = self.hit_tokens

    # What it has

    @property
    def pool(self) -> BlockPool:
        """Where its pages come from."""
        return self._pool

    @property
    def tokens(self) -> Tokens:
        """Prompt and sampled tokens, int64, read-only."""
        return _read_only(self._tokens[: self._length])

    @property
    def pages(self) -> Pages:
        """Its pages in order, int32, read-only."""
        return self._entitlement.pages

    @property
    def registered(self) -> int:
        """How many of its leading pages are complete and named."""
        return self._entitlement.registered_pages

    @property
    def keys(self) -> Keys:
        """Keys of the complete pages, uint64 [registered, 2], read-only."""
        return _read_only(self._keys[: self.registered])

    @property
    def lifetime_pages(self) -> int:
        """Pages it was promised in all."""
        return self._entitlement.lifetime_pages

    @property
    def finished(self) -> bool:
        """Whether all of its new tokens have been sampled."""
        return self._length == self.prompt_len + self.max_new_tokens

    @property
    def released(self) -> bool:
        """Whether its pages have been given back."""
        return not self._entitlement.live

    # Verbs

    def start(self, prefix: Prefix) -> None:
        """Begin after a prefix, which is consumed; for requests admitted without one.

        Raises:
            UsageFault: the request has begun, or the prefix is spent, of another pool, scope or prompt.
        """
        if self._started or self.committed_tokens or self._chunk is not None or self.pages.size:
            raise UsageFault(
                "the request has started already: by its first chunk, start() or admit(prefix=...)"
            )
        complete = self._keys[: self.prompt_len // self._pool.page_tokens]
        hold = _usable_hold(prefix, self._pool, self.prompt_len, complete)
        if hold is not None:
            self._pool.adopt(self._entitlement, hold)
        self._started = True
        self.hit_tokens = self.committed_tokens = prefix.hit_tokens

    def schedule_prefill(self, max_tokens: int) -> Chunk:
        """The next at most `max_tokens` tokens of the prompt.

        Raises:
            UsageFault: the prompt is done, a chunk is outstanding, the request is released, or `max_tokens`
                is below 1.
        """
        if max_tokens < 1 or self.committed_tokens >= self.prompt_len:
            raise UsageFault(
                f"prefill of {max_tokens} tokens at {self.committed_tokens} of a prompt of {self.prompt_len}"
            )
        return self._schedule(min(self.prompt_len, self.committed_tokens + max_tokens), last=self.prompt_len)

    def apply_prefill(self, chunk: Chunk, token: int | None) -> None:
        """The chunk's KV is written; `token` is what was sampled, if the chunk emits.

        Raises:
            UsageFault: not the outstanding chunk, or a token where none is due, or none where one is.
        """
        self._apply(chunk, token)

    def schedule_decode(self) -> Chunk:
        """The step that runs the last sampled token.

        Raises:
            UsageFault: the prompt is not done, no token is left to sample, a chunk is outstanding, or the
                request is released.
        """
        if self._length != self.committed_tokens + 1 or self._length == self.prompt_len or self.finished:
            raise UsageFault(
                f"no decode step: {self.committed_tokens} of {self.prompt_len} prompt tokens committed,"
                f" {self._length - self.prompt_len} of {self.max_new_tokens} tokens sampled"
            )
        return self._schedule(self._length, last=self._length)

    def apply_decode(self, chunk: Chunk, token: int) -> None:
        """The chunk's KV is written and `token` was sampled.

        Raises:
            UsageFault: not the outstanding chunk.
        """
        self._apply(chunk, token)

    def revert(self, chunk: Chunk) -> None:
        """The step came to nothing: the request is as before it was scheduled.

        Raises:
            UsageFault: not the outstanding chunk.
        """
        self._expect(chunk)
        self._chunk = None
        keep = -(-chunk.start // self._pool.page_tokens)
        if len(self.pages) > keep:
            self._pool.retract(self._entitlement, self.pages[keep:].copy())

    def release(self) -> None:
        """Give pages and promise back.

        Raises:
            UsageFault: released before, or a chunk is outstanding: a step may still write its pages (B16).
        """
        if self._chunk is not None:
            raise UsageFault("a chunk is outstanding; apply or revert it before release()")
        self._pool.release(self._entitlement)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.released:
            return
        if self._chunk is not None:
            self.revert(self._chunk)
        self.release()

    # Steps

    def _schedule(self, end: int, *, last: int) -> Chunk:
        if self._chunk is not None or self.released:
            raise UsageFault("the request is released" if self.released else "a chunk is outstanding")
        needed = -(-end // self._pool.page_tokens)
        if needed > len(self.pages):
            self._pool.draw(self._entitlement, needed - len(self.pages))
        start = self.committed_tokens
        self._chunk = Chunk(
            token_ids=self._tokens[start:end].copy(),
            start=start,
            pages={FULL: self.pages[:needed]},
            emits=end == last,
        )
        return self._chunk

    def _apply(self, chunk: Chunk, token: int | None) -> None:
        self._expect(chunk)
        if (token is not None) != chunk.emits:
            raise UsageFault(f"token {token} for a chunk that {'emits' if chunk.emits else 'does not emit'}")
        if token is not None:
            token_array([token])
            self._tokens[self._length] = token
            self._length += 1
        self._chunk = None
        self.committed_tokens = chunk.end
        self._register()

    def _register(self) -> None:
        """Name the pages whose last row has just been written."""
        first, last = self.registered, self.committed_tokens // self._pool.page_tokens
        if last > self._keyed:
            size = self._pool.page_tokens
            parent = self._keys[self._keyed - 1] if self._keyed else None
            fresh = self._tokens[self._keyed * size : last * size]
            self._keys[self._keyed : last] = self._keyer.chain(fresh, self.scope, parent=parent)
            self._keyed = last
        if last > first:
            self._pool.register(self._entitlement, self._keys[first:last])

    def _expect(self, chunk: Chunk) -> None:
        if chunk is not self._chunk:
            raise UsageFault("not the outstanding chunk of this request: applied, reverted or another's")


def _checked_prompt(
    pool: BlockPool, prompt_tokens: TokenIds, max_new_tokens: int, keyer: Keyer
) -> npt.NDArray[np.integer[Any]]:
    """The prompt as an array, after checking all that a caller may have got wrong."""
    tokens = token_array(prompt_tokens)
    faults = []
    if not tokens.size:
        faults.append("the prompt is empty; allowed is 1 token or more")
    if max_new_tokens < 1:
        faults.append(f"max_new_tokens is {max_new_tokens}; allowed is 1 or more")
    if keyer.page_tokens != pool.page_tokens:
        faults.append(
            f"keys are made for pages of {keyer.page_tokens} tokens, the pool has {pool.page_tokens}"
        )
    if faults:
        raise UsageFault("; ".join(faults))
    return tokens


def _usable_hold(prefix: Prefix, pool: BlockPool, prompt_tokens: int, keys: Keys) -> Hold | None:
    """The hold of a prefix, after checking that it is a prefix of this prompt in this pool and scope."""
    hold = prefix.hold
    pinned = 0 if hold is None else hold.hit_pages
    if prefix.hit_tokens != pinned * pool.page_tokens or prefix.hit_tokens >= prompt_tokens:  # A12, A13
        raise UsageFault(
            f"a prefix of {prefix.hit_tokens} tokens that pins {pinned} pages of {pool.page_tokens}, for a"
            f" prompt of {prompt_tokens}: it must pin exactly its pages and leave a token to compute"
        )
    if hold is not None and hold.pool is not pool:
        raise UsageFault("the prefix was resolved in another pool")
    if hold is not None and not np.array_equal(hold.keys, keys[:pinned]):  # D1
        raise UsageFault("the prefix was resolved for other tokens or another scope")
    return hold


def _read_only(array: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
    view = array.view()
    view.flags.writeable = False
    return view

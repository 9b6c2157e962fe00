"""A request's view of the pool: admission, then steps that each name exactly the tokens and pages they use.

::

    answer = admit(pool, prompt_tokens=ids, max_new_tokens=64, keyer=keyer, scope=scope, prefix=prefix)
    with answer as req:                          # RequestKv; or Later, or Never(reason)
        while req.prefilling:
            chunk = req.schedule_prefill(512)
            req.apply_prefill(chunk, run(chunk)) # a token from the last chunk, None before
        while not req.finished:
            chunk = req.schedule_decode()        # or schedule_speculative(drafts)
            req.apply_decode(chunk, run(chunk))

A chunk is a proposal: `apply_*` says that its KV has been written, `revert` that the step came to nothing.
Pages are drawn when a chunk needs them and named when their KV is complete (B19). A request belongs to one
thread.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Self

import numpy as np

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.model import Scope
from kvcontract.pool.booking import ask, later, taken
from kvcontract.pool.checkpoints import NO_CHECKPOINTS, Checkpoints
from kvcontract.pool.chunk import FULL, Chunk, Prefix, checked_prompt, usable_hold
from kvcontract.pool.handles import Entitlement, Later, Never
from kvcontract.pool.keys import Keyer, TokenIds, token_array
from kvcontract.pool.media import Media, MediaItem
from kvcontract.pool.pool import BlockPool
from kvcontract.pool.sequence import Tokens, TokenSequence
from kvcontract.pool.view import RequestView

__all__ = ["FULL", "Chunk", "Prefix", "RequestKv", "admit"]


def admit(
    pool: BlockPool,
    *,
    prompt_tokens: TokenIds,
    max_new_tokens: int,
    keyer: Keyer,
    scope: Scope,
    prefix: Prefix | None = None,
    anchor: int | None = None,
    media: Sequence[MediaItem] = (),
    checkpoints: Checkpoints = NO_CHECKPOINTS,
) -> RequestKv | Later | Never:
    """Promise a request its lifetime pages, ceil((prompt + max_new) / page_tokens) (B1).

    Where the rank has other pools beside, it is promised what it needs of all, or nothing.

    Args:
        pool: where its pages come from.
        prompt_tokens: at least one token id.
        max_new_tokens: most tokens to sample, at least 1.
        keyer: derives its page keys; of the pool's page size.
        scope: who may share its pages.
        prefix: start from it; consumed if the request is admitted, untouched otherwise.
        anchor: the token that another engine sampled after the prompt, which `prefix` then covers entirely;
            it counts as sampled, and the first step runs it (G4).
        media: items of the prompt.
        checkpoints: where it is wanted that somebody can go on from.

    Returns:
        The request; `Later` if it does not fit now; `Never` if it never can.

    Raises:
        UsageFault: token ids out of range, an empty prompt, items that cannot be, or a prefix that is not
            this request's.
    """
    tokens = checked_prompt(pool, prompt_tokens, max_new_tokens, keyer)
    lifetime = -(-(len(tokens) + max_new_tokens) // pool.page_tokens)
    capacity = len(tokens) + max_new_tokens
    if lifetime > pool.total:
        return Never(f"{lifetime} pages for {capacity} tokens; the pool has {pool.total}")
    sequence = TokenSequence(keyer, scope, tokens, capacity, Media(media, len(tokens)))
    hold = None if prefix is None else usable_hold(prefix, pool, sequence, anchor)
    booked = ask(pool, lifetime, hold)
    if isinstance(booked, Later | Never):
        return booked
    made = RequestKv(pool, *booked, sequence, max_new_tokens=max_new_tokens, checkpoints=checkpoints)
    if prefix is not None:
        made._begin(prefix.hit_tokens, anchor)  # noqa: SLF001 - the rest of its construction
    return made


class RequestKv(RequestView):
    """An admitted request: a context that cannot leak. Made by `admit`, or by `fork`; see `RequestView`."""

    # Verbs

    def start(self, prefix: Prefix, *, anchor: int | None = None) -> None:
        """Begin after a prefix, which is consumed; for requests admitted without one.

        Args:
            prefix: as for `admit`.
            anchor: as for `admit`.

        Raises:
            UsageFault: the request has begun, or the prefix is spent, of another pool, scope or prompt.
        """
        if self._started or self.committed_tokens or self._chunk is not None or self.pages.size:
            raise UsageFault(
                "the request has started already: by its first chunk, start() or admit(prefix=...)"
            )
        hold = usable_hold(prefix, self._pool, self._sequence, anchor)
        if hold is not None:
            self._pool.adopt(self._entitlement, hold)
            self._beside.adopt(*taken(hold))
        self._begin(prefix.hit_tokens, anchor)

    def schedule_prefill(self, max_tokens: int) -> Chunk:
        """The next at most `max_tokens` known tokens: of the prompt, or of what `resume` has to recompute.

        Raises:
            UsageFault: nothing is left to prefill, a chunk is outstanding, the request is released,
                `max_tokens` is below 1, or an uncut item does not fit into it.
        """
        known = len(self._sequence)
        if max_tokens < 1 or not self.prefilling:
            raise UsageFault(
                f"prefill of {max_tokens} tokens at {self.committed_tokens} of {known} known ones"
            )
        most = min(max_tokens, self._pool.sides.max_step_tokens or max_tokens)
        end = self._sequence.media.floor(min(known, self.committed_tokens + most))
        stop = self._checkpoints.stop(self.committed_tokens, end)
        if self._sequence.media.floor(stop) == stop:
            end = stop
        if end <= self.committed_tokens:
            raise UsageFault(
                f"an uncut item lies at {self.committed_tokens}: a chunk has at least"
                f" {self.least_prefill_tokens} tokens there, {most} were allowed"
            )
        return self._schedule(self._sequence.tokens[self.committed_tokens : end], emits=end == known)

    @property
    def least_prefill_tokens(self) -> int:
        """Tokens of the shortest prefill chunk that is possible next: more than 1 before an uncut item."""
        return self._sequence.media.ceil(self.committed_tokens + 1) - self.committed_tokens

    def apply_prefill(self, chunk: Chunk, token: int | None) -> None:
        """The chunk's KV is written; `token` is what was sampled, if the chunk emits.

        Raises:
            UsageFault: not the outstanding chunk, or a token where none is due, or none where one is.
        """
        self._expect(chunk, drafts=False)
        if (token is not None) != chunk.emits:
            raise UsageFault(f"token {token} for a chunk that {'emits' if chunk.emits else 'does not emit'}")
        self._apply(chunk, [] if token is None else [token])

    def schedule_decode(self) -> Chunk:
        """The step that runs the last sampled token.

        Raises:
            UsageFault: the prompt is not done, no token is left to sample, a chunk is outstanding, or the
                request is released.
        """
        return self.schedule_speculative(())

    def apply_decode(self, chunk: Chunk, token: int) -> None:
        """The chunk's KV is written and `token` was sampled.

        Raises:
            UsageFault: not the outstanding chunk.
        """
        self.apply_prefill(chunk, token)

    def schedule_speculative(self, drafts: TokenIds) -> Chunk:
        """The step that runs the last sampled token and verifies proposals after it (B18).

        Proposals that could not be sampled any more are left out, so that the step stays within the lifetime
        (B1): of k drafts, `chunk.drafts` are in the chunk; none, where there is a state that is rewritten at
        each token.

        Args:
            drafts: proposed token ids, any number of them.

        Raises:
            UsageFault: a draft is no token id, or as `schedule_decode`.
        """
        known = len(self._sequence)
        if self.prefilling or not self.new_tokens or self.finished:
            raise UsageFault(
                f"no decode step: {self.committed_tokens} of {self.prompt_len} prompt tokens committed,"
                f" {self.new_tokens} of {self.max_new_tokens} tokens sampled"
            )
        most = self.max_new_tokens - self.new_tokens - 1
        if self._pool.sides.slots:
            most = 0  # what a rejected proposal has done to a state cannot be undone
        elif self._pool.sides.max_step_tokens is not None:
            most = min(most, self._pool.sides.max_step_tokens - 1)
        proposed = token_array(drafts)[:most]
        step = np.concatenate([self._sequence.tokens[known - 1 :], proposed]).astype(np.int64)
        return self._schedule(step, emits=True, drafts=len(proposed))

    def apply_speculative(
        self, chunk: Chunk, accepted_tokens: Sequence[int], *, stop_token_ids: Collection[int] = ()
    ) -> tuple[int, ...]:
        """The chunk's KV is written; these tokens were sampled: accepted drafts, then one of the model's own.

        Rows of rejected drafts are given up, and pages that only they needed return at once (B18).

        Args:
            chunk: the outstanding one.
            accepted_tokens: 1 to `chunk.drafts` + 1 tokens, all but the last equal to the drafts.
            stop_token_ids: the first of these ends the accepted run: what follows it was never sampled.

        Returns:
            The tokens that count.

        Raises:
            UsageFault: not the outstanding chunk, or tokens that it cannot have given.
        """
        self._expect(chunk, drafts=True)
        tokens = token_array(accepted_tokens).tolist()
        drafts = chunk.token_ids[1:].tolist()
        if not 1 <= len(tokens) <= chunk.drafts + 1 or tokens[:-1] != drafts[: len(tokens) - 1]:
            raise UsageFault(f"tokens {tokens} for drafts {drafts}: accepted drafts, then one token more")
        stops = (number for number, token in enumerate(tokens) if token in stop_token_ids)
        del tokens[next(stops, len(tokens)) + 1 :]
        self._apply(chunk, tokens)
        return tuple(tokens)

    def revert(self, chunk: Chunk) -> None:
        """The step came to nothing: the request is as before it was scheduled.

        Where a state is rewritten at each token, that holds for a step that has not begun to run; after one
        that has, preempt the request or release it.

        Raises:
            UsageFault: not the outstanding chunk.
        """
        self._expect(chunk, drafts=True)
        self._chunk = None
        self._beside.unstage()
        self._keep(chunk.start)

    def fork(self, last_token: int | None = None) -> RequestKv | Later:
        """A second request that goes on from here on its own, for n > 1 and beams (B23).

        Complete pages are shared; the others are copied: its first chunk names the `copies` to make before
        the step runs. Whatever this request does meanwhile, the sources stay. A state that is rewritten at
        each token does not: then make the branch's `copies` at once and say `copied`, before this request
        goes on.

        Args:
            last_token: what the branch sampled instead of the last token, whose KV is not written yet.

        Returns:
            The branch, with a promise of its own; `Later` if that does not fit now.

        Raises:
            UsageFault: a chunk is outstanding, the first step after a fork is not done, the request is
                released or finished, or there is no sampled token to replace.
        """
        self._refuse_when_busy()
        if self.copies:
            raise UsageFault("no branch: what this request begins with is still to be copied")
        if self.finished or (last_token is not None and (self.prefilling or not self.new_tokens)):
            raise UsageFault("no branch: the request is finished, or has no sampled token to replace")
        if last_token is not None:
            token_array([last_token])
        shared, have = self.registered, len(self.pages)
        beside = self._beside.branch(self.lifetime_pages, shared)
        if beside is None:
            return Later(1)
        answer = self._pool.fork(
            self._entitlement, self.lifetime_pages, shared_pages=shared, copied_pages=have - shared
        )
        if not isinstance(answer, Entitlement):
            beside.release()
            return later(self._pool, self.lifetime_pages, shared)
        made = RequestKv(
            self._pool,
            answer,
            beside,
            self._sequence.branch(last_token),
            max_new_tokens=self.max_new_tokens,
            checkpoints=self._checkpoints,
        )
        made.prompt_len, made._started = self.prompt_len, True
        made.hit_tokens = made.committed_tokens = self.committed_tokens
        return made

    def copied(self) -> None:
        """The copies that it has asked for are made: their sources are let go (E4)."""
        self._pool.copied(self._entitlement)
        self._beside.copied()

    def preempt(self) -> None:
        """Give pages and promise back, keep the tokens: `resume` goes on later (B20).

        Raises:
            UsageFault: a chunk is outstanding, or the request is released, preempted or finished.
        """
        self._refuse_when_busy()
        if self.finished:
            raise UsageFault("a finished request has nothing to resume; release it")
        self._give_back()
        self._preempted = True
        self.committed_tokens = 0

    def resume(self, prefix: Prefix | None = None) -> Later | None:
        """Take all lifetime pages again, or none: what is resident is kept, the rest prefilled again (B20).

        Args:
            prefix: what a store has restored meanwhile; consumed on success. None: what is on the device.

        Returns:
            None: it goes on. `Later`: it does not fit now, and nothing has changed.

        Raises:
            UsageFault: the request is not preempted, or the prefix is not one of its own.
        """
        if not self._preempted:
            raise UsageFault("only a preempted request is resumed")
        if prefix is not None:
            answer = ask(self._pool, self.lifetime_pages, usable_hold(prefix, self._pool, self._sequence))
        else:
            size = self._pool.page_tokens
            pages = self._sequence.media.floor_pages(len(self._sequence) - 1, size)
            with self._pool.match_whole(self._sequence.keys(pages), legal=self._sequence.media) as hold:
                answer = ask(self._pool, self.lifetime_pages, hold)
        if isinstance(answer, Never):
            raise UsageFault(answer.reason)
        if isinstance(answer, Later):
            return answer
        self._entitlement, self._beside = answer
        self._preempted, self._started = False, True
        if self._reset_from is not None:
            self._pool.mark_reset(self._entitlement, self._reset_from)
        held = self.registered * self._pool.page_tokens
        self.committed_tokens = held if prefix is None else prefix.hit_tokens
        self.checkpoint, self._last_checkpoint = None, self.committed_tokens
        return None

    def mark_reset(self, first_page: int | None = None) -> None:
        """Do not keep its pages for reuse once they are released (B13).

        Args:
            first_page: from this one on; None: all but those it started with.

        Raises:
            UsageFault: the request is released.
        """
        first = self.hit_tokens // self._pool.page_tokens if first_page is None else first_page
        self._pool.mark_reset(self._entitlement, first)
        self._reset_from = first

    def release(self) -> None:
        """Give pages and promise back.

        Raises:
            UsageFault: released before, or a chunk is outstanding: a step may still write its pages (B16).
        """
        if self._chunk is not None:
            raise UsageFault("a chunk is outstanding; apply or revert it before release()")
        if self._preempted:
            self._preempted = False
        else:
            self._give_back()

    def ending(self, key: str) -> Entitlement | None:
        """What it is promised of another pool, if it may be given back now: no chunk is outstanding."""
        return None if self._chunk is not None else self._beside.entitlement(key)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._chunk is not None:
            self.revert(self._chunk)
        if self._preempted or not self.released:
            self.release()

    # Steps

    def _begin(self, hit_tokens: int, anchor: int | None) -> None:
        self._started = True
        self.hit_tokens = self.committed_tokens = self._last_checkpoint = hit_tokens
        if anchor is not None:
            self._sequence.append(token_array([anchor]).tolist())

    def _give_back(self) -> None:
        """Everything, in every pool."""
        if self._reset_from is not None and self._pool.sides:
            self._beside.forget(self._sequence.keys(self.registered)[self._reset_from :])
        self._beside.release()
        self._pool.release(self._entitlement)

    def _schedule(self, token_ids: Tokens, *, emits: bool, drafts: int = 0) -> Chunk:
        self._refuse_when_busy()
        if self._beside.read_by_a_branch:
            raise UsageFault("a branch has not copied its state yet; copy it and say copied() on the branch")
        start, end = self.committed_tokens, self.committed_tokens + len(token_ids)
        needed = -(-end // self._pool.page_tokens)
        if needed > len(self.pages):
            self._pool.draw(self._entitlement, needed - len(self.pages))
        wanted = not drafts and self._wanted(end)
        self.checkpoint = None  # what it stood at is about to be rewritten
        self._chunk = Chunk(
            token_ids=token_ids.copy(),
            start=start,
            pages={FULL: self.pages[:needed], **self._beside.tables(needed)},
            emits=emits,
            drafts=drafts,
            slots=self._beside.live_slots,
            emits_at=self._beside.stage(self._inside(start, end)),
            copies=self.copies,
            checkpoint=end if wanted else None,
        )
        return self._chunk

    def _apply(self, chunk: Chunk, tokens: list[int]) -> None:
        self._sequence.append(token_array(tokens).tolist())
        self._chunk = None
        if chunk.copies:
            self.copied()
        self._beside.ran()
        self.committed_tokens = chunk.end - chunk.drafts + max(0, len(tokens) - 1)
        at = chunk.checkpoint
        if chunk.drafts and not self._pool.sides.slots and self._wanted(self.committed_tokens):
            at = self.committed_tokens  # pages alone need no state that a rejected proposal has changed
        if at is not None:
            self.checkpoint = self._last_checkpoint = at
        self._keep(self.committed_tokens)
        self._register()

    def _keep(self, tokens: int) -> None:
        """Return the pages that lie beyond the first `tokens` tokens."""
        keep = -(-tokens // self._pool.page_tokens)
        if len(self.pages) > keep:
            self._pool.retract(self._entitlement, self.pages[keep:].copy())
        self._beside.shrink(keep)

    def _register(self) -> None:
        """Name the pages whose last row has just been written."""
        first = self.registered
        last = self._sequence.media.floor_pages(self.committed_tokens, self._pool.page_tokens)
        if last > first:
            content = self._sequence.content(first, last) if self._pool.events is not None else None
            self._pool.register(self._entitlement, self._sequence.keys(last)[first:], content)
        if self._pool.sides.windows:
            self._beside.advance(self._sequence.keys(last), self.committed_tokens, self._last_checkpoint)

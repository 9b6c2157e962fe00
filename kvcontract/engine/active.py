"""An admitted request: its pages and slots, its sampler, and what it has produced.

One that is preempted keeps all of that but pages and slots.  When it goes on, tokens whose KV is gone are run
again: they are counted apart, never as computed twice, and nothing of them is sampled or captured twice.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcontract.contract.errors import UsageFault
from kvcontract.engine.drafter import Drafter
from kvcontract.engine.request import Finish, Request, Result
from kvcontract.engine.sampling import Sampler
from kvcontract.pool.handles import Later
from kvcontract.pool.keys import MAX_TOKEN_ID, TokenIds, token_array
from kvcontract.pool.request import Chunk, RequestKv
from kvcontract.store.policy import KvPrefix


@dataclass(slots=True, eq=False)
class Active:
    """Owned by the scheduler from admission to its end.

    Attributes:
        request: what was asked.
        prefix: where it began; consumed by the admission, kept for its figures.
        kv: its pages.
        sampler: chooses its tokens.
        forced: the token after the prompt, where a branch has sampled it already.
        sealed_pages: leading pages that were handed to the store.
        vocab_size: token ids lie below it.
        yields_to: while preempted, requests that it lets go first.
    """

    request: Request
    prefix: KvPrefix
    kv: RequestKv
    sampler: Sampler
    forced: int | None = None
    sealed_pages: int = 0
    vocab_size: int = MAX_TOKEN_ID
    yields_to: frozenset[int] = frozenset()
    _reached: int = 0  # tokens whose KV it has had at any time
    _hit: int = 0
    _sources: Counter[str] = field(default_factory=Counter)
    _preemptions: int = 0
    _recomputed: int = 0
    _captured: int = 0  # rows before this position are not captured again
    _split: list[int] = field(default_factory=list)
    _logits: list[Tensor] = field(default_factory=list)
    _positions: list[NDArray[np.int64]] = field(default_factory=list)
    _drafted: int = 0
    _accepted: int = 0
    _drafter_fault: str | None = None

    def __post_init__(self) -> None:
        self._reached, self._hit = self.kv.committed_tokens, self.kv.hit_tokens
        self._sources.update(self.prefix.sources)

    @property
    def prefilling(self) -> bool:
        """Whether known tokens beyond the last sampled one are still to be run."""
        return self.kv.prefilling

    # Preemption

    def preempt(self, yields_to: frozenset[int]) -> None:
        """Give pages and promise back (B20).

        Args:
            yields_to: ids of requests that are to go first.
        """
        self.kv.preempt()
        self.yields_to = yields_to
        self._preemptions += 1

    def resume(self, prefix: KvPrefix) -> Later | None:
        """Take all lifetime pages again, or none; None: it goes on after the prefix, which is consumed.

        Raises:
            UsageFault: the prefix is not one of its own.
        """
        later = self.kv.resume(prefix)
        if later is None:
            self._gain(prefix)
        return later

    def _gain(self, prefix: KvPrefix) -> None:
        """Count what somebody else has computed of the prompt meanwhile: a hit like one at the beginning."""
        gained = max(0, prefix.hit_tokens - self._reached)
        self._hit += gained
        self._reached += gained
        # A prefix says how much came from where, not which part: the device is matched first, so the
        # last tokens are those of the last tier.
        for source, tokens in reversed(list(prefix.sources.items())):
            part = min(gained, tokens)
            if part:
                self._sources[source] += part
            gained -= part

    # Steps

    def schedule_decode(self, drafter: Drafter | None, most_tokens: int) -> Chunk:
        """The next decode step: one token, and as many proposals as the step has room for."""
        drafts = self._drafts(drafter, most_tokens - 1) if drafter is not None and most_tokens > 1 else ()
        return self.kv.schedule_speculative(drafts) if len(drafts) else self.kv.schedule_decode()

    def _drafts(self, drafter: Drafter, most: int) -> TokenIds:
        """What a drafter proposes; nothing where that is no proposal: speculation never costs a request."""
        try:
            proposed = drafter.propose(self.kv.tokens, self.kv.beside.live_slots)
            given = token_array(proposed)[: min(most, drafter.max_drafts)]
            outside = [token for token in given.tolist() if token >= self.vocab_size]
            if outside:
                raise UsageFault(f"proposed tokens {outside[:4]} outside a vocabulary of {self.vocab_size}")  # noqa: TRY301
        except Exception as error:  # noqa: BLE001 - kept in the result; the model's own token is sampled
            self._drafter_fault = self._drafter_fault or repr(error)
            return ()
        return given

    def commit(self, chunk: Chunk, logits: Tensor, wanted: NDArray[np.int64]) -> Finish | None:
        """The step that ran a chunk is done: sample if it emits, register what is complete.

        Args:
            chunk: the outstanding one.
            logits: [k, vocab], without NaN.
            wanted: int64[k], rows of the chunk that they belong to.

        Returns:
            Why the request has ended, or None if it goes on.
        """
        stops = self.request.stop_token_ids
        new: tuple[int, ...] = ()
        self._recomputed += max(0, min(chunk.end, self._reached) - chunk.start)
        if self.kv.prefilling:
            token = self._first(logits) if chunk.emits else None
            self.kv.apply_prefill(chunk, token)
            new = () if token is None else (token,)
        else:
            sampled = self.sampler.verify(logits[-1 - chunk.drafts :], chunk.token_ids[1:].tolist())
            new = self.kv.apply_speculative(chunk, sampled, stop_token_ids=stops)
            self._drafted += chunk.drafts
            self._accepted += len(new) - 1
        self._reached = max(self._reached, self.kv.committed_tokens)
        self._split.append(len(chunk.token_ids))
        if self.request.capture != "none":
            # Rows behind the last sampled token are of rejected proposals: nobody's logits.
            kept = len(wanted) - max(0, chunk.drafts + 1 - max(1, len(new))) if chunk.drafts else len(wanted)
            self._capture(logits[:kept], chunk.start + wanted[:kept])
        if new and new[-1] in stops:
            return Finish.STOP
        return Finish.LENGTH if self.kv.finished else None

    def _first(self, logits: Tensor) -> int:
        token, self.forced = self.forced, None
        return self.sampler(logits[-1]) if token is None else token

    def _capture(self, logits: Tensor, positions: NDArray[np.int64]) -> None:
        """Keep logits [k, vocab] of rows that were not kept before."""
        first = int(np.searchsorted(positions, self._captured))
        if first < len(positions):
            self._logits.append(logits[first:].detach().cpu())
            self._positions.append(positions[first:])
            self._captured = int(positions[-1]) + 1

    def result(self, finish: Finish, reason: str) -> Result:
        """What became of it."""
        return Result(
            id=self.request.id,
            prompt_tokens=self.kv.prompt_len,
            tokens=tuple(self.kv.tokens[self.kv.prompt_len :].tolist()),
            finish=finish,
            reason=reason,
            hit_tokens=self._hit,
            sources=dict(self._sources),
            degraded=self.prefix.degraded,
            split=tuple(self._split),
            logits=torch.cat(self._logits) if self._logits else None,
            positions=np.concatenate(self._positions) if self._positions else None,
            drafted_tokens=self._drafted,
            accepted_tokens=self._accepted,
            drafter_fault=self._drafter_fault,
            preemptions=self._preemptions,
            recomputed_tokens=self._recomputed,
        )

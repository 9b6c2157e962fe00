"""An admitted request: its pages, its sampler, and what it has produced."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcontract.engine.request import Finish, Request, Result
from kvcontract.engine.sampling import Sampler
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
        sealed_pages: leading pages that were handed to the store.
    """

    request: Request
    prefix: KvPrefix
    kv: RequestKv
    sampler: Sampler
    sealed_pages: int = 0
    _split: list[int] = field(default_factory=list)
    _logits: list[Tensor] = field(default_factory=list)
    _positions: list[NDArray[np.int64]] = field(default_factory=list)

    @property
    def prefilling(self) -> bool:
        """Whether tokens of the prompt are still to be run."""
        return self.kv.committed_tokens < self.kv.prompt_len

    def commit(self, chunk: Chunk, logits: Tensor, wanted: NDArray[np.int64]) -> Finish | None:
        """The step that ran a chunk is done: sample if it emits, register what is complete.

        Args:
            chunk: the outstanding one.
            logits: [k, vocab], without NaN.
            wanted: int64[k], rows of the chunk that they belong to.

        Returns:
            Why the request has ended, or None if it goes on.
        """
        token = self.sampler(logits[-1]) if chunk.emits else None
        if token is not None and chunk.start >= self.kv.prompt_len:
            self.kv.apply_decode(chunk, token)
        else:
            self.kv.apply_prefill(chunk, token)
        self._split.append(len(chunk.token_ids))
        if self.request.capture != "none" and len(wanted):
            self._logits.append(logits.detach().cpu())
            self._positions.append(chunk.start + wanted)
        if token is not None and token in self.request.stop_token_ids:
            return Finish.STOP
        return Finish.LENGTH if self.kv.finished else None

    def result(self, finish: Finish, reason: str) -> Result:
        """What became of it."""
        return Result(
            id=self.request.id,
            prompt_tokens=self.kv.prompt_len,
            tokens=tuple(self.kv.tokens[self.kv.prompt_len :].tolist()),
            finish=finish,
            reason=reason,
            hit_tokens=self.kv.hit_tokens,
            sources=self.prefix.sources,
            degraded=self.prefix.degraded,
            split=tuple(self._split),
            logits=torch.cat(self._logits) if self._logits else None,
            positions=np.concatenate(self._positions) if self._positions else None,
        )

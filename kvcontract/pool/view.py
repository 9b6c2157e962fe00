"""What an admitted request has: tokens, pages, keys, and how far it is. `request.py` has its verbs."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvcontract.contract.errors import UsageFault
from kvcontract.pool.checkpoints import Checkpoints
from kvcontract.pool.chunk import FULL, Chunk
from kvcontract.pool.handles import NO_PAGES, Entitlement
from kvcontract.pool.holdings import Holdings, Pairs
from kvcontract.pool.index import Keys, Pages
from kvcontract.pool.keys import Keyer
from kvcontract.pool.pool import BlockPool
from kvcontract.pool.sequence import Tokens, TokenSequence

_Scalar = TypeVar("_Scalar", bound=np.generic)


class RequestView:
    """What an admitted request has.

    Attributes:
        scope: who may share its pages.
        prompt_len: tokens of the prompt.
        max_new_tokens: most tokens that it may sample.
        hit_tokens: tokens it started with.
        committed_tokens: tokens whose KV has been written.
        checkpoint: the boundary that it stands at, where somebody wants to go on from; None elsewhere.
    """

    def __init__(
        self,
        pool: BlockPool,
        entitlement: Entitlement,
        beside: Holdings,
        sequence: TokenSequence,
        *,
        max_new_tokens: int,
        checkpoints: Checkpoints,
    ) -> None:
        self.scope = sequence.scope
        self.prompt_len = len(sequence)
        self.max_new_tokens = max_new_tokens
        self.hit_tokens = 0
        self.committed_tokens = 0
        self.checkpoint: int | None = None
        self._pool = pool
        self._entitlement = entitlement
        self._beside = beside
        self._checkpoints = checkpoints
        self._last_checkpoint = 0
        self._sequence = sequence
        self._started = False
        self._preempted = False
        self._reset_from: int | None = None
        self._chunk: Chunk | None = None

    @property
    def pool(self) -> BlockPool:
        """Where its pages come from."""
        return self._pool

    @property
    def tokens(self) -> Tokens:
        """Prompt and sampled tokens, int64, read-only."""
        return _read_only(self._sequence.tokens)

    @property
    def pages(self) -> Pages:
        """Its pages in order, int32, read-only; none while it is preempted."""
        return _read_only(NO_PAGES) if self._preempted else self._entitlement.pages

    @property
    def checkpoints(self) -> Checkpoints:
        """Where it is wanted that others can go on from."""
        return self._checkpoints

    @property
    def beside(self) -> Holdings:
        """What it has in the other pools of the rank."""
        return self._beside

    @property
    def copies(self) -> dict[str, Pairs]:
        """(source, target) blocks to copy before it writes anything, all groups of each, by space.

        Of a partial page, of a branch's parent, or of the snapshot that it begins with (B23, E4, F4).
        """
        own = self._entitlement.copies
        return {**({FULL: own} if own else {}), **self._beside.copies}

    @property
    def registered(self) -> int:
        """How many of its leading pages are complete and named."""
        return 0 if self._preempted else self._entitlement.registered_pages

    @property
    def keys(self) -> Keys:
        """Keys of the complete pages, uint64 [registered, 2], read-only."""
        return _read_only(self._sequence.keys(self.registered))

    def record_keys(self, keyer: Keyer) -> Keys:
        """Keys of the records that its complete pages make up, uint64 [n, 2], read-only.

        Args:
            keyer: of records, which are as long as a page or span several.
        """
        return _read_only(self._sequence.record_keys(keyer, self.registered * self._pool.page_tokens))

    @property
    def lifetime_pages(self) -> int:
        """Pages it was promised in all."""
        return self._entitlement.lifetime_pages

    @property
    def new_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self._sequence) - self.prompt_len

    @property
    def prefilling(self) -> bool:
        """Whether the next step is a prefill: known tokens, beyond the last sampled one, are to be run."""
        return len(self._sequence) - self.committed_tokens > int(self.new_tokens > 0)

    @property
    def finished(self) -> bool:
        """Whether all of its new tokens have been sampled."""
        return self.new_tokens == self.max_new_tokens

    @property
    def released(self) -> bool:
        """Whether its pages have been given back, for good or until `resume`."""
        return not self._entitlement.live

    @property
    def suspect(self) -> bool:
        """Whether nothing of it is to be found from now on: it has ended, and was marked for reset (B13)."""
        return self.released and self._reset_from is not None

    @property
    def preempted(self) -> bool:
        """Whether it waits for `resume`."""
        return self._preempted

    # For its verbs

    def _wanted(self, position: int) -> bool:
        """Whether somebody wants to go on from there."""
        return self._checkpoints.wanted(position, self._last_checkpoint, decoding=not self.prefilling)

    def _inside(self, start: int, end: int) -> list[int]:
        """Where within a step over known tokens a state is wanted."""
        media = self._sequence.media
        wanted = self._checkpoints.inside(start, end) if self.prefilling else ()
        return [position for position in wanted if media.floor(position) == position]

    def _refuse_when_busy(self) -> None:
        if self._chunk is not None or self.released:
            gone = "the request is preempted; resume it" if self._preempted else "the request is released"
            raise UsageFault(gone if self.released else "a chunk is outstanding")

    def _expect(self, chunk: Chunk, *, drafts: bool) -> None:
        if chunk is not self._chunk:
            raise UsageFault("not the outstanding chunk of this request: applied, reverted or another's")
        if chunk.drafts and not drafts:
            raise UsageFault(
                f"a chunk with {chunk.drafts} drafts; apply_speculative says which were accepted"
            )


def _read_only(array: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
    view = array.view()
    view.flags.writeable = False
    return view

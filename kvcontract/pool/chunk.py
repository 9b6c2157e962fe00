"""What passes between a request and a scheduler: steps, the prefix a request starts from, checks on both."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvcontract.contract.errors import UsageFault
from kvcontract.pool.handles import Hold
from kvcontract.pool.holdings import refuse_without_sides
from kvcontract.pool.index import Pages
from kvcontract.pool.keys import Keyer, TokenIds, token_array
from kvcontract.pool.pool import BlockPool
from kvcontract.pool.sequence import Tokens, TokenSequence

FULL = "full"
"""Name of the block-id space of groups that reach back to the first token."""


class Prefix(Protocol):
    """What a resolve gives a request: the resident prefix it may start from."""

    @property
    def hold(self) -> Hold | None:
        """Pins exactly the pages of the prefix; None for an empty one."""

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
        checkpoint: the step's end, where it is to be sealed so that somebody can go on from there.
        drafts: how many of the last tokens are proposals; each row before one is sampled too (B18).
        emits_at: per bounded group, (position, slot): where within the step its state is to be written, too.
        copies: (source, target) blocks to copy first, by space, all groups of each (B23, E4, F4).
    """

    token_ids: Tokens
    start: int
    pages: dict[str, Pages]
    emits: bool
    slots: dict[str, int] = field(default_factory=dict)
    checkpoint: int | None = None
    drafts: int = 0
    emits_at: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    copies: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    @property
    def context_len(self) -> int:
        """Tokens in the cache before the step."""
        return self.start

    @property
    def end(self) -> int:
        """Tokens in the cache after the step, rejected proposals included."""
        return self.start + len(self.token_ids)


def checked_prompt(
    pool: BlockPool, prompt_tokens: TokenIds, max_new_tokens: int, keyer: Keyer
) -> npt.NDArray[np.integer[Any]]:
    """The prompt as an array, after checking all that a caller may have got wrong.

    Raises:
        UsageFault: names every fault.
    """
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


def usable_hold(
    prefix: Prefix, pool: BlockPool, sequence: TokenSequence, anchor: int | None = None
) -> Hold | None:
    """The hold of a prefix, after checking that it is a prefix of this sequence in this pool and scope.

    With an anchor the prefix is all of the sequence, which it may end within a page (G4).

    Raises:
        UsageFault: it is not.
    """
    hold, hit, known = prefix.hold, prefix.hit_tokens, len(sequence)
    pinned = 0 if hold is None else hold.hit_pages
    key = None if hold is None else hold.boundary_key
    beyond = hit - pinned * pool.page_tokens
    whole = 0 < beyond <= pool.page_tokens if key is not None else beyond == 0  # A13
    if not whole or (hit >= known if anchor is None else hit != known):  # A12
        also = "" if key is None else " and a partial one"
        rest = "leave a token to compute" if anchor is None else "be all of it, as an anchor follows"
        raise UsageFault(
            f"a prefix of {hit} tokens that pins {pinned} pages of {pool.page_tokens}{also},"
            f" for a sequence of {known}: it must pin exactly its pages and {rest}"
        )
    if sequence.media.floor(hit) != hit:
        raise UsageFault(f"a prefix of {hit} tokens ends inside an uncut item; cut it by Media.floor_pages")
    if hold is not None and hold.pool is not pool:
        raise UsageFault("the prefix was resolved in another pool")
    names_agree = hold is None or np.array_equal(hold.keys, sequence.keys(pinned))
    if not names_agree or (
        key is not None and not np.array_equal(key, sequence.partial_key(hit, anchor))
    ):  # D1
        raise UsageFault("the prefix was resolved for other tokens or another scope")
    refuse_without_sides(pool.sides, None if hold is None else hold.sides, pinned)
    return hold

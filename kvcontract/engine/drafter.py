"""Speculative decoding: a drafter proposes tokens, the model verifies them in one step (B18).

A drafter is a small object; whatever it proposes, what is sampled is what the model alone would have sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.executor import FieldRef

if TYPE_CHECKING:
    from torch import Tensor


class Drafter(Protocol):
    """Proposes the tokens that may come next."""

    @property
    def max_drafts(self) -> int:
        """Most tokens of one proposal."""
        ...

    def bind(self, views: Mapping[FieldRef, Tensor]) -> None:
        """Receive the arenas, once, like an executor; one that keeps no state ignores them."""
        ...

    def propose(self, tokens: NDArray[np.int64], slots: Mapping[str, int]) -> Sequence[int]:
        """At most `max_drafts` tokens to come next; may be none.

        Args:
            tokens: int64[n], the request's, prompt included.
            slots: its live slot in each bounded group.
        """
        ...


class NgramDrafter:
    """Proposes what followed the last tokens when they stood in the request before.

    Args:
        max_drafts: most tokens of one proposal.
        longest: length of the longest run of last tokens that is looked for; shorter ones follow.

    Raises:
        UsageFault: a number below 1.
    """

    def __init__(self, max_drafts: int = 16, longest: int = 3) -> None:
        if max_drafts < 1 or longest < 1:
            raise UsageFault(f"max_drafts {max_drafts}, longest {longest}: expected at least 1 each")
        self.max_drafts = max_drafts
        self._longest = longest

    def bind(self, views: Mapping[FieldRef, Tensor]) -> None:
        """Nothing: the request's own tokens are all it needs."""

    def propose(self, tokens: NDArray[np.int64], slots: Mapping[str, int]) -> Sequence[int]:
        """What followed the latest earlier occurrence of the longest run that has one."""
        del slots
        for length in range(min(self._longest, len(tokens) - 1), 0, -1):
            windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], length)
            found = np.flatnonzero((windows == tokens[-length:]).all(axis=1))
            if len(found):
                start = int(found[-1]) + length
                return [int(token) for token in tokens[start : start + self.max_drafts]]
        return ()

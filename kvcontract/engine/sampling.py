"""The next token from a row of logits: greedy, temperature, top-p; no more.

Sampling runs on the CPU in float64 with a generator of the request's own, so that a seed gives the same
tokens whatever else is in the batch and whatever the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from kvcontract.contract.errors import UsageFault

COLDEST: Final = 1e-5
"""Below this, dividing logits by the temperature overflows; greedy is 0."""

SEEDS: Final = 2**63


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: sample among the fewest likeliest tokens that together reach this probability.
        seed: of the request's generator; None draws one.

    Raises:
        UsageFault: a value out of range; all are named.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        faults = []
        if not (math.isfinite(self.temperature) and (self.temperature == 0.0 or self.temperature >= COLDEST)):
            faults.append(f"temperature {self.temperature}: expected 0 (greedy), or {COLDEST:g} or more")
        if self.seed is not None and not 0 <= self.seed < SEEDS:
            faults.append(f"seed {self.seed}: expected 0 to 2**63 - 1")
        if not 0.0 < self.top_p <= 1.0:
            faults.append(f"top_p {self.top_p}: expected more than 0 and at most 1")
        if faults:
            raise UsageFault("; ".join(faults))

    def branch(self, number: int) -> Sampling:
        """The same for one of several requests on one prompt: a seed is raised by its number."""
        return self if self.seed is None else replace(self, seed=(self.seed + number) % SEEDS)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0


class Sampler:
    """Chooses one request's tokens; advances its generator once a token.

    Args:
        sampling: how.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def verify(self, logits: Tensor, drafts: Sequence[int]) -> list[int]:
        """Sample row after row for as long as what is sampled equals what was proposed.

        What comes out, and what the generator has drawn, is the same as without any proposal.

        Args:
            logits: [k + 1, vocab], the row before each draft and the one after the last.
            drafts: k proposed tokens.

        Returns:
            1 to k + 1 tokens: the accepted drafts, then one of the model's own.
        """
        sampled: list[int] = []
        for row, draft in zip(logits, [*drafts, None], strict=True):
            sampled.append(self(row))
            if sampled[-1] != draft:
                break
        return sampled

    def __call__(self, logits: Tensor) -> int:
        """The next token.

        Args:
            logits: [vocab], without NaN.
        """
        if self._sampling.greedy:
            return int(logits.argmax())
        scaled = logits.detach().to("cpu", torch.float64) / self._sampling.temperature
        likely, tokens = torch.softmax(scaled, dim=-1).sort(descending=True, stable=True)
        # The token that crosses top_p is kept; so is the first one, always.
        kept = likely.masked_fill(likely.cumsum(-1) - likely >= self._sampling.top_p, 0.0)
        return int(tokens[torch.multinomial(kept, 1, generator=self._generator)])

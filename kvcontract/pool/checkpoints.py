"""Where it is wanted that somebody can go on from: checkpoints of one request, as data.

A full page is its own checkpoint.  A state that is rewritten at each token is copied where a step ends, and
of a window only what lies before some boundaries is worth keeping; so it matters where steps end, and which
ends count.  Splitting a prompt at every boundary would pay for each with a forward pass: steps end where
they do anyway, and extra ends are placed where a later prompt is likely to leave this one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """What is wanted of one request.

    Attributes:
        granule_tokens: only multiples of this can be checkpoints.
        stops: steps end at these positions, ascending, and each is a checkpoint.
        every_tokens: where a step ends anyway, it is one if the last lies at least so far back; None: never.
        rolling: while tokens are sampled, every multiple is one, and replaces the one before it.
        interior: a state can be had inside a step, so that none has to end for it.
    """

    granule_tokens: int = 1
    stops: tuple[int, ...] = ()
    every_tokens: int | None = None
    rolling: bool = False
    interior: bool = False

    def stop(self, start: int, end: int) -> int:
        """Where a step over known tokens from `start` that could reach `end` is to end."""
        if self.interior:
            return end
        return next((position for position in self.stops if start < position < end), end)

    def inside(self, start: int, end: int) -> tuple[int, ...]:
        """Where within a step a state is wanted, ascending; the step's own end is another matter."""
        if not self.interior:
            return ()
        wanted = {stop for stop in self.stops if start < stop < end}
        if self.every_tokens is not None:
            step = -(-self.every_tokens // self.granule_tokens) * self.granule_tokens
            wanted |= set(range(start // step * step + step, end, step))
        return tuple(sorted(wanted))

    def branches(self, prompt_tokens: int) -> tuple[int, ...]:
        """Those of the stops at which others are known, or expected, to go another way."""
        return tuple(stop for stop in self.stops if stop + self.granule_tokens <= prompt_tokens)

    def wanted(self, position: int, last: int, *, decoding: bool) -> bool:
        """Whether there is to be a checkpoint where a step has ended.

        Args:
            position: committed tokens.
            last: where the last one was.
            decoding: whether it is behind the prompt.
        """
        if position % self.granule_tokens or position <= last:
            return False
        if decoding:
            return self.rolling
        return position in self.stops or (
            self.every_tokens is not None and position - last >= self.every_tokens
        )


NO_CHECKPOINTS: Final = Checkpoints()


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """Where checkpoints are wanted of any request.

    Attributes:
        prompt_end: at the last multiple within the prompt: a later turn leaves it there.
        branches: where an earlier prompt is known to have gone another way: others will, too.
        every_tokens: see `Checkpoints`.
        decoding: see `Checkpoints.rolling`.
    """

    prompt_end: bool = True
    branches: bool = True
    every_tokens: int | None = 2048
    decoding: bool = True

    def of(
        self,
        granule_tokens: int,
        prompt_tokens: int,
        branches: Iterable[int] = (),
        *,
        interior: bool = False,
    ) -> Checkpoints:
        """What is wanted of one request.

        Args:
            granule_tokens: only multiples of this can be checkpoints.
            prompt_tokens: its length.
            branches: positions at which earlier prompts went another way, or callers expect that to happen.
            interior: see `Checkpoints`.
        """
        wanted = {prompt_tokens} if self.prompt_end else set()
        wanted |= set(branches) if self.branches else set()
        floors = {position // granule_tokens * granule_tokens for position in wanted}
        stops = tuple(sorted(floor for floor in floors if 0 < floor <= prompt_tokens))
        return Checkpoints(granule_tokens, stops, self.every_tokens, self.decoding, interior)


DEFAULT_CHECKPOINTS: Final = CheckpointPolicy()

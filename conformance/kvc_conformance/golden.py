"""What the golden checks compare, and the words for what they find: numpy only, no engine and no model.

Each function that judges returns None, or what is wrong in words for someone who has just written a plugin.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]

MAX_DIFFERENCE: Final = 1e-5
"""Largest difference of a logit from the unmodified model's, in float32."""

MAX_REGRET_NAT: Final = 0.20
"""How much less likely, to the reference, our best token may be than its own best."""

MAX_MEAN_NAT: Final = 0.06
MAX_P99_NAT: Final = 0.20

COMPUTED_BITS: Final = 16
"""Of the narrowest type that models compute in; what a cache keeps in fewer bits may be further away."""

MAX_RATIO: Final = 2.0
"""How far we may be from the model in float32, in units of how far the unmodified model is by itself."""

TOP: Final = 8
"""Log-probabilities are compared over the reference's likeliest tokens, so many."""


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One request as it was run.

    Attributes:
        label: what a report calls it.
        prompt: int64[n].
        tokens: what was sampled.
        logits: float32[k, vocab] of every position that was run.
        positions: int64[k] of these.
        split: tokens of each step it ran in.
        hit_tokens: tokens that were not computed.
        sources: hit tokens by where they came from.
        states: by the first position of each step, what lay in its slots before and after: uint8[bytes].
    """

    label: str
    prompt: NDArray[np.int64]
    tokens: tuple[int, ...]
    logits: Logits
    positions: NDArray[np.int64]
    split: tuple[int, ...]
    hit_tokens: int = 0
    sources: Mapping[str, int] = field(default_factory=dict)
    states: Mapping[int, tuple[NDArray[np.uint8], NDArray[np.uint8]]] = field(default_factory=dict)

    @property
    def stream(self) -> NDArray[np.int64]:
        """Every token that was fed: the last one sampled never was."""
        return np.concatenate([self.prompt, np.array(self.tokens[:-1], np.int64)])

    @property
    def sampled_at(self) -> NDArray[np.int64]:
        """Positions whose logits a token was sampled from."""
        return np.arange(len(self.prompt) - 1, len(self.stream))

    def step_of(self, position: int) -> tuple[int, int]:
        """First and last position of the step that ran a position."""
        ends = np.cumsum([self.hit_tokens, *self.split]).tolist()
        begin, end = next((a, b) for a, b in pairwise(ends) if a <= position < b)
        return begin, end - 1


def wrong_logits(run: Run, expected: Logits, page_tokens: int, reaches: Collection[int] = ()) -> str | None:
    """Gate a: the logits of a float32 run against those of the unmodified model.

    Args:
        run: from position 0.
        expected: float32[positions, vocab], of every position of the stream.
        page_tokens: tokens of a page.
        reaches: tokens of the windows and chunks that are declared.
    """
    if run.logits.shape != expected.shape:
        return (
            f"{run.label}: logits of shape {list(run.logits.shape)}; the unmodified model gives"
            f" {list(expected.shape)}, positions x vocabulary"
        )
    gap = differences(run.logits, expected)
    wrong = np.flatnonzero(gap > MAX_DIFFERENCE)
    if not len(wrong):
        return None
    first = int(run.positions[wrong[0]])
    worst = float(gap.max())
    return "\n".join(
        [
            (
                f"{run.label}: logits differ from the unmodified model's by up to {worst:.2g};"
                f" {MAX_DIFFERENCE:g} is allowed"
            ),
            f"first wrong: position {first}, {stage(run, first)}; {relation(first, page_tokens)}",
            f"{len(wrong)} of {len(gap)} positions are wrong{_all_others(first, run)}",
            *(at_the_edge(tokens) for tokens in reaches if abs(first - tokens) <= 1),
            cause(run, first, page_tokens),
        ]
    )


def wrong_tokens(run: Run, expected: Logits) -> str | None:
    """Gate a: greedy tokens against the unmodified model's, which was fed the same stream."""
    theirs = expected[run.sampled_at].argmax(axis=1)
    for position, our, their in zip(run.sampled_at.tolist(), run.tokens, theirs.tolist(), strict=True):
        if our != their:
            return (
                f"{run.label}: after position {position} the token {our} was sampled, the unmodified model's"
                f" best is {their} (it leads by {margins(expected[position : position + 1])[0]:.2g})"
            )
    return None


def wrong_bits(warm: Run, cold: Run, page_tokens: int) -> str | None:
    """Gate b: a run that began with a hit against the same request's cold run, bit for bit."""
    theirs = cold.logits[np.searchsorted(cold.positions, warm.positions)]
    differs = (warm.logits.view(np.uint32) != theirs.view(np.uint32)).any(axis=1)
    if not differs.any():
        return None if warm.tokens == cold.tokens else f"{warm.label}: equal logits, other tokens"
    gap = differences(warm.logits, theirs)
    first = int(warm.positions[differs.argmax()])
    spot = "the first after the hit" if first == warm.hit_tokens else relation(first, page_tokens)
    origin = "the tier and was restored" if "device" not in warm.sources else "pages still on the device"
    return "\n".join(
        [
            (
                f"{warm.label}: began after {warm.hit_tokens} tokens whose state came from {origin}; its"
                f" logits differ from the cold run's by up to {gap.max():.2g}, and not one bit may differ"
            ),
            f"first different: position {first}, {stage(warm, first)}; {spot}",
            f"{int(differs.sum())} of {len(differs)} positions differ",
            (
                "the steps were cut and batched alike, so the state they began from differs: something a step"
                " reads lies outside the declared arenas, or a page did not keep what was written"
            ),
        ]
    )


def wrong_hit(run: Run, source: str, tokens: int) -> str | None:
    """Whether a run began where it should, from where it should."""
    if run.hit_tokens == tokens and dict(run.sources) == {source: tokens}:
        return None
    found = ", ".join(f"{count} from {name}" for name, count in run.sources.items()) or "none"
    return f"{run.label}: hit {run.hit_tokens} tokens ({found}); expected {tokens} from {source}"


@dataclass(frozen=True, slots=True)
class Distance:
    """How far one distribution over the next token is from another, at many positions.

    Attributes:
        regret: float64[k], nat: how much less likely the reference finds our best token than its own.
        top: float64[k, TOP], nat: differences of log-probability over the reference's likeliest tokens.
    """

    regret: NDArray[np.float64]
    top: NDArray[np.float64]

    @classmethod
    def of(cls, ours: Logits, reference: Logits) -> Distance:
        """Compare float32[k, vocab] with float32[k, vocab]."""
        mine, theirs = log_probabilities(ours), log_probabilities(reference)
        picked = np.take_along_axis(theirs, ours.argmax(axis=1)[:, None], axis=1)[:, 0]
        likeliest = np.argsort(-theirs, axis=1, kind="stable")[:, :TOP]
        top = np.take_along_axis(mine, likeliest, axis=1) - np.take_along_axis(theirs, likeliest, axis=1)
        return cls(theirs.max(axis=1) - picked, np.abs(top))

    @property
    def mean(self) -> float:
        """nat, of all differences."""
        return float(self.top.mean())

    def __str__(self) -> str:
        return (
            f"regret {self.regret.max():.3f} nat at most, top {TOP} mean {self.mean:.4f},"
            f" p99 {np.quantile(self.top, 0.99):.4f} ({len(self.regret)} positions)"
        )


def beyond_bounds(
    run: Run, reference: Logits, page_tokens: int, other: str, bits: int = COMPUTED_BITS
) -> str | None:
    """Gate c: whether a run's distributions stay near another's.

    Args:
        run: with logits of the same positions as the reference.
        reference: float32[k, vocab].
        page_tokens: tokens of a page.
        other: whose logits the reference is.
        bits: of the narrowest element that is declared to be kept; half as many are four times the bounds.
    """
    if not np.isfinite(run.logits).all() or run.logits.shape != reference.shape:
        return (
            f"{run.label}: logits are not finite, or not of shape {list(reference.shape)} like {other}'s:"
            f" {list(run.logits.shape)}"
        )
    found, room = Distance.of(run.logits, reference), max(1.0, COMPUTED_BITS / bits) ** 2
    measured = (
        ("regret of the best token", float(found.regret.max()), room * MAX_REGRET_NAT),
        (f"mean |log-probability difference| over the top {TOP}", found.mean, room * MAX_MEAN_NAT),
        (f"its 99th percentile over the top {TOP}", float(np.quantile(found.top, 0.99)), room * MAX_P99_NAT),
    )
    broken = [
        f"{what}: {value:.3f} nat, allowed {bound:.2f}"
        for what, value, bound in measured
        if not value <= bound
    ]
    if not broken:
        return None
    row = int(np.argmax(np.maximum(found.regret, found.top.max(axis=1))))
    position = int(run.positions[row])
    return "\n".join(
        [
            f"{run.label}, against {other}: {'; '.join(broken)}",
            f"worst: position {position}, {stage(run, position)}; {relation(position, page_tokens)}",
            (
                f"rounding to {min(bits, COMPUTED_BITS)} bits stays below these bounds; more is precision"
                " lost in the cache, or rows that are wrong (then KVC-PREFIX-01 says which)"
            ),
        ]
    )


def less_exact(run: Run, reference: Logits, exact: Logits, dtype: str) -> str | None:
    """Gate c: whether a run is further from the model in float32 than computing in its own type explains.

    Args:
        run: with logits of the same positions as the others.
        reference: float32[k, vocab], of the unmodified model in the run's type.
        exact: float32[k, vocab], of the unmodified model in float32.
        dtype: that type.
    """
    ours, own = Distance.of(run.logits, exact).mean, Distance.of(reference, exact).mean
    if ours <= MAX_RATIO * own + MAX_DIFFERENCE:
        return None
    return (
        f"{run.label}: {ours:.4f} nat away from the unmodified model in float32 (mean over the top {TOP}); in"
        f" {dtype} the unmodified model itself is {own:.4f} away, and {MAX_RATIO:g} times that is allowed\n"
        f"precision is lost in the cache: look for a type narrower than {dtype} that rows are converted to"
    )


# Words


def stage(run: Run, position: int) -> str:
    """In which step a position was run."""
    begin, end = run.step_of(position)
    if begin == end and position >= len(run.prompt):
        return f"a decode step with {begin} tokens before it"
    return f"in the prefill step of positions {begin}..{end}"


def relation(position: int, page_tokens: int) -> str:
    """Where a position stands to the page boundaries."""
    page, row = divmod(position, page_tokens)
    if row == 0 and page > 0:
        return (
            f"the first of page {page}, and so the first to read back the last row (position {position - 1})"
            f" of page {page - 1}"
        )
    if row == page_tokens - 1:
        return f"the last row of page {page}"
    return f"row {row} of page {page}"


def cause(run: Run, first: int, page_tokens: int) -> str:
    """Where to look, given the first wrong position."""
    begin, _ = run.step_of(first)
    if first == 0:
        return (
            "position 0 reads no row but its own: that comes back other than the model made it (precision,"
            " order of heads or dims), or the model, its weights or its config differ"
        )
    if first % page_tokens == 0:
        return (
            f"everything inside page {first // page_tokens - 1} was right: look at how rows are found across"
            " the page boundary (the last row of a page, the page table's next entry)"
        )
    if first == begin:
        return (
            "it is the first of its step, and so the first to read rows that earlier steps wrote: look at"
            " what a step writes to the arenas, and at how many rows the next one reads"
        )
    if (first + 1) % page_tokens == 0:
        return "it fills its page: look at the last row of a page, how it is written and read"
    return "each position reads every earlier one: a row at or before it is missing, wrong, or one too many"


def at_the_edge(tokens: int) -> str:
    """Where to look if the first wrong position is about as far as a window or chunk reaches."""
    return (
        f"{tokens} tokens are what a window or chunk is declared to reach, and here it first leaves one out:"
        " look at how far back is read"
    )


def nan_words(reason: str) -> str:
    """What NaN in the logits means here."""
    return (
        f"{reason}\nevery byte of the arenas that no step has written is NaN here: the executor read a row"
        " beyond the context, a page of another request, or its own row before it was written"
    )


def _all_others(first: int, run: Run) -> str:
    before = int(np.searchsorted(run.positions, first))
    return f"; the {before} before it are right" if before else ""


def differences(ours: Logits, theirs: Logits) -> NDArray[np.float64]:
    """float64[k]: the largest difference at each position; NaN counts as infinite."""
    gap = np.abs(ours.astype(np.float64) - theirs.astype(np.float64)).max(axis=1)
    return np.where(np.isnan(gap), np.inf, gap)


def margins(logits: Logits) -> NDArray[np.float64]:
    """float64[k]: by how much the best token leads."""
    best = np.partition(logits.astype(np.float64), -2, axis=1)[:, -2:]
    return best[:, 1] - best[:, 0]


def log_probabilities(logits: Logits) -> NDArray[np.float64]:
    """float64[k, vocab]."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    found: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return found

"""What goes into the engine and what comes out: `Request` and `Result`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.executor import Limits
from kvcontract.contract.model import Scope
from kvcontract.engine.sampling import Sampling
from kvcontract.pool.keys import TokenIds, token_array
from kvcontract.store.policy import PLAIN, ResolvePolicy

GREEDY: Final = Sampling()
Capture = Literal["none", "sampled", "all"]


class Finish(Enum):
    """Why a request ended."""

    LENGTH = "length"
    STOP = "stop"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request, checked.

    Attributes:
        id: given by the engine, never used twice.
        prompt: int64[n].
        max_new_tokens: most tokens to sample.
        sampling: how tokens are chosen.
        scope: who may share its pages.
        stop_token_ids: sampling one of these ends the request; it is the last token of the result.
        capture: whose logits the result keeps: none, of rows a token is sampled from, or of all rows run.
        policy: how far a resolve may go.
        priority: a higher one is admitted before, and preempts, a lower one.
        turns: positions at which later prompts are expected to leave this one.
        branches: further requests that go on from this one's prompt, each with a seed of its own.
    """

    id: int
    prompt: NDArray[np.int64]
    max_new_tokens: int
    sampling: Sampling
    scope: Scope
    stop_token_ids: frozenset[int]
    capture: Capture
    policy: ResolvePolicy = PLAIN
    priority: int = 0
    turns: tuple[int, ...] = ()
    branches: tuple[Request, ...] = ()

    @property
    def ids(self) -> tuple[int, ...]:
        """Its own id, and those of its branches."""
        return (self.id, *(branch.id for branch in self.branches))

    def within(self, scope: Scope) -> Request:
        """The same in another scope, branches included."""
        branches = tuple(replace(branch, scope=scope) for branch in self.branches)
        return replace(self, scope=scope, branches=branches)

    def branch(self, request_id: int, number: int) -> Request:
        """The same under an id of its own, sampled as number `number` of several."""
        return replace(self, id=request_id, sampling=self.sampling.branch(number))


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """What became of a request.

    Attributes:
        id: of the request.
        prompt_tokens: length of the prompt.
        tokens: what was sampled.
        finish: why it ended.
        reason: in words, where it was refused or failed.
        hit_tokens: tokens of the prompt that were never computed; with the computed ones they are all of it,
            however often it was preempted.
        sources: hit tokens by where they came from (I6).
        degraded: why the hit was shorter than it might have been.
        split: tokens of each step it ran in, in order; they begin at `hit_tokens`.  Of a preempted request
            they include those that were run again.
        logits: [k, vocab] of the captured rows, on the CPU, or None.
        positions: int64[k], position of each captured row.
        drafted_tokens: tokens that a drafter proposed.
        accepted_tokens: how many of them were sampled.
        drafter_fault: the first answer of the drafter that was no proposal, or None.
        preemptions: how often it gave its pages back to go on later (B20).
        recomputed_tokens: tokens that were run again then, because their KV was gone.  What was still on the
            device or came back from a tier is not among them, and neither is a hit.
    """

    id: int
    prompt_tokens: int
    tokens: tuple[int, ...]
    finish: Finish
    reason: str = ""
    hit_tokens: int = 0
    sources: Mapping[str, int] = field(default_factory=dict)
    degraded: tuple[str, ...] = ()
    split: tuple[int, ...] = ()
    logits: Tensor | None = None
    positions: NDArray[np.int64] | None = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafter_fault: str | None = None
    preemptions: int = 0
    recomputed_tokens: int = 0


def refusal(request: Request, finish: Finish, reason: str) -> Result:
    """The result of a request that never ran."""
    return Result(request.id, len(request.prompt), (), finish, reason)


def check_prompt(tokens: TokenIds, max_new: int, limits: Limits, priority: int = 0) -> NDArray[np.int64]:
    """The prompt as int64[n].

    Raises:
        UsageFault: empty, too long, token ids outside the vocabulary (D5) or for what is no text, nothing to
            sample, or a priority that is no integer; all named.
    """
    prompt = token_array(tokens).astype(np.int64)
    faults = []
    if not len(prompt):
        faults.append("the prompt is empty; expected 1 token or more")
    if type(priority) is not int:
        faults.append(f"priority {priority!r}: expected an integer")
    if max_new < 1:
        faults.append(f"max_new_tokens {max_new}: expected 1 or more")
    if len(prompt) + max_new > limits.max_context_tokens:
        faults.append(
            f"{len(prompt)} prompt + {max_new} new tokens: the model's context is {limits.max_context_tokens}"
        )
    outside = np.flatnonzero((prompt < 0) | (prompt >= limits.vocab_size))
    if len(outside):
        first = int(outside[0])
        faults.append(
            f"token id {prompt[first]} at position {first}: expected 0 <= id < {limits.vocab_size}"
            f" ({len(outside)} such tokens)"
        )
    foreign = np.flatnonzero(np.isin(prompt, sorted(limits.placeholder_ids)))
    if len(foreign):
        first = int(foreign[0])
        faults.append(
            f"token id {prompt[first]} at position {first} stands for an image or a sound; expected text"
        )
    if faults:
        raise UsageFault("request refused: " + "; ".join(faults))
    return prompt

"""Speculative decoding and parallel sampling in the engine: the same tokens, and every page back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny_models import CONFIGS, VOCAB, Tiny, tiny
from torch import Tensor

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.executor import FieldRef
from kvcontract.contract.model import Arena, Field, Group, Scope
from kvcontract.engine.build import Assembly, EngineLimits, assemble
from kvcontract.engine.drafter import NgramDrafter
from kvcontract.engine.request import Finish, Result
from kvcontract.engine.sampling import Sampling
from kvcontract.tiers.dram import DramTier

PAGE = 16
SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=11)


class Oracle:
    """Proposes what a run without proposals gave, wrong at every `miss`-th token: all cases of acceptance."""

    max_drafts = 5

    def __init__(self, tokens: Sequence[int], prompt_len: int, miss: int) -> None:
        self._tokens, self._prompt_len, self._miss = list(tokens), prompt_len, miss

    def bind(self, views: Mapping[FieldRef, Tensor]) -> None:
        """No state."""

    def propose(self, tokens: NDArray[np.int64], slots: Mapping[str, int]) -> Sequence[int]:
        """The coming tokens, some of them wrong."""
        del slots
        at = len(tokens) - self._prompt_len
        coming = list(enumerate(self._tokens))[at : at + self.max_drafts]
        return [token if (number + 1) % self._miss else (token + 1) % VOCAB for number, token in coming]


class StatefulNgram(NgramDrafter):
    """An n-gram drafter that keeps its last token in a bounded group that is never restored."""

    def bind(self, views: Mapping[FieldRef, Tensor]) -> None:
        """Keep the view of its state."""
        self.state = views["draft", "last"]

    def propose(self, tokens: NDArray[np.int64], slots: Mapping[str, int]) -> Sequence[int]:
        """Write the state of the request's own slot, then propose."""
        self.state[slots["draft"]] = float(tokens[-1])
        return super().propose(tokens, slots)


@contextmanager
def engine(case: Tiny, *, pages: int, **more: Any) -> Iterator[Assembly]:
    """An engine; afterwards the books balance and nothing is held, promised or taken."""
    with assemble(case.kv, case.layers, hf_model=case.model, pages=pages, **more) as parts:
        yield parts
        assert parts.engine.idle
        parts.pool.check_books()
        assert (parts.pool.held, parts.pool.entitled) == (0, 0)


def prompts(count: int, length: int = 37) -> list[list[int]]:
    """Seeded prompts that repeat themselves, so that an n-gram finds something."""
    rng = np.random.default_rng(5)
    return [[*rng.integers(3, VOCAB, length // 2).tolist()] * 2 for _ in range(count)]


def run(parts: Assembly, asked: list[list[int]], new: int, sampling: Sampling) -> list[Result]:
    """All prompts at once, to the full length."""
    ids = [
        parts.engine.submit(p, new, sampling=sampling, stop_token_ids=[], capture_logits=True) for p in asked
    ]
    results = parts.engine.run()
    return [results[number] for number in ids]


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "drafter", [NgramDrafter(16), NgramDrafter(2, longest=1)], ids=["ngram-16", "ngram-2"]
)
def test_b18_speculation_changes_no_token(sampling: Sampling, drafter: NgramDrafter) -> None:
    """With and without proposals the same tokens come out, and proposals are accepted."""
    case, asked = tiny("qwen3"), prompts(3)
    with engine(case, pages=41, prefix_cache=False) as parts:
        plain = run(parts, asked, 30, sampling)
    with engine(case, pages=41, prefix_cache=False, drafter=drafter) as parts:
        drafted = run(parts, asked, 30, sampling)
        assert parts.pool.available == parts.pool.total
    assert [result.tokens for result in drafted] == [result.tokens for result in plain]
    assert all(result.finish is Finish.LENGTH for result in drafted)
    assert sum(result.drafted_tokens for result in drafted) > 0
    assert all(len(result.split) < len(result.tokens) for result in drafted if result.accepted_tokens > 2)
    for one, two in zip(plain, drafted, strict=True):
        assert one.positions is not None
        assert two.positions is not None
        assert one.positions.tolist() == two.positions.tolist()
        assert one.logits is not None
        assert two.logits is not None
        torch.testing.assert_close(one.logits, two.logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("miss", [1, 2, 3, 7, 10_000])
def test_b18_every_length_of_acceptance(miss: int, sampling: Sampling) -> None:
    """From no accepted draft to all of them: same tokens; rejected rows are rewritten, pages come back."""
    case, [prompt] = tiny("qwen3"), prompts(1, 29)
    with engine(case, pages=12) as parts:
        [plain] = run(parts, [prompt], 50, sampling)
    oracle = Oracle(plain.tokens, len(prompt), miss)
    with engine(case, pages=12, drafter=oracle) as parts:
        [drafted] = run(parts, [prompt], 50, sampling)
    assert drafted.tokens == plain.tokens
    assert drafted.drafted_tokens > 0
    assert (drafted.accepted_tokens > 0) == (miss > 1)


def test_b18_an_end_inside_the_accepted_run_truncates_it() -> None:
    """A stop token among accepted drafts is the last token of the result."""
    case, [prompt] = tiny("qwen3"), prompts(1, 29)
    with engine(case, pages=12) as parts:
        [plain] = run(parts, [prompt], 50, Sampling())
    stop = plain.tokens[7]
    first = plain.tokens.index(stop)
    with engine(case, pages=12, drafter=Oracle(plain.tokens, len(prompt), 10_000)) as parts:
        number = parts.engine.submit(prompt, 50, stop_token_ids=[stop])
        result = parts.engine.run()[number]
    assert result.tokens == plain.tokens[: first + 1]
    assert result.finish is Finish.STOP


def test_b18_speculation_and_prefix_reuse_go_together() -> None:
    """A hit under speculation gives the cold tokens; only rows that were kept are registered."""
    case, [prompt] = tiny("qwen3"), prompts(1, 40)
    with engine(case, pages=21, drafter=NgramDrafter(16)) as parts:
        [cold] = run(parts, [prompt], 40, Sampling())
        [warm] = run(parts, [prompt], 40, Sampling())
        longer = [*prompt, *cold.tokens[:-1], 5]
        [after] = run(parts, [longer], 10, Sampling())
    with engine(case, pages=21) as parts:
        [fresh] = run(parts, [longer], 10, Sampling())
    assert warm.hit_tokens == len(prompt) // PAGE * PAGE
    assert warm.tokens == cold.tokens
    assert after.hit_tokens > warm.hit_tokens
    assert after.tokens == fresh.tokens


def drafting(case: Tiny) -> Tiny:
    """The declaration with a drafter's bounded group, which is never restored."""
    state = Field(name="last", dtype="float32", axes={"one": 1})
    kv = case.kv.model_copy(
        update={
            "groups": (*case.kv.groups, Group(name="draft", kind="bounded", restore="never", optional=True)),
            "arenas": (*case.kv.arenas, Arena.planes(name="draft", group="draft", fields=(state,))),
        }
    )
    return replace(case, kv=kv)


@dataclass(frozen=True)
class Load:
    """Requests of one size, one after another, over a pool that fits one of them."""

    pages: int
    prompt: int
    new: int
    requests: int

    @property
    def lifetime(self) -> int:
        """Pages of one request."""
        return -(-(self.prompt + self.new) // PAGE)

    def free(self, sampling: Sampling, *, identical: bool) -> list[int]:
        """Free pages after each request; every one runs to its full length, and none hits."""
        case = drafting(tiny("qwen3"))
        case.model.config.max_position_embeddings = 4096
        rng, free = np.random.default_rng(3), []
        same = rng.integers(3, VOCAB, self.prompt).tolist()
        limits = EngineLimits(max_requests=2)
        with engine(case, pages=self.pages, drafter=StatefulNgram(16), limits=limits) as parts:
            assert parts.store is None
            for _ in range(self.requests):
                prompt = same if identical else rng.integers(3, VOCAB, self.prompt).tolist()
                [result] = run(parts, [prompt], self.new, sampling)
                assert (result.finish, len(result.tokens), result.hit_tokens) == (Finish.LENGTH, self.new, 0)
                parts.pool.check_books()
                free.append(parts.pool.free)
        return free


SMALL = Load(pages=21, prompt=211, new=66, requests=4)
FULL_SIZE = Load(pages=161, prompt=1643, new=512, requests=20)
"""160 usable pages of 16 tokens for lifetimes of 135: a page kept by each of twenty requests would show."""


@pytest.mark.parametrize("identical", [True, False], ids=["identical", "different"])
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_b12_a_group_that_is_never_restored_keeps_no_page(sampling: Sampling, *, identical: bool) -> None:
    """A 16-token drafter with state that is never restored: after every request every page is free."""
    assert SMALL.free(sampling, identical=identical) == [20] * 4


@pytest.mark.slow
@pytest.mark.parametrize("identical", [True, False], ids=["identical", "different"])
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_b12_twenty_requests_in_a_row(sampling: Sampling, *, identical: bool) -> None:
    """The same at full size: 161 pages, 1,643 + 512 tokens, twenty requests."""
    assert FULL_SIZE.free(sampling, identical=identical) == [160] * 20


def test_b12_without_the_reset_a_page_is_wanting_by_request_three() -> None:
    """With the reset off and the kept pages held by somebody, a third lifetime finds no room."""
    case, rng, kept = drafting(tiny("qwen3")), np.random.default_rng(3), []
    limits = EngineLimits(max_requests=2)
    with engine(case, pages=SMALL.pages, drafter=StatefulNgram(16), limits=limits) as parts:
        parts.pool.set_retention(True)
        while len(kept) < 3 and parts.pool.budget() >= SMALL.lifetime:
            prompt = rng.integers(3, VOCAB, SMALL.prompt).tolist()
            [result] = run(parts, [prompt], SMALL.new, Sampling())
            kept.append(parts.pool.match(parts.engine.keyer.chain([*prompt, *result.tokens], Scope())))
        assert len(kept) < 3
        assert parts.pool.try_admit(SMALL.lifetime) is None
        for hold in kept:
            hold.release()
        assert parts.pool.budget() == parts.pool.total


def test_a_never_restored_group_refuses_tiers_and_store() -> None:
    """Prefix caching is off in that configuration, so a tier would never be asked: it is refused."""
    case = drafting(tiny("qwen3"))
    with DramTierContext() as tier, pytest.raises(UsageFault, match="without a prefix cache"):
        assemble(case.kv, case.layers, hf_model=case.model, pages=12, tiers=[tier])


class DramTierContext:
    """A tier that is closed."""

    def __enter__(self) -> DramTier:
        self._tier = DramTier(1 << 20)
        return self._tier

    def __exit__(self, *_: object) -> None:
        self._tier.close(float("inf"))


@pytest.mark.parametrize("length", [15, 16, 17, 33])
@pytest.mark.parametrize("cache", [True, False])
def test_b23_branches_equal_requests_of_their_own(length: int, *, cache: bool) -> None:
    """N = 3 with a seed: branch i gives what a request with seed + i gives; the prompt is run once."""
    case, [prompt] = tiny("qwen3"), prompts(1, 2 * length)
    prompt = prompt[:length]
    with engine(case, pages=41, prefix_cache=cache) as parts:
        ids = parts.engine.submit_parallel(prompt, 20, 3, sampling=SAMPLED, stop_token_ids=[])
        results = parts.engine.run()
        together = [results[number] for number in ids]
    alone = []
    for branch in range(3):
        with engine(case, pages=41, prefix_cache=cache) as parts:
            alone += run(parts, [prompt], 20, SAMPLED.branch(branch))
    assert [result.tokens for result in together] == [result.tokens for result in alone]
    assert len({result.tokens for result in together}) == 3
    assert [sum(result.split) for result in together[1:]] == [19, 19]  # all but the prompt and the last token


def test_b23_branches_without_room_wait_and_end_the_same() -> None:
    """A pool for one request at a time: the branches come later, with the tokens they would have had."""
    case, [prompt] = tiny("qwen3"), prompts(1, 30)
    with engine(case, pages=5) as parts:
        ids = parts.engine.submit_parallel(prompt, 20, 3, sampling=SAMPLED, stop_token_ids=[])
        results = parts.engine.run()
    with engine(case, pages=41) as parts:
        roomy_ids = parts.engine.submit_parallel(prompt, 20, 3, sampling=SAMPLED, stop_token_ids=[])
        roomy = parts.engine.run()
    assert [results[a].tokens for a in ids] == [roomy[b].tokens for b in roomy_ids]


def test_b23_ending_the_first_leaves_its_branches() -> None:
    """Cancelling the request that runs the prompt does not cancel the others."""
    case, [prompt] = tiny("qwen3"), prompts(1, 30)
    with engine(case, pages=41) as parts:
        ids = parts.engine.submit_parallel(prompt, 20, 3, sampling=SAMPLED, stop_token_ids=[])
        parts.engine.cancel(ids[0])
        results = parts.engine.run()
    assert [results[number].finish for number in ids] == [Finish.CANCELLED, Finish.LENGTH, Finish.LENGTH]


def test_b23_with_speculation() -> None:
    """Branches draft for themselves, and give the tokens they give without."""
    case, [prompt] = tiny("qwen3"), prompts(1, 30)
    found = []
    for drafter in (None, NgramDrafter(16)):
        with engine(case, pages=41, drafter=drafter) as parts:
            ids = parts.engine.submit_parallel(prompt, 40, 2, sampling=SAMPLED, stop_token_ids=[])
            results = parts.engine.run()
            found.append([results[number].tokens for number in ids])
    assert found[0] == found[1]


def test_the_ngram_drafter_proposes_what_followed_before() -> None:
    """The longest run of last tokens that stood before decides; without one there is no proposal."""
    drafter = NgramDrafter(3, longest=2)
    assert drafter.propose(np.array([1, 2, 3, 4, 5, 1, 2]), {}) == [3, 4, 5]
    assert drafter.propose(np.array([9, 2, 3, 4, 5, 1, 2]), {}) == [3, 4, 5]
    assert drafter.propose(np.array([1, 2, 3]), {}) == ()
    assert drafter.propose(np.array([1]), {}) == ()
    assert CONFIGS
    with pytest.raises(UsageFault, match="max_drafts 0"):
        NgramDrafter(0)


class Wild:
    """A drafter that answers with something else once, for its `at`-th proposal."""

    max_drafts = 5

    def __init__(self, answer: Any, at: int) -> None:
        self._answer, self._left = answer, at

    def bind(self, views: Mapping[FieldRef, Tensor]) -> None:
        """No state."""

    def propose(self, tokens: NDArray[np.int64], slots: Mapping[str, int]) -> Any:
        """Nothing, or the answer."""
        del slots
        self._left -= 1
        if self._left:
            return tokens[-2:]
        return self._answer() if callable(self._answer) else self._answer


def drafter_raises() -> Any:
    """Fail."""
    raise RuntimeError("drafter")


@pytest.mark.parametrize("at", [1, 5])
@pytest.mark.parametrize("answer", [drafter_raises, [-1], [1.5], [VOCAB + 3], None, "ab", [4] * 99])
def test_a_drafter_that_misbehaves_costs_no_request(answer: Any, at: int) -> None:
    """Whatever it answers for one request, every request gets the tokens it gets without, and is told."""
    case, asked = tiny("qwen3"), prompts(3)
    with engine(case, pages=41) as parts:
        plain = run(parts, asked, 8, Sampling())
    with engine(case, pages=41, drafter=Wild(answer, at)) as parts:
        drafted = run(parts, asked, 8, Sampling())
    assert [result.tokens for result in drafted] == [result.tokens for result in plain]
    told = [result.drafter_fault for result in drafted if result.drafter_fault]
    assert len(told) == (0 if answer == [4] * 99 else 1)


@pytest.mark.parametrize("cache", [True, False])
def test_closing_while_a_shared_prompt_runs_ends_every_branch(*, cache: bool) -> None:
    """Each of the three has a result, and nothing is open."""
    case, limits = tiny("qwen3"), EngineLimits(max_chunk_tokens=PAGE)
    with assemble(
        case.kv, case.layers, hf_model=case.model, pages=41, prefix_cache=cache, limits=limits
    ) as parts:
        ids = parts.engine.submit_parallel(prompts(1, 120)[0], 20, 3, stop_token_ids=[])
        while not parts.engine.gauges()["active"]:
            parts.engine.step()
        parts.engine.close()
        assert parts.engine.idle
        results = parts.engine.take_results()
        assert {results[number].finish for number in ids} == {Finish.CANCELLED}
        assert parts.pool.held == 0


@pytest.mark.parametrize("wrong", [{"seed": 2**64}, {"seed": -1}, {"temperature": 1e-320}])
def test_sampling_that_cannot_run_is_refused_when_it_is_made(wrong: dict[str, Any]) -> None:
    """Not on the engine's thread, where it would cost a request."""
    with pytest.raises(UsageFault, match=next(iter(wrong))):
        Sampling(**wrong)
    assert Sampling(seed=2**63 - 1).branch(1).seed == 0

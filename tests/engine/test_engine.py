"""The engine without a store: batching, chunked prefill, admission, ends of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from tiny_models import VOCAB, Tiny, tiny
from torch import Tensor
from transformers import DynamicCache

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.executor import Step, StepOutput
from kvcontract.contract.layout import layout
from kvcontract.engine.engine import Engine
from kvcontract.engine.hf import HfExecutor
from kvcontract.engine.request import Finish, Result
from kvcontract.engine.sampling import Sampling
from kvcontract.engine.views import executor_views
from kvcontract.memory.binding import Binding
from kvcontract.pool.pool import BlockPool

PAGE = 5


class Watched(HfExecutor):
    """The generic executor, remembering its steps; may be told to fail or to return NaN in one."""

    def __init__(self, case: Tiny) -> None:
        super().__init__(case.model, case.layers, case.kv)
        self.steps: list[Step] = []
        self.fail_at: int | None = None
        self.nan_at: tuple[int, int] | None = None

    def forward(self, step: Step) -> StepOutput:
        """Run, or fail in the step of that number."""
        self.steps.append(step)
        if len(self.steps) - 1 == self.fail_at:
            raise RuntimeError("device lost")
        output = super().forward(step)
        if self.nan_at is not None and len(self.steps) - 1 == self.nan_at[0]:
            output.logits[self.nan_at[1]] = torch.nan
        return output


@dataclass
class Setup:
    """An engine and what it stands on."""

    case: Tiny
    pool: BlockPool
    executor: Watched

    def engine(self, **options: int) -> Engine:
        """An engine over them."""
        return Engine(self.case.kv, self.executor, self.pool, **options)

    def expected(self, prompt: list[int], result: Result) -> Tensor:
        """Logits of the sampled rows from the model's own cache, same split: [tokens, vocab]."""
        cache = DynamicCache(config=self.case.model.config)
        tokens = torch.tensor([*prompt, *result.tokens])
        rows, start = [], 0
        for size in result.split:
            last = start + size >= len(prompt)
            with torch.no_grad():
                output = self.case.model(
                    input_ids=tokens[None, start : start + size],
                    position_ids=torch.arange(start, start + size)[None],
                    cache=cache,
                    logits_to_keep=torch.tensor([size - 1]),
                )
            if last:
                rows.append(output.logits[0, -1])
            start += size
        return torch.stack(rows)


@pytest.fixture(scope="module")
def case() -> Tiny:
    """A small dense model."""
    return tiny("qwen3", page_tokens=PAGE)


@pytest.fixture
def setup(case: Tiny) -> Iterator[Setup]:
    """30 usable pages, poisoned; all of them must be free again at the end."""
    pool = BlockPool(31, PAGE)
    bindings = {space.key: Binding.allocate(space, 31) for space in layout(case.kv).spaces}
    for binding in bindings.values():
        next(iter(binding.arenas.values())).storage.fill_(0xFF)
    executor = Watched(case)
    executor.bind(executor_views(bindings))
    yield Setup(case, pool, executor)
    gauges = pool.gauges()
    assert (gauges.available, gauges.entitled) == (30, 0)


def prompt(length: int, seed: int) -> list[int]:
    """Random token ids."""
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_mixed_batch_matches_the_models_own_cache(setup: Setup) -> None:
    """Several lengths, chunks beside decodes: logits equal the unmodified model's at the same split."""
    prompts = [prompt(length, seed) for seed, length in enumerate((3, 17, 26, 11))]
    with setup.engine(max_batch_tokens=12, max_chunk_tokens=8, max_requests=4) as engine:
        ids = [engine.submit(ids, 6, capture_logits=True) for ids in prompts]
        results = engine.run()
    assert any(
        (step.context_len > 0).any() and (step.context_len == 0).any() for step in setup.executor.steps
    )
    assert max(len(step.token_ids) for step in setup.executor.steps) <= 12
    for request, tokens in zip(ids, prompts, strict=True):
        result = results[request]
        assert (result.finish, len(result.tokens), result.hit_tokens) == (Finish.LENGTH, 6, 0)
        assert sum(result.split) == len(tokens) + 5
        expected = setup.expected(tokens, result)
        assert result.logits is not None
        assert torch.equal(result.logits, expected)
        assert result.tokens == tuple(expected.argmax(-1).tolist())
        assert result.positions is not None
        assert result.positions.tolist() == list(range(len(tokens) - 1, len(tokens) + 5))


def test_chunks_end_at_fixed_positions(setup: Setup) -> None:
    """Where a prompt is cut depends on positions alone, so that runs can be compared bit by bit."""
    with setup.engine(max_batch_tokens=40, max_chunk_tokens=8) as engine:
        request = engine.submit(prompt(21, 1), 3, capture_logits="all")
        result = engine.run()[request]
    assert result.split == (8, 8, 5, 1, 1)
    assert result.logits is not None
    assert result.logits.shape == (23, VOCAB)
    assert result.positions is not None
    assert result.positions.tolist() == list(range(23))


def test_b19_only_the_last_chunk_samples(setup: Setup) -> None:
    """Chunks before the last want no logits and emit no token (B19)."""
    with setup.engine(max_batch_tokens=9, max_chunk_tokens=9, max_requests=2) as engine:
        engine.submit(prompt(25, 1), 1)
        engine.run()
    assert [len(step.want) for step in setup.executor.steps] == [0, 0, 1]


def test_requests_that_do_not_fit_wait_in_order(setup: Setup) -> None:
    """Admission promises lifetimes: what does not fit now waits without holding, and runs later (B2, R6)."""
    with setup.engine() as engine:
        ids = [engine.submit(prompt(40, seed), 20) for seed in range(5)]
        engine.step()
        gauges = engine.gauges()
        assert (gauges["waiting"], gauges["active"], sum(gauges.values())) == (3, 2, 5)
        results = engine.run()
        assert engine.idle
        assert not any(engine.gauges().values())
    assert [results[request].finish for request in ids] == [Finish.LENGTH] * 5


def test_b10_what_can_never_fit_is_refused_at_once(setup: Setup) -> None:
    """A request larger than the pool ends with the numbers; others go on (B10)."""
    with setup.engine() as engine:
        large, small = engine.submit(prompt(140, 1), 20), engine.submit(prompt(4, 1), 2)
        results = engine.run()
    assert results[large].finish is Finish.REFUSED
    assert results[large].reason == "32 pages for 140 + 20 tokens; the pool has 30"
    assert results[small].finish is Finish.LENGTH


def test_d5_a_wrong_request_is_refused_with_every_fault(setup: Setup) -> None:
    """Ids outside the vocabulary, an over-long context and nothing to sample are named together (D5)."""
    with setup.engine() as engine:
        with pytest.raises(UsageFault) as fault:
            engine.submit([5] * 600 + [VOCAB], 0, priority=1.5)  # type: ignore[arg-type] # what is tested
        for part in (
            "priority 1.5: expected an integer",
            "max_new_tokens 0",
            "601 prompt + 0 new tokens",
            f"token id {VOCAB} at position 600",
        ):
            assert part in str(fault.value)
        with pytest.raises(UsageFault, match="empty"):
            engine.submit([], 1)
        with pytest.raises(UsageFault, match="position 1"):
            engine.submit([5, -1], 1)
        assert engine.idle


def test_stop_tokens_end_a_request(setup: Setup) -> None:
    """A stop token is the last of the result; a request may have its own, or none."""
    with setup.engine() as engine:
        free = engine.submit(prompt(9, 2), 8)
        tokens = engine.run()[free].tokens
        stop = tokens[3]
        stopped = engine.submit(prompt(9, 2), 8, stop_token_ids=[stop])
        result = engine.run()[stopped]
    cut = tokens[: tokens.index(stop) + 1]
    assert (result.finish, result.tokens) == (Finish.STOP, cut)
    with Engine(setup.case.kv, setup.executor, setup.pool, stop_token_ids=[stop]) as engine:
        own, none = engine.submit(prompt(9, 2), 8), engine.submit(prompt(9, 2), 8, stop_token_ids=[])
        results = engine.run()
    assert (results[own].tokens, results[none].tokens) == (cut, tokens)


def test_sampling_depends_on_the_seed_not_on_the_batch(setup: Setup) -> None:
    """A seeded request draws the same tokens alone and beside others."""
    hot = Sampling(temperature=1.5, top_p=0.9, seed=11)
    with setup.engine() as engine:
        alone = engine.submit(prompt(9, 2), 12, sampling=hot)
        first = engine.run()[alone].tokens
        beside = [engine.submit(prompt(9, 2), 12, sampling=replace(hot, seed=seed)) for seed in (5, 11)]
        results = engine.run()
    assert results[beside[1]].tokens == first != results[beside[0]].tokens


def test_a_failed_step_fails_its_requests_and_releases_them(setup: Setup) -> None:
    """An executor's error reaches the caller; the batch's requests are reverted, given back, and say why."""
    setup.executor.fail_at = 3
    with setup.engine(max_requests=2) as engine:
        ids = [engine.submit(prompt(6, seed), 8) for seed in range(3)]
        with pytest.raises(RuntimeError, match="device lost"):
            engine.run()
        results = engine.run()
    assert [results[request].finish for request in ids] == [Finish.FAILED, Finish.FAILED, Finish.LENGTH]
    assert "device lost" in results[ids[0]].reason
    assert len(results[ids[0]].tokens) == 3


def test_nan_logits_fail_their_request_alone(setup: Setup) -> None:
    """A token is never sampled from NaN; neighbours in the batch go on, pages are not registered."""
    setup.executor.nan_at = (2, 1)
    with setup.engine() as engine:
        good, bad = engine.submit(prompt(6, 1), 5), engine.submit(prompt(6, 2), 5)
        results = engine.run()
    assert results[good].finish is Finish.LENGTH
    assert results[bad].finish is Finish.FAILED
    assert results[bad].reason == "the logits of position 7 are NaN"


def test_cancel_ends_a_request_wherever_it_is(setup: Setup) -> None:
    """Waiting or active, it ends with what it had; unknown and ended ids do nothing (A11)."""
    with setup.engine(max_requests=1) as engine:
        active, waiting = engine.submit(prompt(6, 1), 9), engine.submit(prompt(6, 2), 9)
        engine.step()
        engine.step()
        engine.cancel(active)
        engine.cancel(waiting)
        engine.cancel(77)
        results = engine.run()
        engine.cancel(active)
        assert engine.idle
    assert [results[request].finish for request in (active, waiting)] == [Finish.CANCELLED] * 2
    assert (len(results[active].tokens), results[waiting].tokens) == (2, ())


def test_close_gives_everything_back(setup: Setup) -> None:
    """Leaving the context ends what is left; afterwards nothing is taken."""
    with setup.engine(max_requests=1) as engine:
        ids = [engine.submit(prompt(6, seed), 9) for seed in range(3)]
        engine.step()
    results = engine.take_results()
    assert {results[request].finish for request in ids} == {Finish.CANCELLED}
    engine.close()
    with pytest.raises(UsageFault, match="closed"):
        engine.submit([4], 1)


def test_limits_that_cannot_work_are_named_together(setup: Setup) -> None:
    """Every active request must be able to move in each step; windows need another pool."""
    with pytest.raises(UsageFault) as fault:
        setup.engine(max_batch_tokens=3, max_chunk_tokens=0, max_requests=4)
    assert "max_batch_tokens 3: expected 4" in str(fault.value)
    assert "max_chunk_tokens 0" in str(fault.value)
    other = tiny("gemma3")
    with pytest.raises(
        UsageFault,
        match=r"pages of 5 tokens, declared 16; pools for full: expected one for each of full, window-7",
    ):
        Engine(other.kv, HfExecutor(other.model, other.layers, other.kv), setup.pool)

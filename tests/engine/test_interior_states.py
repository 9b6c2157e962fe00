"""An executor whose kernel writes states at positions inside a step: nothing is cut for them (F1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvcontract import Arena, Field, Group, KvModel, WeightIdentity
from kvcontract.contract.executor import FieldRef, Limits, Step, StepOutput
from kvcontract.engine.build import Assembly, EngineLimits, assemble
from kvcontract.pool.checkpoints import CheckpointPolicy
from kvcontract.tiers.dram import DramTier

PAGE, BOUNDARY, VOCAB = 4, 8, 31
MODEL = KvModel(
    contract=1,
    name="running-sum",
    weights=WeightIdentity(kind="unresolved"),
    numerics="int64",
    page_tokens=PAGE,
    groups=(Group(name="kv"), Group(name="sum", kind="bounded", boundary_tokens=BOUNDARY)),
    arenas=(
        Arena.planes(name="kv", group="kv", fields=(Field(name="x", dtype="int64", axes={"one": 1}),)),
        Arena.planes(name="sum", group="sum", fields=(Field(name="s", dtype="int64", axes={"one": 1}),)),
    ),
)


class RunningSum:
    """A linear recurrence, s' = 3 s + token modulo a prime, which is all that the next token depends on.

    Args:
        emits: whether it can write a state inside a step.
    """

    def __init__(self, *, emits: bool) -> None:
        self.steps: list[Step] = []
        self._views: Mapping[FieldRef, Tensor] = {}
        if emits:
            self.emits = {"sum": BOUNDARY}

    @property
    def limits(self) -> Limits:
        """Small."""
        return Limits(max_requests=4, max_tokens=64, max_context_tokens=512, vocab_size=VOCAB)

    def bind(self, views: Mapping[FieldRef, Tensor]) -> None:
        """Keep them."""
        self._views = views

    def forward(self, step: Step) -> StepOutput:
        """Run it token by token."""
        self.steps.append(step)
        state, rows = self._views["sum", "s"], dict[int, Tensor]()
        wanted = {
            (request, position): slot
            for request, position, slot in step.snapshots.get("sum", np.zeros((0, 3), np.int64)).tolist()
        }
        for number, slot in enumerate(step.slots["sum"].tolist()):
            value = int(state[slot]) if step.context_len[number] else 0
            for row in range(int(step.query_start[number]), int(step.query_start[number + 1])):
                value = (3 * value + int(step.token_ids[row])) % 1_000_003
                position = int(step.positions[row])
                page = int(step.page_table["full"][number, position // PAGE])
                self._views["kv", "x"][page, position % PAGE] = value
                if (number, position + 1) in wanted:
                    state[wanted.pop((number, position + 1))] = value
                rows[row] = torch.nn.functional.one_hot(torch.tensor(value % VOCAB), VOCAB).float()
            state[slot] = value
        assert not wanted, f"positions {wanted} are not inside the step"
        logits = [rows[row] for row in step.want.tolist()]
        return StepOutput(torch.stack(logits) if logits else torch.zeros(0, VOCAB))


def made(*, emits: bool, slots: int = 20, **policy: Any) -> tuple[Assembly, RunningSum]:
    """An engine over it."""
    executor = RunningSum(emits=emits)
    parts = assemble(
        MODEL,
        executor,
        pages=200,
        tiers=[DramTier(1 << 20)],
        limits=EngineLimits(max_batch_tokens=64, max_chunk_tokens=64, max_requests=2),
        beside={"slots-sum": slots},
        checkpoints=CheckpointPolicy(**policy),
    )
    return parts, executor


def ran(parts: Assembly, prompt: list[int], new: int = 6) -> Any:
    """One request to its end."""
    request = parts.engine.submit(prompt, new)
    return parts.engine.run()[request]


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random tokens."""
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def test_f1_no_step_is_cut_for_a_state_that_the_kernel_writes_inside_it() -> None:
    """F1: several states of one step are checkpoints, and give the hits that cutting would have given."""
    tokens = prompt(61)
    cut, _ = made(emits=False, every_tokens=16)
    whole, executor = made(emits=True, every_tokens=16)
    with cut, whole:
        first, second = ran(cut, tokens), ran(whole, tokens)
        assert first.tokens == second.tokens
        assert (first.split[:2], second.split[:1]) == ((56, 5), (61,))
        emitted = executor.steps[0].snapshots["sum"]
        assert emitted[:, 1].tolist() == [16, 32, 48, 56]
        for length in (17, 40, 57, 61):
            hot = ran(whole, tokens[:length])
            assert hot.hit_tokens == max(at for at in (16, 32, 48, 56) if at < length)
            with made(emits=True)[0] as cold:
                assert hot.tokens == ran(cold, tokens[:length]).tokens
        whole.pool.check_books()


def test_states_written_inside_a_step_are_saved_and_come_back() -> None:
    """They are offloaded and restored like any other."""
    tokens = prompt(61)
    parts, _ = made(emits=True, every_tokens=16)
    with parts:
        assert parts.store is not None
        cold = ran(parts, tokens)
        assert parts.store.flush("visible")
        parts.pool.clear()
        back = ran(parts, tokens[:50])
        assert (back.hit_tokens, dict(back.sources)) == (48, {"dram": 48})
        assert parts.store.flush("visible")
        parts.pool.clear()
        assert ran(parts, tokens).tokens == cold.tokens


def test_f6_without_slots_for_all_as_many_as_fit_are_written() -> None:
    """F6: a soft miss; the request runs all the same."""
    parts, executor = made(emits=True, slots=3, every_tokens=8)
    with parts:
        assert len(ran(parts, prompt(61)).tokens) == 6
        assert executor.steps[0].snapshots["sum"][:, 1].tolist() == [8]
        parts.pool.check_books()
    assert parts.pool.sides.slots[0].pool.held == 0


def test_f3_a_step_that_failed_publishes_nothing() -> None:
    """F3: slots that it may have written are free again, and nobody finds them."""
    parts, executor = made(emits=True, every_tokens=8)
    with parts:
        tokens, honest = prompt(61), executor.forward

        def fails(step: Step) -> StepOutput:
            honest(step)
            raise RuntimeError("the device fell off")

        executor.forward = fails  # type: ignore[method-assign] # a device that fails
        request = parts.engine.submit(tokens, 4)
        with pytest.raises(RuntimeError):
            parts.engine.run()
        assert parts.engine.take_results()[request].finish.value == "failed"
        executor.forward = honest  # type: ignore[method-assign] # it is back
        assert parts.pool.sides.slots[0].pool.cached == 0
        assert ran(parts, tokens).hit_tokens == 0
        parts.pool.check_books()


def test_a_turn_that_a_caller_expects_is_a_checkpoint() -> None:
    """A prompt is cut where its caller says that others will leave it, and the first that does hits there."""
    tokens = prompt(61)
    parts, _ = made(emits=False, every_tokens=None)
    with parts:
        request = parts.engine.submit(tokens, 2, turns=(29,))
        assert parts.engine.run()[request].split[:3] == (24, 32, 5)
        other = ran(parts, [*tokens[:29], *prompt(20, seed=1)])
        assert other.hit_tokens == 24


def test_b8_waiters_that_pin_every_slot_do_not_keep_each_other_out() -> None:
    """B8: holds of those that wait are let go for the first in line, snapshots too."""
    parts, _ = made(emits=False, slots=5)
    with parts:
        prompts = [prompt(40, seed) for seed in range(4)]
        for each in prompts:
            ran(parts, each, 1)
        requests = [parts.engine.submit(each, 2) for each in prompts]
        results = parts.engine.run()
        assert all(len(results[request].tokens) == 2 for request in requests)
        parts.pool.check_books()


def test_b23_answers_in_parallel_go_on_from_one_state() -> None:
    """B23: each branch has the state of the prompt, whatever its parent does next."""
    parts, _ = made(emits=False)
    with parts:
        alone = ran(parts, prompt(30), 6).tokens
        found = parts.engine.submit_parallel(prompt(30), 6, 3)
        results = parts.engine.run()
        assert [results[request].tokens for request in found] == [alone] * 3
        assert parts.pool.sides.slots[0].pool.pinned_blocks == 0

"""State on a device: copies stand in the order of its work, and nothing is found before it is complete."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvcontract import Arena, Field, Group, KvModel, WeightIdentity, Window
from kvcontract.contract.executor import FieldRef, Limits, Step, StepOutput
from kvcontract.engine.build import Assembly, EngineLimits, assemble
from kvcontract.memory.pinned import host_memory
from kvcontract.pool.checkpoints import CheckpointPolicy
from kvcontract.tiers.dram import DramTier

pytestmark = pytest.mark.cuda
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

PAGE, WIDE, VOCAB = 4, 1 << 16, 31
FIELD = (Field(name="x", dtype="int64", axes={"wide": WIDE}),)
MODEL = KvModel(
    contract=1,
    name="running-sum",
    weights=WeightIdentity(kind="unresolved"),
    numerics="int64",
    page_tokens=PAGE,
    groups=(
        Group(name="kv"),
        Group(name="near", reach=Window(tokens=6)),
        Group(name="sum", kind="bounded", boundary_tokens=PAGE),
    ),
    arenas=(
        Arena.planes(name="kv", group="kv", fields=(Field(name="x", dtype="int64", axes={"one": 1}),)),
        Arena.planes(name="near", group="near", fields=(Field(name="x", dtype="int64", axes={"one": 1}),)),
        Arena.planes(name="sum", group="sum", fields=FIELD),
    ),
)


class Late:
    """A recurrence on a device whose state is written long after the host has gone on."""

    def __init__(self) -> None:
        self._views: Mapping[FieldRef, Tensor] = {}

    @property
    def limits(self) -> Limits:
        """Small."""
        return Limits(max_requests=4, max_tokens=64, max_context_tokens=512, vocab_size=VOCAB)

    def bind(self, views: Mapping[FieldRef, Tensor]) -> None:
        """Keep them."""
        self._views = views
        self._slow = torch.randn(4096, 4096, device="cuda")

    def forward(self, step: Step) -> StepOutput:
        """Run each request; the state is what the next token depends on, every element of it."""
        state, out = self._views["sum", "x"], []
        for _ in range(4):
            self._slow = self._slow @ self._slow * 1e-3
        for number, slot in enumerate(step.slots["sum"].tolist()):
            first, last = (int(step.query_start[number + at]) for at in range(2))
            value = (
                state[slot].clone() if step.context_len[number] else torch.zeros(WIDE, device="cuda").long()
            )
            for row in range(first, last):
                value = (3 * value + int(step.token_ids[row])) % 1_000_003
                position = int(step.positions[row])
                for space, arena in (("full", "kv"), ("window-6", "near")):
                    page = int(step.page_table[space][number, position // PAGE])
                    self._views[arena, "x"][page, position % PAGE] = value[:1]
                if row in step.want.tolist():
                    same = (value == value[0]).all().long()
                    out.append(torch.nn.functional.one_hot(value[0] * same % VOCAB, VOCAB).float())
            state[slot] = value
        return StepOutput(torch.stack(out) if out else torch.zeros(0, VOCAB, device="cuda"))


def made(tiers: list[Any]) -> Assembly:
    """An engine over it."""
    return assemble(
        MODEL,
        Late(),
        pages=100,
        device="cuda",
        tiers=tiers,
        limits=EngineLimits(max_batch_tokens=32, max_chunk_tokens=16, max_requests=3),
        beside={"slots-sum": 12, "window-6": 60},
        checkpoints=CheckpointPolicy(every_tokens=8),
    )


def prompt(length: int, seed: int) -> list[int]:
    """Random tokens."""
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


@needs_cuda
def test_f1_f2_snapshots_of_a_busy_device_are_those_of_their_boundary() -> None:
    """F1, F2: requests side by side, with hits on the device and from memory, give tokens of cold runs."""
    size = 64 << 20
    tokens = [prompt(37, seed) for seed in range(6)]
    with made([]) as cold:
        wanted = []
        for each in tokens:
            request = cold.engine.submit(each, 9)
            wanted.append(cold.engine.run()[request].tokens)
            cold.pool.clear()
    with made([DramTier(size, allocate=host_memory("cuda", size))]) as parts:
        assert parts.store is not None
        for source in ("none", "device", "dram"):
            requests = [parts.engine.submit(each, 9) for each in tokens]
            results = parts.engine.run()
            assert [results[request].tokens for request in requests] == wanted
            if source != "none":
                assert all(results[request].hit_tokens for request in requests), source
            assert parts.store.flush("visible")
            if source == "device":
                parts.pool.clear()
        counters = parts.store.stats().counters
        assert counters["checkpoints_taken"] > len(tokens)
        assert not counters.get("checkpoints_failed")
        parts.pool.check_books()


@needs_cuda
def test_f2_c1_the_last_snapshot_is_saved_while_the_device_still_makes_it() -> None:
    """F2, C1: a request that ends right behind its last step leaves that step's state in the tiers."""
    size = 64 << 20
    with made([DramTier(size, allocate=host_memory("cuda", size))]) as parts:
        assert parts.store is not None
        text = prompt(37, 0)
        request = parts.engine.submit(text, 9)
        said = parts.engine.run()[request].tokens
        assert parts.store.flush("visible")
        parts.pool.clear()
        again = parts.engine.submit([*text, *said, 1], 1)
        assert parts.engine.run()[again].hit_tokens == 44  # of 45 that were computed

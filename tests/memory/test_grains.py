"""The table that a kernel follows, and copies between addresses."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvcontract.contract.layout import layout
from kvcontract.contract.model import Arena, Field, Group, KvModel, Repack, WeightIdentity
from kvcontract.contract.wire import parts, wire_record
from kvcontract.memory.binding import Binding
from kvcontract.memory.copy import CopyProgram, holds
from kvcontract.memory.grains import Grains, Runs
from kvcontract.memory.host import copy_runs, joined

PAGE, BLOCKS = 3, 5
CPU = torch.device("cpu")


def model_of(*, turned: bool) -> KvModel:
    """K and V by head, and a latent of odd length; `turned` stores them in another order."""

    def arenas(names: tuple[str, ...]) -> tuple[Arena, ...]:
        axes = {name: {"head": 4, "dim": 6}[name] for name in names}
        kv = tuple(Field(name=name, dtype="bfloat16", axes=axes, shard_axis="head") for name in "kv")
        latent = (Field(name="c", dtype="uint8", axes={"dim": 7}),)
        return (
            Arena.planes(name="kv", group="g", layer=0, fields=kv),
            Arena.rows(name="c", group="g", layer=0, fields=latent),
        )

    return KvModel(
        contract=1,
        name="toy",
        weights=WeightIdentity(kind="unresolved"),
        numerics="test",
        page_tokens=PAGE,
        groups=(Group(name="g"),),
        arenas=arenas(("head", "dim")),
        repack=Repack(arenas=arenas(("dim", "head"))) if turned else None,
    )


def bound(model: KvModel, worker: int, tp: int, seed: int) -> tuple[Binding, list[torch.Tensor]]:
    """Layer-first memory of random bytes."""
    made = torch.Generator().manual_seed(seed)
    tensors = {
        arena.name: torch.randint(0, 256, (BLOCKS, arena.content_bytes), generator=made).to(torch.uint8)
        for arena in layout(model, worker, tp).space("full").arenas
    }
    return Binding.of(layout(model, worker, tp).space("full"), tensors), list(tensors.values())


def follow(grains: Grains, block: int, payload: NDArray[np.uint8], *, to_wire: bool) -> None:
    """What the kernel does, one grain at a time."""
    size = grains.grain_bytes
    for number, (address, stride, _) in enumerate(grains.table().tolist()):
        if address:
            at = [payload.ctypes.data + number * size, address + block * stride]
            ctypes.memmove(*(at if to_wire else at[::-1]), size)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("tp", "max_tp"), [(1, 1), (1, 2), (2, 4), (4, 2), (8, 4)])
def test_the_table_says_what_the_program_does(tp: int, max_tp: int, *, turned: bool) -> None:
    """Following the table moves the bytes that the copy program moves, also of slices and shards in part."""
    model = model_of(turned=turned)
    (part,) = parts(model)
    shards = part.shards(max_tp)
    for worker in range(tp):
        for shard in range(shards):
            record = wire_record(model, part, shard, shards)
            if not holds(record, worker, tp) or (shards < tp and shards == 2):
                continue
            mine, memory = bound(model, worker, tp, 1)
            other, oracle = bound(model, worker, tp, 1)
            program, theirs = (CopyProgram.compile(one, record, worker, tp) for one in (mine, other))
            grains = Grains.of(program.runs(), record.payload_bytes, CPU)
            assert grains is not None
            assert grains.grain_bytes % grains.word_bytes == 0
            staged = torch.zeros(1, record.payload_bytes, dtype=torch.uint8)
            if program.complete:
                follow(grains, 3, staged[0].numpy(), to_wire=True)
                expected = torch.zeros_like(staged)
                theirs.gather(np.array([3]), expected)
                assert torch.equal(staged, expected)
            staged.random_(0, 256)
            follow(grains, 2, staged[0].numpy(), to_wire=False)
            theirs.scatter(np.array([2]), staged)
            assert all(torch.equal(*pair) for pair in zip(memory, oracle, strict=True))


def test_a_table_that_costs_more_than_the_copy_is_not_made() -> None:
    """Millions of grains of one byte are left to torch."""
    run = Runs(np.array([4096], np.int64), 1 << 22, np.array([1], np.int64), 1)
    assert Grains.of([run], 2**21, CPU) is None


def test_neighbours_are_one_copy() -> None:
    """Pieces that follow each other on both sides are joined; bytes land where they should."""
    source = np.arange(64, dtype=np.uint8)
    target = np.zeros(64, np.uint8)
    at = np.array([0, 8, 16, 40, 24], np.int64)
    size = np.array([8, 8, 8, 8, 8], np.int64)
    to, of = target.ctypes.data + at, source.ctypes.data + at
    assert joined(to, of, size)[2].tolist() == [24, 8, 8]
    assert joined(to, of[::-1].copy(), size)[2].tolist() == [8] * 5
    copy_runs(to, of, size)
    expected = np.where((source < 32) | ((source >= 40) & (source < 48)), source, 0)
    assert np.array_equal(target, expected)
    for count in (0, 1):
        assert len(joined(to[:count], of[:count], size[:count])[0]) == count

"""Copies between pages in host memory and payloads: the bytes, their sums, and what befalls a batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.layout import layout
from kvcontract.contract.model import Arena, Field, Group, KvModel, Repack, WeightIdentity
from kvcontract.contract.wire import WireRecord, parts, wire_record
from kvcontract.core.lane import InlineLane, Lane, ManualLane, Urgency
from kvcontract.memory.binding import Binding
from kvcontract.memory.checksum import crc32c
from kvcontract.memory.copy import Program
from kvcontract.memory.host_mover import CHUNK_BYTES, COPIES, JOB_BYTES, HostMover, HostPlan
from kvcontract.memory.repack import compile_program

BLOCKS, WAIT_S = 9, 60.0


def model_of(dim: int, *, layers: int = 3, turned: bool = False) -> KvModel:
    """Layers of K and V; `turned` stores their axes in another order."""
    arenas, wire = (
        tuple(
            Arena.planes(
                name=f"l{layer}",
                group="kv",
                layer=layer,
                fields=tuple(
                    Field(
                        name=name,
                        dtype="bfloat16",
                        axes={axis: {"head": 2, "dim": dim}[axis] for axis in axes},
                    )
                    for name in "kv"
                ),
            )
            for layer in range(layers)
        )
        for axes in (("head", "dim"), ("dim", "head"))
    )
    return KvModel(
        contract=1,
        name="toy",
        weights=WeightIdentity(kind="digest", value="a"),
        numerics="test",
        page_tokens=4,
        groups=(Group(name="kv"),),
        arenas=arenas,
        repack=Repack(arenas=wire) if turned else None,
    )


class Side:
    """Pages of random bytes in host memory, and payloads beside them."""

    def __init__(self, model: KvModel, form: str = "page-first") -> None:
        space = layout(model).space("full")
        if form == "page-first":
            self.binding = Binding.allocate(space, BLOCKS)
        else:
            tensors = {
                arena.name: torch.zeros(BLOCKS, arena.content_bytes, dtype=torch.uint8)
                for arena in space.arenas
            }
            self.binding = Binding.of(space, tensors)
        made = torch.Generator().manual_seed(3)
        for view in self.binding.views.values():
            view.copy_(torch.randint(0, 128, view.shape, generator=made).to(view.dtype))
        (part,) = parts(model)
        self.record: WireRecord = wire_record(model, part, 0, 1)
        self.program: Program = compile_program(model, self.binding, self.record)
        self.payloads = torch.zeros(BLOCKS, self.record.payload_bytes, dtype=torch.uint8)
        self.faults: list[Exception] = []

    def mover(self, lane: Lane | None = None) -> HostMover:
        """One that keeps what went wrong."""
        return HostMover(self.faults.append, InlineLane() if lane is None else lane)

    def plan(self, mover: HostMover) -> HostPlan:
        """The mover's, of these pages."""
        plan = mover.plan(self.program, self.record.segments)
        assert plan is not None
        return plan

    def address(self, rows: list[int]) -> NDArray[np.int64]:
        """Where some payloads lie."""
        return self.payloads.data_ptr() + self.payloads.shape[1] * np.array(rows, np.int64)

    def gathered(self, blocks: list[int]) -> torch.Tensor:
        """Payloads of some pages, as the program gathers them."""
        out = torch.zeros(len(blocks), self.record.payload_bytes, dtype=torch.uint8)
        self.program.gather(np.array(blocks), out)
        return out

    def sums(self, payloads: torch.Tensor) -> list[list[int]]:
        """crc32c of each segment."""
        ends = np.cumsum(self.record.segments).tolist()
        spans = list(zip([0, *ends], ends, strict=False))
        return [[crc32c(row[start:end].numpy()) for start, end in spans] for row in payloads]


@pytest.mark.parametrize("form", ["page-first", "layer-first"])
@pytest.mark.parametrize("dim", [256, 24 * 1024, 96 * 1024])
def test_e7_what_arrives_is_what_was_there_and_is_summed(form: str, dim: int) -> None:
    """E1, E7: records of one chunk and of several, in one job and in many, come whole, with their sums."""
    side = Side(model_of(dim), form)
    assert (side.record.payload_bytes > CHUNK_BYTES) == (dim > 256)
    assert (max(side.record.segments) > CHUNK_BYTES) == (dim > 256)
    mover = side.mover()
    plan = side.plan(mover)
    blocks, rows = [5, 1, 3], [7, 0, 2]
    sums = mover.out(plan, np.array(blocks), side.address(rows)).wait(WAIT_S)
    expected = side.gathered(blocks)
    assert torch.equal(side.payloads[rows], expected)
    assert sums is not None
    assert sums.tolist() == side.sums(expected)
    before = side.gathered([4, 5])
    sums = mover.into(plan, np.array([8, 2, 6]), side.address(rows)).wait(WAIT_S)
    assert sums is not None
    assert sums.tolist() == side.sums(expected)
    assert torch.equal(side.gathered([8, 2, 6]), expected)
    assert torch.equal(side.gathered([4, 5]), before)
    moved = 3 * side.record.payload_bytes
    assert mover.stats() == {"host_bytes_out": moved, "host_bytes_in": moved}
    assert not side.faults


def test_e7_damage_shows_in_the_sums() -> None:
    """E7: of what came the sums are those of the pages as they are now."""
    side = Side(model_of(24 * 1024))
    mover = side.mover()
    plan = side.plan(mover)
    whole = mover.out(plan, np.array([1, 2]), side.address([0, 1])).wait(WAIT_S)
    side.payloads[1, -1] ^= 1
    came = mover.into(plan, np.array([3, 4]), side.address([0, 1])).wait(WAIT_S)
    assert whole is not None
    assert came is not None
    differs = (whole != came).tolist()
    assert differs[0] == [False] * len(whole[0])
    assert differs[1] == [False] * (len(whole[0]) - 1) + [True]


def test_nothing_is_moved_for_no_records() -> None:
    """A batch of nothing has landed at once."""
    side = Side(model_of(256))
    mover = side.mover(ManualLane())
    plan = side.plan(mover)
    none = np.empty(0, np.int64)
    assert mover.out(plan, none, none).value.shape == (0, len(side.record.segments))  # type: ignore[union-attr]
    assert mover.into(plan, none, none).value.shape == (0, len(side.record.segments))  # type: ignore[union-attr]


def test_what_does_not_lie_in_pages_as_it_is_stored_has_no_plan() -> None:
    """A record whose axes are turned is not the mover's."""
    side = Side(model_of(256, turned=True))
    assert side.mover().plan(side.program, side.record.segments) is None


def test_e8_blocks_out_of_range_are_refused() -> None:
    """E8, E1: pages that do not exist, or are written twice, are refused before a byte moves."""
    side = Side(model_of(256))
    lane = ManualLane()
    mover = side.mover(lane)
    plan = side.plan(mover)
    for blocks in ([1, BLOCKS], [0, 1]):
        with pytest.raises(UsageFault, match="block ids"):
            mover.out(plan, np.array(blocks), side.address([0, 1]))
        with pytest.raises(UsageFault, match="block ids"):
            mover.into(plan, np.array(blocks), side.address([0, 1]))
    with pytest.raises(UsageFault, match="twice"):
        mover.into(plan, np.array([1, 1]), side.address([0, 1]))
    assert len(lane) == 0


def test_a_batch_is_several_jobs_and_the_urgent_goes_between() -> None:
    """Threads share a batch, and what is more urgent waits for one job of it, not for all."""
    side = Side(model_of(96 * 1024))
    lane = ManualLane()
    mover = side.mover(lane)
    plan = side.plan(mover)
    assert 2 * side.record.payload_bytes > JOB_BYTES
    save = mover.out(plan, np.array([1, 2, 3, 4]), side.address([0, 1, 2, 3]), urgency=Urgency.CACHEABLE)
    assert len(lane) == 4
    lane.step()
    load = mover.into(plan, np.array([5]), side.address([8]))
    lane.step()
    assert load.done
    assert not save.done
    lane.drain()
    assert save.done


class Step:
    """An event of a device that does not come."""

    def synchronize(self) -> None:
        """Fail."""
        raise OSError("device gone")


def test_r3_a_batch_that_failed_lands_when_nothing_of_it_runs() -> None:
    """R3, R4, C2: pages that were not written are not copied; the failure is kept, and told at the end."""
    side = Side(model_of(96 * 1024))
    lane = ManualLane()
    mover = side.mover(lane)
    plan = side.plan(mover)
    op = mover.out(plan, np.array([1, 2]), side.address([0, 1]), after=Step())
    lane.step()
    assert not op.done
    lane.step()
    assert op.value is None
    assert [str(fault) for fault in side.faults] == ["device gone"] * 2
    assert not side.payloads.any()


def test_r4_a_lane_that_is_closed_fails_the_batch() -> None:
    """R4, R8: nothing is raised, and there is one terminal."""
    side = Side(model_of(256))
    lane = InlineLane()
    mover = side.mover(lane)
    plan = side.plan(mover)
    assert mover.close(0.0)
    lane.close(0.0)
    assert mover.out(plan, np.array([1]), side.address([0])).value is None
    assert [type(fault) for fault in side.faults] == [UsageFault]


def test_own_threads_copy_and_close() -> None:
    """C10: without a lane it has threads of its own, which end with it."""
    side = Side(model_of(96 * 1024), "layer-first")
    mover = HostMover(side.faults.append)
    plan = side.plan(mover)
    blocks = list(range(1, BLOCKS))
    ops = [mover.out(plan, np.array(blocks), side.address(blocks)) for _ in range(COPIES)]
    assert [op.wait(WAIT_S).tolist() for op in ops] == [side.sums(side.gathered(blocks))] * COPIES  # type: ignore[union-attr]
    assert mover.close(WAIT_S)
    assert mover.out(plan, np.array([1]), side.address([1])).value is None

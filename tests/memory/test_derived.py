"""Derived repacks against torch's own operations: joined, split, turned, cut, widened, over several pages."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from kvcontract.contract.check import check_model
from kvcontract.contract.dtypes import WIDER
from kvcontract.contract.errors import UsageFault
from kvcontract.contract.layout import layout
from kvcontract.contract.model import Arena, Field, Group, KvModel, Repack, WeightIdentity
from kvcontract.contract.wire import parts, wire_record
from kvcontract.memory.binding import Binding, torch_dtype
from kvcontract.memory.copy import CopyProgram
from kvcontract.memory.match import holds

PAGE, HEADS, DIM, BLOCKS = 3, 4, 5, 7
AXES = {"head": HEADS, "dim": DIM}

Flat = Callable[[Tensor, Tensor], list[Tensor]]
"""From K and V, int16[tokens, heads, dim], to what each arena holds, in memory order."""


def field(name: str, axes: dict[str, int]) -> Field:
    """Bits of two bytes, cut along the heads."""
    return Field(name=name, dtype="int16", axes=axes, shard_axis="head")


def kv(build: Callable[..., Arena], *fields: Field, name: str = "l0") -> Arena:
    """An arena of layer 0."""
    return build(name=name, group="kv", layer=0, fields=fields)


FORMS: dict[str, tuple[tuple[Arena, ...], Flat]] = {
    "two planes": (
        (kv(Arena.planes, field("k", AXES), field("v", AXES)),),
        lambda k, v: [torch.stack([k, v])],
    ),
    "rows": (
        (kv(Arena.rows, field("v", AXES), field("k", AXES)),),
        lambda k, v: [torch.stack([v, k], 1)],
    ),
    "joined outside": (
        (kv(Arena.planes, field("kv", {"k|v": 2, "token": 1, **AXES})),),
        lambda k, v: [torch.stack([k, v])],
    ),
    "joined in heads": (
        (kv(Arena.rows, field("kv", {"head": HEADS, "v|k": 2, "dim": DIM})),),
        lambda k, v: [torch.stack([v, k], 2)],
    ),
    "joined inside": (
        (kv(Arena.planes, field("kv", {"dim": DIM, "head": HEADS, "k|v": 2})),),
        lambda k, v: [torch.stack([k.mT, v.mT], -1)],
    ),
    "two arenas": (
        (
            kv(Arena.planes, field("v", AXES), name="values"),
            kv(Arena.planes, field("k", {"head": HEADS, "token": 1, "dim": DIM}), name="keys"),
        ),
        lambda k, v: [v, k.transpose(0, 1)],
    ),
}


def model_of(device: tuple[Arena, ...], wire: tuple[Arena, ...], pages: int = 1) -> KvModel:
    """One that is stored as another."""
    return KvModel(
        contract=1,
        name="toy",
        weights=WeightIdentity(kind="unresolved"),
        numerics="test",
        page_tokens=PAGE,
        key_tokens=PAGE * pages,
        groups=(Group(name="kv"),),
        arenas=device,
        repack=Repack(arenas=wire),
    )


class Side:
    """A worker's memory, bound arena by arena."""

    def __init__(self, model: KvModel, worker: int, tp: int) -> None:
        space = layout(model, worker, tp).space("full")
        self.raw = [
            torch.full((BLOCKS, arena.stride_bytes), 0xA5, dtype=torch.uint8) for arena in space.arenas
        ]
        names = [arena.name for arena in space.arenas]
        self.binding = Binding.of(space, dict(zip(names, self.raw, strict=True)))

    def fill(self, block: int, flat: list[Tensor]) -> None:
        """Write a block of each arena."""
        for raw, data in zip(self.raw, flat, strict=True):
            raw[block] = data.contiguous().view(torch.uint8).flatten()


@pytest.mark.parametrize(
    ("pages", "tp", "max_tp"), [(1, 1, 1), (1, 1, 4), (1, 2, 4), (1, 4, 4), (2, 1, 2), (2, 2, 4)]
)
@pytest.mark.parametrize(("device", "wire"), list(itertools.product(FORMS, FORMS)))
def test_e6_fields_are_joined_split_and_turned(
    device: str, wire: str, pages: int, tp: int, max_tp: int
) -> None:
    """E6: the record is the wire form of the same numbers, and it fills memory with the device's form."""
    (mine, flat), (stored, packed) = FORMS[device], FORMS[wire]
    model = model_of(mine, stored, pages)
    (part,) = parts(model)
    shards = part.shards(max_tp)
    blocks = np.array([[5, 2], [1, 6]], np.int64)[:, :pages]
    whole = torch.arange(2 * BLOCKS * PAGE * HEADS * DIM, dtype=torch.int16)
    keys, values = whole.reshape(2, BLOCKS, PAGE, HEADS, DIM)
    for worker in range(tp):
        heads = slice(worker * HEADS // tp, (worker + 1) * HEADS // tp)
        full, fresh, right = (Side(model, worker, tp) for _ in range(3))
        for block in blocks.ravel().tolist():
            full.fill(block, flat(keys[block, :, heads], values[block, :, heads]))
        for shard in range(shards):
            record = wire_record(model, part, shard, shards)
            if not holds(record, worker, tp):
                continue
            cut = slice(shard * HEADS // shards, (shard + 1) * HEADS // shards)
            expected = [
                torch.cat(
                    [
                        data.contiguous().view(torch.uint8).flatten()
                        for data in packed(keys[row].flatten(0, 1)[:, cut], values[row].flatten(0, 1)[:, cut])
                    ]
                )
                for row in blocks.tolist()
            ]
            rows = blocks if pages > 1 else blocks[:, 0]
            program = CopyProgram.compile(full.binding, record, worker, tp, pages=pages)
            out = torch.zeros(2, record.payload_bytes, dtype=torch.uint8)
            program.gather(rows, out)
            assert torch.equal(out, torch.stack(expected))
            again = CopyProgram.compile(fresh.binding, record, worker, tp, pages=pages)
            again.scatter(rows, torch.stack(expected))
        for block in blocks.ravel().tolist():
            right.fill(block, flat(keys[block, :, heads], values[block, :, heads]))
        assert all(torch.equal(found, wanted) for found, wanted in zip(fresh.raw, right.raw, strict=True))


def values_of(dtype: str) -> Tensor:
    """Every value of a dtype of up to two bytes, some of every size of a larger one."""
    if dtype in ("float32", "int32"):
        bits = torch.arange(1 << 16, dtype=torch.int64) * 65521 + 7
        return (bits - (1 << 31)).to(torch.int32).view(torch_dtype(dtype))
    size = torch_dtype(dtype).itemsize
    bits = torch.arange(1 << (8 * size), dtype=torch.int32)
    return bits.to({1: torch.uint8, 2: torch.int16}[size]).view(torch_dtype(dtype))


@pytest.mark.parametrize(("narrow", "wide"), [(one, other) for one in WIDER for other in sorted(WIDER[one])])
def test_e6_widened_values_come_back(narrow: str, wide: str) -> None:
    """E6: every value is stored as its equal, and comes back bit for bit; a NaN comes back as a NaN."""
    values = values_of(narrow)
    count = len(values) // 2
    axes = {"head": 2, "dim": count}

    def arena(dtype: str) -> Arena:
        return Arena.planes(name="l0", group="kv", layer=0, fields=(Field(name="k", dtype=dtype, axes=axes),))

    model = model_of((arena(narrow),), (arena(wide),))
    (part,) = parts(model)
    record = wire_record(model, part)
    binding = Binding.allocate(layout(model).space("full"), 3)
    view = binding.views["l0", "k"]
    for token in range(PAGE):
        view[1, token] = values.roll(token).view(2, count)
    program = CopyProgram.compile(binding, record)
    out = torch.zeros(1, record.payload_bytes, dtype=torch.uint8)
    program.gather(np.array([1]), out)
    stored = out.view(torch_dtype(wide)).double().flatten()
    held = view[1].double().flatten()
    assert torch.equal(stored.isnan(), held.isnan())
    real = ~held.isnan()
    assert torch.equal(stored[real], held[real])
    assert torch.equal(stored[real].signbit(), held[real].signbit())
    program.scatter(np.array([2]), out)
    found, wanted = (
        view[block].contiguous().view(torch.uint8).view(-1, view.element_size()) for block in (2, 1)
    )
    assert torch.equal(found[real], wanted[real])
    assert bool(view[2].double().flatten()[~real].isnan().all())


@pytest.mark.parametrize("odd_last", [False, True])
@pytest.mark.parametrize(("narrow", "wide"), [("float8_e4m3fn", "bfloat16"), ("int8", "int32")])
def test_e6_widened_records_of_odd_lengths(narrow: str, wide: str, *, odd_last: bool) -> None:
    """E6: records whose length is no multiple of the wide element all come back, or are refused."""

    def arenas(dtype: str) -> tuple[Arena, ...]:
        many = Field(name="k", dtype=dtype, axes={"dim": 4})
        odd = Field(name="c", dtype="uint8", axes={"dim": 5})
        found = [
            Arena.planes(name="l0", group="kv", layer=0, fields=(many,)),
            Arena.planes(name="l1", group="kv", layer=1, fields=(odd,)),
        ]
        return tuple(found if odd_last else found[::-1])

    model = model_of(arenas(narrow), arenas(wide))
    (part,) = parts(model)
    record = wire_record(model, part)
    binding = Binding.allocate(layout(model).space("full"), 9)
    if not odd_last:
        with pytest.raises(UsageFault, match="multiples of its element"):
            CopyProgram.compile(binding, record)
        return
    for number, view in enumerate(binding.views.values()):
        values = torch.arange(view.numel()) % 23 + number
        view.copy_(values.view(view.shape).to(view.dtype))
    before = {name: view[[1, 2, 3, 4]].clone() for name, view in binding.views.items()}
    program = CopyProgram.compile(binding, record)
    out = torch.zeros(4, record.payload_bytes, dtype=torch.uint8)
    program.gather(np.array([1, 2, 3, 4]), out)
    program.scatter(np.array([8, 7, 6, 5]), out)
    for name, view in binding.views.items():
        assert torch.equal(view[[8, 7, 6, 5]].view(torch.uint8), before[name].view(torch.uint8)), name


def test_what_cannot_be_derived_is_refused() -> None:
    """A narrower dtype, a member that is nowhere, and one that is twice in a layer: all named at once."""
    device = (
        kv(Arena.planes, field("k", AXES), name="a"),
        kv(Arena.planes, field("k", AXES), field("w", AXES), name="b"),
    )
    narrow = Field(name="w", dtype="int8", axes=AXES, shard_axis="head")
    wire = (kv(Arena.planes, field("k", AXES), field("z", AXES), narrow, name="c"),)
    model = model_of(device, wire)
    (part,) = parts(model)
    binding = Binding.allocate(layout(model).space("full"), 3)
    with pytest.raises(UsageFault) as caught:
        CopyProgram.compile(binding, wire_record(model, part))
    text = str(caught.value)
    assert "c.k: the device has 2 such fields" in text
    assert "c.z: the device has no such field" in text
    assert "c.w: dtype int16 on the device, int8 on the wire" in text


def test_i3_what_is_sound_can_be_compiled() -> None:
    """I3: a field that two arenas of a layer have is a finding, not a surprise when memory is bound."""
    device = (
        kv(Arena.planes, field("k", AXES), name="a"),
        kv(Arena.planes, field("k", AXES), name="b"),
    )
    wire = (device[0], kv(Arena.planes, field("k", AXES), name="c"))
    model = model_of(device, wire)
    assert [found.value for found in check_model(model)] == ["b.k", "c.k"]
    (part,) = parts(model)
    with pytest.raises(UsageFault, match=r"c\.k: the device has 2 such fields"):
        CopyProgram.compile(Binding.allocate(layout(model).space("full"), 3), wire_record(model, part))

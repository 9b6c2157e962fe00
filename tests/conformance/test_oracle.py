"""The oracle against a plain loop over the strides of contract.layout: two answers that share no code."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from kvc_conformance.oracle import PADDING, Fill, Map, compare, device_map, wire_map
from kvcontract import Arena, Field, Group, KvModel, WeightIdentity
from kvcontract.contract.layout import ArenaLayout, layout
from kvcontract.contract.model import Repack
from kvcontract.contract.wire import parts, wire_record

BLOCKS = 3
GROUPS = ("kv",)


def field(name: str, dtype: str = "bfloat16", shard: str | None = "head", **axes: int) -> Field:
    """A field; by default 4 heads of 3 channels."""
    return Field(name=name, dtype=dtype, axes=axes or {"head": 4, "dim": 3}, shard_axis=shard)


def model_of(*arenas: Arena, page_tokens: int = 6, repack: Repack | None = None) -> KvModel:
    """One group of full attention."""
    return KvModel(
        contract=1,
        name="toy",
        weights=WeightIdentity(kind="unresolved"),
        numerics="test",
        page_tokens=page_tokens,
        groups=(Group(name="kv"),),
        arenas=arenas,
        repack=repack,
    )


def arena(number: int, *fields: Field, build: str = "planes", **more: int) -> Arena:
    """An arena of one layer."""
    made: Arena = getattr(Arena, build)(
        name=f"layer.{number}", group="kv", layer=number, fields=fields, **more
    )
    return made


K, V = field("k"), field("v", "float32")
LATENT = field("latent", "float8_e4m3fn", None, dim=5)
TURNED = tuple(
    arena(number, field("k", dim=3, head=4), field("v", "float32", dim=3, head=4)) for number in range(2)
)
MODELS = {
    "planes": model_of(arena(0, K, V), arena(1, K, V)),
    "rows": model_of(arena(0, K, field("v"), build="rows"), page_tokens=5),
    "one token": model_of(arena(0, K, V), page_tokens=1),
    "token inside": model_of(
        arena(0, field("k", head=4, token=1, dim=3), field("v", head=4, dim=3, token=1))
    ),
    "replicated beside sharded": model_of(arena(0, K, LATENT), arena(1, LATENT, build="rows")),
    "half bytes": model_of(arena(0, field("k", "int4", None, dim=6))),
    "several tokens a row": model_of(arena(0, LATENT, tokens_per_row=3), arena(1, K)),
    "aligned": model_of(arena(0, LATENT, align_bytes=64), arena(1, K, stride_multiple_bytes=96)),
    "turned on the wire": model_of(arena(0, K, V), arena(1, K, V), repack=Repack(arenas=TURNED)),
}


def walked(fill: Fill, arenas: tuple[ArenaLayout, ...], size: int, blocks: Sequence[int], cut: object) -> Map:
    """Every element of every field, put where offset and strides say; `cut` gives the part of an axis."""
    serial = np.full(size, PADDING)
    byte, width = np.zeros(size, np.uint8), np.ones(size, np.uint8)
    for laid in arenas:
        for item in laid.fields:
            name = (laid.name, item.name)
            device = device_axes(fill.model, name)
            held = [fill.serials(name)[block] for block in blocks]
            numbers = np.concatenate(held, device.index("token")) if "token" in device else held[0]
            numbers = np.transpose(numbers, [device.index(axis) for axis in item.axes])
            first = [cut(name, axis) for axis in item.axes]  # type: ignore[operator]
            for at in product(*(range(extent) for extent in item.shape)):
                start = laid.offset_bytes + item.offset_bytes
                start += sum(i * stride for i, stride in zip(at, item.strides_bytes, strict=True))
                here = slice(start, start + item.element_bytes)
                serial[here] = numbers[tuple(i + begin for i, begin in zip(at, first, strict=True))]
                byte[here], width[here] = np.arange(item.element_bytes), item.element_bytes
    return Map(serial, byte, width)


def device_axes(model: KvModel, name: tuple[str, str]) -> tuple[str, ...]:
    """The order in which the fill counts a field's axes."""
    (found,) = (
        item.axes for space in layout(model).spaces for laid in space.arenas for item in laid.fields
        if (laid.name, item.name) == name
    )  # fmt: skip
    return found


def same(found: Map, wanted: Map) -> None:
    """Equal content in equal places."""
    assert len(found.serial) == len(wanted.serial)
    assert (found.serial == wanted.serial).all()
    assert (found.byte == wanted.byte)[wanted.content].all()
    assert (found.width == wanted.width)[wanted.content].all()


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_device_map_agrees_with_the_strides(name: str, tp: int) -> None:
    """KVC-LAYOUT-06: page-first blocks of every worker, padding included."""
    model = MODELS[name]
    fill = Fill(model, BLOCKS)
    shard = {(a.name, f.name): f.shard_axis for a in model.arenas for f in a.fields}
    for worker in range(tp):
        space = layout(model, worker, tp).space("full")

        def cut(name: tuple[str, str], axis: str, worker: int = worker) -> int:
            return worker * 4 // tp if shard[name] == axis else 0

        for block in range(BLOCKS):
            wanted = walked(fill, space.arenas, space.stride_bytes, [block], cut)
            same(device_map(fill, GROUPS, block, worker, tp), wanted)


@pytest.mark.parametrize("blocks", [[1], [2, 0, 1]])
@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_wire_map_agrees_with_the_strides(name: str, shards: int, blocks: list[int]) -> None:
    """KVC-REPACK-03: the dense payload of every shard, of records of one page and of several."""
    model = MODELS[name]
    model = model.model_copy(update={"key_tokens": len(blocks) * model.page_tokens})
    fill = Fill(model, BLOCKS)
    for shard in range(shards):
        record = wire_record(model, parts(model)[0], shard, shards)

        def cut(name: tuple[str, str], axis: str, record: object = record) -> int:
            span = record.cuts[name]  # type: ignore[attr-defined]
            return span[1] if span is not None and span[0] == axis else 0

        if record.arenas:
            wanted = walked(fill, record.arenas, record.payload_bytes, blocks, cut)
            assert wanted.content.all()
            same(wire_map(fill, GROUPS, blocks, shard, shards), wanted)


@pytest.mark.parametrize("name", MODELS)
def test_every_number_is_given_once_and_known(name: str) -> None:
    """Serial numbers are distinct, none is 0, and each tells where it belongs."""
    fill = Fill(MODELS[name], BLOCKS)
    numbers = np.concatenate([fill.serials(item).ravel() for item in fill.fields()])
    assert sorted(numbers.tolist()) == list(range(1, fill.count))
    assert fill.where(0) is None
    assert fill.where(fill.count) is None
    for item in fill.fields():
        at = tuple(extent - 1 for extent in fill.serials(item).shape)
        found = fill.where(int(fill.serials(item)[at]))
        assert found is not None
        assert (found.arena, found.field, found.block) == (*item, at[0])
        assert tuple(found.at.values()) == at[1:]


@pytest.mark.parametrize("name", MODELS)
def test_passes_carry_the_whole_number_and_every_bit_both_ways(name: str) -> None:
    """KVC-REPACK-03: codes decode to their number; each bit of an element is 0 in one pass, 1 in another."""
    fill = Fill(MODELS[name], BLOCKS)
    for item in fill.fields():
        numbers = fill.serials(item).ravel()
        bits = 8 * fill.width(item)
        codes = np.stack([fill.codes(numbers, number) for number in range(fill.passes)])
        assert (np.bitwise_or.reduce(codes) == 2**bits - 1).all()
        assert (np.bitwise_and.reduce(codes) == 0).all()
        assert [fill.decode(held, bits) for held in codes.T.tolist()] == numbers.tolist()


def test_bool_elements_hold_nothing_but_0_and_1() -> None:
    """KVC-LAYOUT-06: other bytes are no bool, and torch may not keep them; the number still is told."""
    fill = Fill(model_of(arena(0, field("k", "bool"))), BLOCKS)
    (name,) = fill.fields()
    numbers = fill.serials(name)
    images = [fill.image(name, numbers, number) for number in range(fill.passes)]
    assert set(np.unique(images).tolist()) == {0, 1}
    held = np.concatenate(images, axis=-1).reshape(-1, fill.passes)
    assert [fill.decode(codes, 1) for codes in held.tolist()] == numbers.ravel().tolist()


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e5m2", "int16"])
def test_a_lost_bit_is_found_at_every_width(dtype: str) -> None:
    """KVC-REPACK-03: whichever bit is cleared or set, even where a NaN may be another NaN."""
    fill = Fill(model_of(arena(0, field("k", dtype, None, dim=3)), page_tokens=2), 1)
    where, (name,) = device_map(fill, GROUPS, 0), fill.fields()
    images = [where.expected(fill, number) for number in range(fill.passes)]
    for bit in range(8 * fill.width(name)):
        mask = np.zeros(fill.width(name), np.uint8)
        mask[bit // 8] = 1 << bit % 8
        whole = np.tile(mask, len(where.serial) // len(mask))
        for lossy in ([image & ~whole for image in images], [image | whole for image in images]):
            assert "belongs nowhere: 0x" in str(compare(lossy, where, fill, nan_is_nan=True))


def test_a_nan_may_come_back_as_another_only_where_that_is_said() -> None:
    """KVC-REPACK-03: payloads of NaN are no values; a copy keeps them all the same."""
    fill = Fill(model_of(arena(0, field("k", "bfloat16", None, dim=7)), page_tokens=96), 1)
    where = device_map(fill, GROUPS, 0)
    images = [where.expected(fill, number) for number in range(fill.passes)]
    plain = [image.view("<u2") for image in images]
    nan = [((held & 0x7F80) == 0x7F80) & ((held & 0x7F) != 0) for held in plain]
    assert any(mask.any() for mask in nan)
    canonical = [
        np.where(mask, 0x7FC0, held).astype("<u2").view(np.uint8)
        for held, mask in zip(plain, nan, strict=True)
    ]
    assert compare(canonical, where, fill, nan_is_nan=True) is None
    assert compare(canonical, where, fill) is not None


def test_a_wrong_byte_decodes_to_where_it_came_from() -> None:
    """A swap is told by both places; equal memory, and padding of any kind, by nothing."""
    fill = Fill(MODELS["aligned"], BLOCKS)
    where = device_map(fill, GROUPS, 2)
    images = [where.expected(fill, number) for number in range(fill.passes)]
    for image in images:
        image[~where.content] = 0xEE
    assert compare(images, where, fill) is None
    other = device_map(fill, GROUPS, 1)
    swapped = [
        np.where(np.arange(len(image)) < 5, other.expected(fill, number), image)
        for number, image in enumerate(images)
    ]
    told = compare(swapped, where, fill)
    assert told is not None
    assert "found the value of layer 0 LATENT page 1 token 0 dim 0" in told
    assert "where layer 0 LATENT page 2 token 0 dim 0 belongs (5 element(s)" in told
    blank = [np.zeros_like(image) for image in images]
    assert "belongs nowhere" in str(compare(blank, where, fill))
    assert "B were found where" in str(compare([image[1:] for image in images], where, fill))


def test_slots_have_no_tokens_and_are_records_of_their_own() -> None:
    """KVC-LAYOUT-06, KVC-REPACK-03: one block is one slot, whatever pages and records are."""
    state = Field(name="state", dtype="float32", axes={"head": 4, "key": 3, "value": 5}, shard_axis="head")
    conv = Field(name="q", dtype="bfloat16", axes={"head": 4, "column": 3}, shard_axis="head")
    slot = Arena.planes(name="slot", group="gdn", layer=2, fields=(state, conv), align_bytes=64)
    rows = Arena.rows(name="rows", group="gdn", layer=3, fields=(state, conv))
    paged = model_of(arena(0, K, V)).model_copy(update={"key_tokens": 12})
    model = paged.model_copy(
        update={
            "groups": (*paged.groups, Group(name="gdn", kind="bounded")),
            "arenas": (*paged.arenas, slot, rows),
        }
    )
    fill = Fill(model, BLOCKS)
    part = next(part for part in parts(model) if part.groups == ("gdn",))
    for tp in (1, 2):
        space = layout(model, tp - 1, tp).space("slots-gdn")
        first = (tp - 1) * 4 // tp

        def worker(_: tuple[str, str], axis: str, first: int = first) -> int:
            return first if axis == "head" else 0

        wanted = walked(fill, space.arenas, space.stride_bytes, [1], worker)
        same(device_map(fill, ("gdn",), 1, tp - 1, tp), wanted)
        record = wire_record(model, part, tp - 1, tp)
        wanted = walked(fill, record.arenas, record.payload_bytes, [1], worker)
        same(wire_map(fill, ("gdn",), [1], tp - 1, tp), wanted)
    both = device_map(fill, ("kv", "gdn"), 1)
    mine = np.isin(both.serial, fill.serials(("layer.0", "k")))
    mine |= np.isin(both.serial, fill.serials(("layer.0", "v")))
    paged = both.only(fill, ("kv",))
    assert (paged.content == mine).all()
    assert (paged.serial[mine] == both.serial[mine]).all()
    assert not both.only(fill, ()).content.any()
    number = int(fill.serials(("slot", "state"))[2, 1, 0, 0])
    assert str(fill.where(number)) == "layer 2 STATE slot 2 head 1 key 0 value 0"

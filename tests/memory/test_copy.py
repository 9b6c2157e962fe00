"""Copy programs against an oracle that enumerates elements one by one and shares no code with them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvcontract.contract.errors import PluginFault, UsageFault
from kvcontract.contract.layout import layout
from kvcontract.contract.model import Arena, Conversion, Field, Group, KvModel, Repack, WeightIdentity
from kvcontract.contract.wire import parts, wire_record
from kvcontract.memory.binding import Binding
from kvcontract.memory.copy import CopyProgram, Program
from kvcontract.memory.match import holds
from kvcontract.memory.repack import compile_program, resolve

PAGE, BLOCKS, POISON = 3, 5, 0xA5
SIZES = {"bfloat16": 2, "float32": 4, "int4": 1, "float8_e4m3fn": 1}

KV = (
    Field(name="k", dtype="bfloat16", axes={"head": 4, "dim": 5}, shard_axis="head"),
    Field(name="v", dtype="bfloat16", axes={"head": 4, "dim": 7}, shard_axis="head"),
)
MIXED = (
    Field(name="latent", dtype="bfloat16", axes={"dim": 6}),
    Field(name="q", dtype="float32", axes={"dim": 3, "head": 4}, shard_axis="head"),
    Field(name="nibbles", dtype="int4", axes={"dim": 8}),
)
ARENAS = (
    Arena.planes(name="l0.kv", group="kv", layer=0, fields=KV, align_bytes=4),
    Arena.rows(name="l0.mixed", group="kv", layer=0, fields=MIXED, align_bytes=4),
    Arena.planes(name="l1.kv", group="kv", layer=1, fields=KV, stride_multiple_bytes=64, align_bytes=16),
    Arena.rows(name="l1.few", group="kv", layer=1, fields=MIXED, tokens_per_row=3),
)


def model_of(*arenas: Arena, repack: Repack | None = None, key_tokens: int | None = None) -> KvModel:
    """A model of one full-attention group."""
    return KvModel(
        contract=1,
        name="toy",
        weights=WeightIdentity(kind="unresolved"),
        numerics="test",
        page_tokens=PAGE,
        key_tokens=key_tokens,
        groups=(Group(name="kv"),),
        arenas=arenas,
        repack=repack,
    )


def permuted(arena: Arena) -> Arena:
    """The same fields in another order and the other arrangement, axes reversed, tokens inside."""
    fields = []
    for field in reversed(arena.fields):
        names = list(field.axes)
        if field.dtype != "int4":
            names.reverse()
            if arena.arrangement == "rows":
                names.insert(1, "token")
        axes = {name: field.axes.get(name, 1) for name in names}
        fields.append(Field(name=field.name, dtype=field.dtype, axes=axes, shard_axis=field.shard_axis))
    build = Arena.rows if arena.arrangement == "planes" else Arena.planes
    return build(
        name=arena.name,
        group=arena.group,
        layer=arena.layer,
        fields=tuple(fields),
        tokens_per_row=arena.tokens_per_row,
    )


PLAIN = model_of(*ARENAS)
PERMUTED = model_of(*ARENAS, repack=Repack(arenas=tuple(permuted(arena) for arena in ARENAS)))


def code(arena: str, field: Field, block: int, index: dict[str, int]) -> bytes:
    """The bytes of one element, by its global position; all bit patterns occur, NaN among them."""
    text = f"{arena} {field.name} {block} {sorted(index.items())}"
    return hashlib.blake2b(text.encode(), digest_size=SIZES[field.dtype]).digest()


def elements(
    arena: Arena, fields: list[Field], member: int, members: int, pages: int = 1
) -> Iterator[tuple[Field, dict[str, int]]]:
    """Every element of one block, or record, in memory order, as (field, global index by axis)."""
    rows = pages * PAGE // arena.tokens_per_row

    def ranges(field: Field, token: range) -> dict[str, range]:
        found = {}
        for name, size in field.axes.items():
            count = size // 2 if field.dtype == "int4" else size
            each = max(1, count // members)
            begin = member * count // members
            found[name] = range(begin, begin + each) if name == field.shard_axis else range(count)
        return {**found, "token": token} if "token" in found else {"token": token, **found}

    def of(field: Field, token: range) -> Iterator[tuple[Field, dict[str, int]]]:
        axes = ranges(field, token)
        for index in product(*axes.values()):
            yield field, dict(zip(axes, index, strict=True))

    if arena.arrangement == "rows":
        for row in range(rows):
            for field in fields:
                yield from of(field, range(row, row + 1))
    else:
        for field in fields:
            yield from of(field, range(rows))


def arena_bytes(arena: Arena, fields: list[Field], blocks: list[int], member: int, members: int) -> bytes:
    """One block of an arena, or the rows of several one after another."""
    rows, whole = PAGE // arena.tokens_per_row, b""
    for field, index in elements(arena, fields, member, members, len(blocks)):
        page, row = divmod(index["token"], rows)
        whole += code(arena.name, field, blocks[page], {**index, "token": row})
    return whole


def payload(model: KvModel, blocks: list[int], shard: int, shards: int) -> bytes:
    """What the record of some blocks must contain."""
    arenas = model.repack.arenas if model.repack else model.arenas
    whole = b""
    for arena in arenas:
        fields = [field for field in arena.fields if field.shard_axis or shard == 0]
        whole += arena_bytes(arena, fields, blocks, shard, shards)
    return whole


class Memory:
    """One worker's memory, poisoned, in one of several forms."""

    def __init__(self, model: KvModel, form: str, worker: int, tp: int) -> None:
        self.model, self.worker, self.tp = model, worker, tp
        space = layout(model, worker, tp).space("full")
        if form == "page-first":
            self.binding = Binding.allocate(space, BLOCKS)
            self.raw = [next(iter(self.binding.arenas.values())).storage]
        else:
            self.raw = []
            tensors = {}
            for arena in space.arenas:
                stride = arena.stride_bytes + (64 if form == "layer-first padded" else 0)
                raw = torch.zeros(64 + BLOCKS * stride + 64, dtype=torch.uint8)
                self.raw.append(raw)
                tensors[arena.name] = raw.as_strided((BLOCKS, arena.content_bytes), (stride, 1), 64)
            self.binding = Binding.of(space, tensors)
        for raw in self.raw:
            raw.fill_(POISON)

    def fill(self, blocks: list[int]) -> None:
        """Write the oracle's bytes into some blocks."""
        for arena in self.model.arenas:
            bound = self.binding.arenas[arena.name]
            for block in blocks:
                data = arena_bytes(arena, list(arena.fields), [block], self.worker, self.tp)
                at = bound.offset_bytes + block * bound.stride_bytes
                bound.storage[at : at + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def image(self) -> list[NDArray[np.uint8]]:
        """A copy of all of the memory, guards and padding included."""
        return [raw.numpy().copy() for raw in self.raw]


FORMS = ["page-first", "layer-first", "layer-first padded"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", [PLAIN, PERMUTED], ids=["same", "permuted"])
@pytest.mark.parametrize(("tp", "max_tp"), [(1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (4, 4), (8, 4)])
def test_e1_payloads_equal_the_oracle_both_ways(model: KvModel, form: str, tp: int, max_tp: int) -> None:
    """E1: gather gives the oracle's record; scatter the oracle's memory, and touches no other byte."""
    (part,) = parts(model)
    shards = part.shards(max_tp)
    assert shards == math.gcd(4, max_tp)
    blocks = np.array([4, 1, 2], np.int32)
    for worker in range(tp):
        full, fresh = Memory(model, form, worker, tp), Memory(model, form, worker, tp)
        full.fill([1, 2, 4])
        before = full.image()
        complete = 0
        for shard in range(shards):
            record = wire_record(model, part, shard, shards)
            if not holds(record, worker, tp):
                with pytest.raises(UsageFault, match="holds nothing"):
                    CopyProgram.compile(full.binding, record, worker, tp)
                continue
            program = CopyProgram.compile(full.binding, record, worker, tp)
            assert program.complete == holds(record, worker, tp, whole=True)
            expected = [payload(model, [int(block)], shard, shards) for block in blocks]
            assert {len(data) for data in expected} == {record.payload_bytes}
            staged = torch.frombuffer(bytearray(b"".join(expected)), dtype=torch.uint8).reshape(3, -1)
            if program.complete:
                complete += 1
                out = torch.full((3, record.payload_bytes), 0x11, dtype=torch.uint8)
                program.gather(blocks, out)
                assert [bytes(row.numpy()) for row in out] == expected
            CopyProgram.compile(fresh.binding, record, worker, tp).scatter(blocks, staged)
        assert complete == max(1, shards // tp)
        for now, was, restored in zip(full.image(), before, fresh.image(), strict=True):
            assert np.array_equal(now, was)
            assert np.array_equal(restored, was)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", [PLAIN, PERMUTED], ids=["same", "permuted"])
@pytest.mark.parametrize(("tp", "max_tp"), [(1, 1), (1, 4), (2, 2), (8, 4)])
@pytest.mark.parametrize("blocks", [[[4, 1]], [[3, 1, 2]], [[4, 2], [1, 3]]])
def test_e1_a_record_of_several_pages_has_their_rows_in_order(
    blocks: list[list[int]], model: KvModel, form: str, tp: int, max_tp: int
) -> None:
    """E1: wherever the token axis lies, page j's rows are rows j, j + 1, ... of the record, both ways."""
    pages = len(blocks[0])
    model = model.model_copy(update={"key_tokens": pages * PAGE})
    (part,) = parts(model)
    shards = part.shards(max_tp)
    for worker in range(tp):
        full, fresh, some = (Memory(model, form, worker, tp) for _ in range(3))
        full.fill([1, 2, 3, 4])
        some.fill([record[-1] for record in blocks])
        for shard in range(shards):
            record = wire_record(model, part, shard, shards)
            if not holds(record, worker, tp):
                continue
            program, back, partly = (
                compile_program(model, of.binding, record, worker, tp) for of in (full, fresh, some)
            )
            assert not program.direct
            expected = [payload(model, ids, shard, shards) for ids in blocks]
            staged = torch.frombuffer(bytearray(b"".join(expected)), dtype=torch.uint8)
            staged = staged.reshape(len(blocks), record.payload_bytes)
            if program.complete:
                out = torch.full_like(staged, 0x11)
                program.gather(np.array(blocks), out)
                assert torch.equal(out, staged)
            back.scatter(np.array(blocks), staged)
            partly.scatter(np.array([[*ids[:-1], 0] for ids in blocks]), staged)
        wanted = Memory(model, form, worker, tp)
        wanted.fill([block for ids in blocks for block in ids])
        for image in (fresh.image(), some.image()):
            assert all(np.array_equal(*pair) for pair in zip(image, wanted.image(), strict=True))


def test_b21_what_is_left_out_of_a_record_is_never_written() -> None:
    """B21: 0 leaves a page of several out when pages are written; it is refused when they are read."""
    model = model_of(dense_arena("a"), key_tokens=2 * PAGE)
    binding = Binding.allocate(layout(model).space("full"), 4)
    program = program_of(model, binding)
    staged = torch.full((2, program.payload_bytes), 7, dtype=torch.uint8)
    with pytest.raises(UsageFault, match=r"expected \[n, 2\] from 1 to 3"):
        program.gather(np.array([[1, 2], [3, 0]]), staged)
    for blocks in ([1, 2], [[1, 2, 3]], [[1, 4], [2, 3]]):
        with pytest.raises(UsageFault, match=r"expected \[n, 2\]|expected contiguous"):
            program.scatter(np.array(blocks), staged)
    with pytest.raises(UsageFault, match="written twice"):
        program.scatter(np.array([[1, 2], [2, 3]]), staged)
    program.scatter(np.array([[0, 1], [2, 0]]), staged)
    assert [bool(view.any()) for view in binding.views["a", "kv"].view(torch.int16)] == [
        False,
        True,
        True,
        False,
    ]


def dense_arena(name: str, heads: int = 4, dim: int = 256) -> Arena:
    """One field of PAGE x heads x dim bf16."""
    field = Field(name="kv", dtype="bfloat16", axes={"head": heads, "dim": dim}, shard_axis="head")
    return Arena.planes(name=name, group="kv", fields=(field,))


def program_of(model: KvModel, binding: Binding) -> Program:
    """The program for whole records at tp 1."""
    (part,) = parts(model)
    return compile_program(model, binding, wire_record(model, part))


def test_page_first_record_is_one_run() -> None:
    """A page-first block that equals the payload is moved as one run, whatever padding follows it."""
    padded = dense_arena("b").model_copy(update={"stride_multiple_bytes": 4096})
    for arenas in ((dense_arena("a"), dense_arena("b")), (dense_arena("a"), padded)):
        model = model_of(*arenas)
        binding = Binding.allocate(layout(model).space("full"), 4)
        program = program_of(model, binding)
        assert program.direct
        address, lengths = program.buffers(np.array([3, 1]))
        assert lengths == (program.payload_bytes,) == (2 * PAGE * 4 * 256 * 2,)
        base, stride = binding.arenas["a"].address, binding.space.stride_bytes
        assert address.tolist() == [[base + 3 * stride], [base + stride]]


def test_mixed_arrangements_merge_into_one_run() -> None:
    """Fields of rows and planes that lie alike on both sides become one run, too."""
    arenas = [arena.model_copy(update={"align_bytes": 1, "stride_multiple_bytes": 1}) for arena in ARENAS]
    model = model_of(*arenas)
    program = program_of(model, Binding.allocate(layout(model).space("full"), 2))
    assert program.direct
    assert program.buffers(np.array([1]))[1] == (program.payload_bytes,)


def test_layer_first_is_direct_when_runs_are_long() -> None:
    """Long runs, one an arena, are moved straight; short ones are staged."""
    for dim, direct in ((256, True), (16, False)):
        model = model_of(dense_arena("a", dim=dim), dense_arena("b", dim=dim))
        space = layout(model).space("full")
        tensors = {name: torch.zeros(4, PAGE * 4 * dim * 2).byte() for name in ("a", "b")}
        program = program_of(model, Binding.of(space, tensors))
        assert program.direct is direct
        if direct:
            address, lengths = program.buffers(np.array([2]))
            assert lengths == (6144, 6144)
            assert address.tolist() == [[tensors[name].data_ptr() + 2 * 6144 for name in ("a", "b")]]
        else:
            with pytest.raises(UsageFault, match="gather"):
                program.buffers(np.array([2]))


def test_nan_and_negative_zero_keep_their_bits() -> None:
    """Elements are moved as integers: every bf16 code survives a staged round trip."""
    axes = {"head": 4, "dim": 4096}
    field = Field(name="x", dtype="bfloat16", axes=axes)
    turned = Field(name="x", dtype="bfloat16", axes=dict(reversed(list(axes.items()))))
    arena = Arena.planes(name="a", group="kv", fields=(field,))
    wire = Arena.planes(name="a", group="kv", fields=(turned,))
    model = model_of(arena, repack=Repack(arenas=(wire,)))
    binding = Binding.allocate(layout(model).space("full"), 3)
    codes = torch.arange(2**16, dtype=torch.int32).to(torch.uint16)[: PAGE * 4 * 4096]
    view = binding.views["a", "x"]
    view[1].view(torch.int16).copy_(codes.view(torch.int16).reshape(PAGE, 4, 4096))
    program = program_of(model, binding)
    out = torch.empty(1, program.payload_bytes, dtype=torch.uint8)
    program.gather(np.array([1]), out)
    program.scatter(np.array([2]), out)
    assert torch.equal(view[2].view(torch.int16), view[1].view(torch.int16))


def test_e8_block_ids_are_checked() -> None:
    """E8, B21: ids beyond the memory, the padding block, and repeated targets are refused."""
    model = model_of(dense_arena("a"))
    program = program_of(model, Binding.allocate(layout(model).space("full"), 4))
    staged = torch.zeros(2, program.payload_bytes, dtype=torch.uint8)
    for blocks in ([0, 1], [1, 4], [-1, 1]):
        for call in (
            program.buffers,
            lambda ids: program.gather(ids, staged),
            lambda ids: program.scatter(ids, staged),
        ):
            with pytest.raises(UsageFault, match="from 1 to 3"):
                call(np.array(blocks))
    with pytest.raises(UsageFault, match="written twice"):
        program.scatter(np.array([2, 2]), staged)
    with pytest.raises(UsageFault, match="expected contiguous"):
        program.gather(np.array([1]), staged)


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    """Differences that no copy bridges are refused, every field at once."""
    space = layout(PLAIN).space("full")
    binding = Binding.allocate(space, 3)

    def refusal(model: KvModel, shard: int = 0, shards: int = 1, worker: int = 0, tp: int = 1) -> str:
        (part,) = parts(model)
        with pytest.raises(UsageFault) as caught:
            CopyProgram.compile(binding, wire_record(model, part, shard, shards), worker, tp)
        return str(caught.value)

    def renamed(field: Field, **changes: object) -> KvModel:
        fields = (field.model_copy(update=changes), KV[1])
        return model_of(Arena.planes(name="l0.kv", group="kv", fields=fields))

    assert "dtype bfloat16 on the device, float16 on the wire" in refusal(renamed(KV[0], dtype="float16"))
    assert "no such field" in refusal(renamed(KV[0], name="other"))
    text = refusal(model_of(*ARENAS, key_tokens=2 * PAGE))
    assert "l0.kv.k: 3 rows a page on the device, 6 a record of 1 page(s) on the wire" in text
    assert text.count("rows a page") == 10
    assert "worker 0 of tp 2 should hold 0 to 2 of 4" in refusal(PLAIN, tp=2)
    quarter = Binding.allocate(layout(PLAIN, 1, 4).space("full"), 3)
    (part,) = parts(PLAIN)
    with pytest.raises(UsageFault, match="raise max_tp to at least 4"):
        CopyProgram.compile(quarter, wire_record(PLAIN, part, 0, 2), 1, 4)


def test_partial_records_are_read_not_written() -> None:
    """A worker that holds only the replicated fields of a record may not store it."""
    (part,) = parts(PLAIN)
    binding = Binding.allocate(layout(PLAIN, 1, 2).space("full"), 3)
    program = CopyProgram.compile(binding, wire_record(PLAIN, part, 0, 2), 1, 2)
    assert not program.complete
    assert not program.direct
    with pytest.raises(UsageFault, match="only a part"):
        program.gather(np.array([1]), torch.zeros(1, program.payload_bytes, dtype=torch.uint8))


def halve(src: dict[str, torch.Tensor], dst: dict[str, torch.Tensor]) -> None:
    """Plugin callable: bf16 to e4m3, and a scale of one."""
    dst["a/x"].copy_(src["a/x"])
    dst["a/s"].fill_(1.0)


def widen(src: dict[str, torch.Tensor], dst: dict[str, torch.Tensor]) -> None:
    """Plugin callable: the way back."""
    dst["a/x"].copy_(src["a/x"])


def broken(src: dict[str, torch.Tensor], dst: dict[str, torch.Tensor]) -> None:
    """Plugin callable that raises."""
    raise KeyError(f"{len(src)} {len(dst)}")


def lazy(src: dict[str, torch.Tensor], dst: dict[str, torch.Tensor]) -> None:
    """Plugin callable that writes nothing."""
    del src, dst


def converted(to_wire: str, from_wire: str, key_tokens: int | None = None) -> KvModel:
    """A model that is stored in one byte an element, with a scale before it."""
    arena = Arena.planes(
        name="a", group="kv", fields=(Field(name="x", dtype="bfloat16", axes={"head": 2, "dim": 4}),)
    )
    fields = (
        Field(name="s", dtype="float32", axes={"one": 1}),
        Field(name="x", dtype="float8_e4m3fn", axes={"head": 2, "dim": 4}),
    )
    wire = Arena.rows(name="a", group="kv", fields=fields)
    names = Conversion(to_wire=f"{__name__}:{to_wire}", from_wire=f"{__name__}:{from_wire}")
    repack = Repack(arenas=(wire,), conversion=names, lossless=False, bound=0.07)
    return model_of(arena, repack=repack, key_tokens=key_tokens)


def test_e6_callables_convert_both_ways() -> None:
    """E6: a plugin's callables see typed views of one block and of the wire, and round trip."""
    model = converted("halve", "widen")
    binding = Binding.allocate(layout(model).space("full"), 4)
    view = binding.views["a", "x"]
    view[1:3] = (torch.arange(48).remainder(13).reshape(2, PAGE, 2, 4) - 6) / 4  # exact in e4m3
    program = program_of(model, binding)
    assert program.payload_bytes == PAGE * 12
    assert not program.direct
    out = torch.full((2, program.payload_bytes), 0x11, dtype=torch.uint8)
    program.gather(np.array([2, 1]), out)
    first = out[0].reshape(PAGE, 12)
    assert torch.equal(first[:, :4].contiguous().view(torch.float32), torch.ones(PAGE, 1))
    assert torch.equal(first[:, 4:].reshape(PAGE, 2, 4).view(torch.float8_e4m3fn).bfloat16(), view[2])
    program.scatter(np.array([3]), out[1:])
    assert torch.equal(view[3], view[1])
    with pytest.raises(UsageFault, match="converted"):
        program.buffers(np.array([1]))


def test_e6_callables_see_a_whole_record() -> None:
    """E6: a callable gets the rows of all pages of a record, and what is resident already is left alone."""
    model = converted("halve", "widen", 2 * PAGE)
    binding = Binding.allocate(layout(model).space("full"), 6)
    view = binding.views["a", "x"]
    view[1:3] = (torch.arange(48).remainder(13).reshape(2, PAGE, 2, 4) - 6) / 4
    view[5] = 99
    before = view.clone()
    program = program_of(model, binding)
    assert program.payload_bytes == 2 * PAGE * 12
    out = torch.full((1, program.payload_bytes), 0x11, dtype=torch.uint8)
    program.gather(np.array([[2, 1]]), out)
    rows = out[0].reshape(2 * PAGE, 12)[:, 4:].reshape(2 * PAGE, 2, 4).view(torch.float8_e4m3fn).bfloat16()
    assert torch.equal(rows, torch.cat([view[2], view[1]]))
    program.scatter(np.array([[3, 4]]), out)
    program.scatter(np.array([[0, 5]]), out)
    assert torch.equal(view[3:], torch.stack([view[2], view[1], view[1]]))
    assert torch.equal(view[:3], before[:3])


def test_unwritten_wire_bytes_are_zero() -> None:
    """A callable that leaves gaps stores zeros, never what lay in the buffer before."""
    model = converted("lazy", "widen")
    program = program_of(model, Binding.allocate(layout(model).space("full"), 4))
    out = torch.full((1, program.payload_bytes), 0x11, dtype=torch.uint8)
    program.gather(np.array([1]), out)
    assert not out.any()


def test_errors_of_callables_name_the_plugin() -> None:
    """What a plugin's callable raises is told with its name; a missing one when compiling."""
    model = converted("broken", "broken")
    program = program_of(model, Binding.allocate(layout(model).space("full"), 4))
    staged = torch.zeros(1, program.payload_bytes, dtype=torch.uint8)
    for call in (program.gather, program.scatter):
        with pytest.raises(PluginFault, match=r":broken' raised on block 2: KeyError: '\d 2|1'"):
            call(np.array([2]), staged)
    for name in ("nonsense", "no.such.module:fn", f"{__name__}:missing", f"{__name__}:PAGE"):
        with pytest.raises(PluginFault, match=name.split(":", maxsplit=1)[0]):
            resolve(name)

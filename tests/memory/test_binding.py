"""Bindings: page-first allocation, engines' own tensors, and refusals with arithmetic (E1, E8, B22)."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.layout import Space, layout
from kvcontract.contract.model import Arena, Field, Group, KvModel, WeightIdentity
from kvcontract.memory.binding import Binding


def model_of(*arenas: Arena, page_tokens: int = 3) -> KvModel:
    """A model of one full-attention group named kv."""
    return KvModel(
        contract=1,
        name="toy",
        weights=WeightIdentity(kind="unresolved"),
        numerics="test",
        page_tokens=page_tokens,
        groups=(Group(name="kv"),),
        arenas=arenas,
    )


def planes(name: str, dtype: str = "bfloat16", **constraints: Any) -> Arena:
    """K and V of 2 heads and 5 elements; 120 B a page of 3 at two bytes an element."""
    fields = tuple(Field(name=field, dtype=dtype, axes={"head": 2, "dim": 5}) for field in ("k", "v"))
    return Arena.planes(name=name, group="kv", fields=fields, **constraints)


def space_of(*arenas: Arena) -> Space:
    """The one space of a model of these arenas."""
    return layout(model_of(*arenas)).space("full")


def test_page_first_views_alias_one_slab() -> None:
    """A page-first block holds its arenas side by side; views write exactly where the layout says."""
    space = space_of(planes("a"), planes("b"))
    binding = Binding.allocate(space, 4)
    assert binding.blocks == 4
    assert set(binding.views) == {("a", "k"), ("a", "v"), ("b", "k"), ("b", "v")}
    view = binding.views["b", "v"]
    assert view.shape == (4, 3, 2, 5)
    assert view.dtype is torch.bfloat16
    view[2, 1, 1, 4] = -1.0
    arena = binding.arenas["b"]
    at = arena.offset_bytes + 2 * 240 + 60 + (1 * 10 + 1 * 5 + 4) * 2
    assert arena.storage[at : at + 2].view(torch.bfloat16).item() == -1.0
    assert int(arena.storage.count_nonzero()) <= 2


def test_b21_fresh_memory_reads_as_zero() -> None:
    """B21: padding reads block 0; it holds no NaN."""
    binding = Binding.allocate(space_of(planes("a")), 2)
    assert all(not view.any() for view in binding.views.values())


def test_e1_alignment_and_stride_are_kept() -> None:
    """E1: blocks begin at multiples of the alignment, and padding lies between them."""
    binding = Binding.allocate(space_of(planes("a", align_bytes=4096)), 3)
    arena = binding.arenas["a"]
    assert arena.address % 4096 == 0
    assert arena.stride_bytes == 4096


def test_narrow_elements_are_bytes() -> None:
    """Elements narrower than a byte are seen as bytes along the last axis."""
    field = Field(name="q", dtype="int4", axes={"dim": 10})
    binding = Binding.allocate(space_of(Arena.planes(name="a", group="kv", fields=(field,))), 2)
    assert binding.views["a", "q"].shape == (2, 3, 5)
    assert binding.views["a", "q"].dtype is torch.uint8


def test_rows_are_interleaved() -> None:
    """Fields of a row arena are strided views of the same rows."""
    fields = (
        Field(name="x", dtype="float32", axes={"dim": 2}),
        Field(name="y", dtype="bfloat16", axes={"dim": 4}),
    )
    binding = Binding.allocate(space_of(Arena.rows(name="a", group="kv", fields=fields)), 2)
    assert binding.views["a", "x"].stride() == (12, 4, 1)
    assert binding.views["a", "y"].stride() == (24, 8, 1)


@pytest.mark.parametrize("typed", [False, True])
def test_layer_first_tensors_are_bound_as_they_are(*, typed: bool) -> None:
    """An engine's tensors keep their memory, whatever the distance of their blocks."""
    space = space_of(planes("a"), planes("b"))
    tensors = {
        "a": torch.zeros(6, 2, 3, 2, 5, dtype=torch.bfloat16) if typed else torch.zeros(6, 120).byte(),
        "b": torch.zeros(5, 128, dtype=torch.uint8),
    }
    binding = Binding.of(space, tensors)
    assert binding.blocks == 5
    binding.views["a", "v"][5, 0, 0, 0] = 1.0
    flat = tensors["a"].view(torch.uint8).reshape(6, 120)
    assert flat[5, 60:62].view(torch.bfloat16).item() == 1.0
    assert binding.arenas["b"].stride_bytes == 128
    assert binding.arenas["a"].address == tensors["a"].data_ptr()


def test_interleaved_views_of_one_storage_are_fine() -> None:
    """A page-first slab bound arena by arena overlaps in range, but not in bytes."""
    space = space_of(planes("a"), planes("b"))
    slab = torch.zeros(7 * 240, dtype=torch.uint8)
    tensors = {name: slab.as_strided((7, 120), (240, 1), at) for name, at in (("a", 0), ("b", 120))}
    binding = Binding.of(space, tensors, blocks=7)
    assert binding.blocks == 7


def refusal(space: Space, tensors: dict[str, torch.Tensor], blocks: int | None = None) -> str:
    """The message of a refused binding."""
    with pytest.raises(UsageFault) as caught:
        Binding.of(space, tensors, blocks)
    return str(caught.value)


def test_e8_too_few_blocks_with_the_arithmetic() -> None:
    """E8, B22: an arena a page short is refused, with the sum that shows it."""
    text = refusal(space_of(planes("a")), {"a": torch.zeros(128, 120).byte()}, 129)
    assert "arena a needs 129 blocks x 120 B = 15,480 B, its tensor holds 128 blocks = 15,360 B" in text
    assert "KVC-LAYOUT-05" in text


def test_e8_all_faults_come_at_once() -> None:
    """E8: every arena that does not fit is named in one refusal."""
    names = [f"a{number}" for number in range(9)]
    space = space_of(*(planes(name) for name in names))
    good = torch.zeros(4, 120, dtype=torch.uint8)
    backing = torch.zeros(1000, dtype=torch.uint8)
    text = refusal(
        space,
        {
            "a0": torch.zeros(4, 119).byte(),
            "a1": torch.zeros(4, 120, dtype=torch.float32),
            "a2": torch.zeros(1000).byte().as_strided((4, 120), (100, 1)),
            "a3": backing[1:].as_strided((4, 120), (120, 1), 1),
            "a4": torch.zeros(4, 240).byte()[:, ::2],
            "a5": good,
            "a6": good,
            "a7": torch.zeros(0, 120).byte(),
            "other": good,
        },
    )
    for expected in (
        r"arena a0 needs 120 B a block, its tensor has 119 B a block",
        r"arena a1: dtype torch.float32; expected torch.uint8, or torch.bfloat16 alone",
        r"arena a2: blocks of 120 B lie only 100 B apart: they overlap",
        r"arena a3: field k at 0x\w+1 \+ 0, .* expected multiples of its element, 2 B",
        r"arena a4: strides \[240, 2\] are not contiguous inside a block",
        r"arenas a5 and a6 share memory",
        r"arena a7: a tensor of shape \[0, 120\]",
        r"no tensor for arena a8",
        r"a tensor for other, which space full has not",
    ):
        assert re.search(expected, text), expected


def test_e8_end_of_storage() -> None:
    """E8: a storage that was shrunk behind the tensor is noticed."""
    tensor = torch.zeros(4, 120, dtype=torch.uint8)
    tensor.untyped_storage().resize_(479)
    text = refusal(space_of(planes("a")), {"a": tensor})
    assert "0 B + 3 x 120 B + 120 B = 480 B, its storage ends at 479 B" in text


def test_e8_partial_overlap_of_interleaved_arenas() -> None:
    """E8: two arenas whose blocks share a single byte are found."""
    space = space_of(planes("a"), planes("b"))
    slab = torch.zeros(7 * 240, dtype=torch.uint8)
    tensors = {name: slab.as_strided((6, 120), (240, 1), at) for name, at in (("a", 0), ("b", 118))}
    assert "arenas a and b share memory" in refusal(space, tensors)


def test_e8_misaligned_declaration_is_refused_at_allocation() -> None:
    """E8: elements that would straddle their boundaries are refused before memory exists."""
    odd = Field(name="s", dtype="uint8", axes={"dim": 1})
    space = space_of(Arena.planes(name="s", group="kv", fields=(odd,)), planes("a"))
    with pytest.raises(UsageFault, match=r"field k at 0x3 .* its element, 2 B"):
        Binding.allocate(space, 2)
    with pytest.raises(UsageFault, match="0 blocks"):
        Binding.allocate(space_of(planes("a")), 0)
    text = refusal(space_of(planes("a", align_bytes=64)), {"a": torch.zeros(4, 120).byte()})
    assert "blocks 120 B apart; expected multiples of align_bytes, 64 B" in text


@pytest.mark.parametrize("form", ["page-first", "layer-first"])
def test_e4_a_boundary_page_is_copied_with_all_its_groups(form: str) -> None:
    """E4: every arena of a space is copied, and no other block; sources stay as they are."""
    space = space_of(planes("a"), planes("b", "float32", stride_multiple_bytes=256))
    made = Binding.allocate(space, 5)
    if form == "layer-first":
        made = Binding.of(
            space,
            {arena.name: torch.zeros(5, arena.stride_bytes, dtype=torch.uint8) for arena in space.arenas},
        )
    for number, view in enumerate(made.views.values()):
        view.copy_(torch.arange(view.numel()).reshape(view.shape) % 97 + number)
    before = {name: view.clone() for name, view in made.views.items()}
    made.copy_blocks([(1, 3), (2, 4)])
    for name, view in made.views.items():
        assert torch.equal(view, before[name][[0, 1, 2, 1, 2]])
    with pytest.raises(UsageFault, match=r"blocks \[-1, 5\]"):
        made.copy_blocks([(1, 5), (-1, 2)])
    assert torch.equal(made.views["a", "k"][2], before["a", "k"][2])

"""Bytes that follow from declarations, against the published geometry of real models."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kvcontract import Arena, Field, Group, KvModel, WeightIdentity, Window
from kvcontract.contract.errors import UsageFault
from kvcontract.contract.layout import FieldLayout, held, layout, tp_faults
from kvcontract.contract.wire import SEGMENT_BYTES, Part, fingerprint, parts, wire_record

from .declarations import arena, model, plane

CONFIGS = Path(__file__).parents[1] / "configs"


def sparse_mla() -> KvModel:
    """An fp8 latent of 656-byte rows beside blocked index keys; sizes from a real config.json."""
    config = json.loads((CONFIGS / "glm-5.2.json").read_text())
    layers = config["num_hidden_layers"]
    indexed = {i for i, kind in enumerate(config["indexer_types"]) if kind == "full"} | {layers}
    row = (
        Field(name="latent", dtype="float8_e4m3fn", axes={"dim": config["kv_lora_rank"]}, scale="scale"),
        Field(name="scale", dtype="float32", axes={"group": config["kv_lora_rank"] // 128}),
        Field(name="rope", dtype="bfloat16", axes={"dim": config["qk_rope_head_dim"]}),
    )
    index = (
        Field(name="keys", dtype="float8_e4m3fn", axes={"dim": config["index_head_dim"]}, scale="scale"),
        Field(name="scale", dtype="float32", axes={"group": 1}),
    )
    arenas: list[Arena] = []
    for layer in range(layers + 1):
        arenas.append(
            Arena.rows(name=f"mla.{layer}", group="mla", layer=layer, fields=row, stride_multiple_bytes=656)
        )
        if layer in indexed:
            arenas.append(Arena.planes(name=f"idx.{layer}", group="idx", layer=layer, fields=index))
    groups = (Group(name="mla"), Group(name="idx"))
    return model(page_tokens=64, groups=groups, arenas=tuple(arenas))


def test_rows_are_interleaved_and_planes_blocked() -> None:
    """The 656-byte row has its scales at 512 and its rope key at 528; index scales follow all keys."""
    space = layout(sparse_mla()).spaces[0]
    latent, scale, rope = space.arenas[0].fields
    assert [item.offset_bytes for item in (latent, scale, rope)] == [0, 512, 528]
    assert {item.strides_bytes[0] for item in (latent, scale, rope)} == {656}
    keys, scales = space.arenas[1].fields
    assert (keys.offset_bytes, scales.offset_bytes, space.arenas[1].content_bytes) == (0, 64 * 128, 8448)


def test_e1_stride_is_not_content() -> None:
    """79 latent slices and 22 index slices: 3,502,592 B of content in a stride of 3,503,040 B."""
    laid = layout(sparse_mla())
    assert laid.spaces[0].arenas[0].content_bytes == 41_984
    assert laid.page_bytes == laid.spaces[0].content_bytes == 3_502_592
    assert laid.spaces[0].stride_bytes == 3_503_040
    assert laid.spaces[0].arenas[0].stride_bytes == 41_984  # bound on its own, layer-first


def test_aligned_groups_share_a_space_and_bounded_ones_have_their_own() -> None:
    """One block-id space for each reach, one for each bounded group."""
    bounded = Arena.planes(
        name="state", group="ssm", fields=(Field(name="s", dtype="float32", axes={"n": 6}),)
    )
    windowed = arena(1, name="w", group="win")
    declared = model(
        groups=(
            Group(name="kv"),
            Group(name="win", reach=Window(tokens=32)),
            Group(name="ssm", kind="bounded"),
        ),
        arenas=(arena(0), windowed, bounded),
    )
    assert [space.key for space in layout(declared).spaces] == ["full", "window-32", "slots-ssm"]
    assert layout(declared).space("slots-ssm").content_bytes == 24
    assert layout(declared).page_bytes == 2 * 2 * 16 * 4 * 8 * 2
    assert {part.name for part in parts(declared)} == {"full", "window-32", "ssm"}


def element_addresses(field: FieldLayout) -> list[int]:
    """Address of every element by definition."""
    spots = product(*(range(size) for size in field.shape))
    return [
        field.offset_bytes + sum(at * step for at, step in zip(spot, field.strides_bytes, strict=True))
        for spot in spots
    ]


@pytest.mark.parametrize("arrangement", ["rows", "planes"])
@pytest.mark.parametrize("page_tokens", [1, 3, 5, 16])
def test_fields_tile_their_block_exactly(arrangement: str, page_tokens: int) -> None:
    """Every byte of a block belongs to exactly one element of one field."""
    fields = (
        plane("k", head=3, dim=5),
        plane("v", head=3, dim=7),
        plane("s", head=3, dim=2, dtype="float32"),
    )
    declared = model(page_tokens=page_tokens, arenas=(arena(0, fields=fields, arrangement=arrangement),))
    block = layout(declared).spaces[0].arenas[0]
    covered = [
        address + byte
        for item in block.fields
        for address in element_addresses(item)
        for byte in range(item.element_bytes)
    ]
    assert sorted(covered) == list(range(block.content_bytes))


def test_a_field_may_place_the_token_axis() -> None:
    """Head-major planes: [head, token, dim], the token axis listed with size 1."""
    field = Field(name="k", dtype="bfloat16", axes={"head": 2, "token": 1, "dim": 4}, shard_axis="head")
    laid = layout(model(page_tokens=5, arenas=(arena(0, fields=(field,)),))).spaces[0].arenas[0].fields[0]
    assert (laid.axes, laid.shape, laid.strides_bytes) == (("head", "token", "dim"), (2, 5, 4), (40, 8, 2))


def test_sub_byte_elements_are_stated_as_bytes() -> None:
    """Two 4-bit elements fill a byte; the last axis is then in bytes."""
    field = Field(name="k", dtype="int4", axes={"dim": 6})
    laid = layout(model(page_tokens=3, arenas=(arena(0, fields=(field,)),))).spaces[0].arenas[0].fields[0]
    assert (laid.shape, laid.element_bytes, laid.content_bytes) == ((3, 3), 1, 9)


@pytest.mark.parametrize(("tp", "share"), [(1, 1), (2, 2), (4, 4), (8, 4)])
def test_workers_hold_their_share_of_heads(tp: int, share: int) -> None:
    """Four heads: halves at tp 2, one each at tp 4, replicas of one at tp 8; the fingerprint is one."""
    whole = layout(model()).page_bytes
    assert layout(model(), tp - 1, tp).page_bytes == whole // share


def test_e3_a_tp_that_does_not_fit_is_refused_with_every_number() -> None:
    """Three workers cannot cut four heads; each field is named."""
    assert len(tp_faults(model(), 3)) == 4
    with pytest.raises(UsageFault, match=r"layers\.0\.kv\.k: axis head of 4 cannot be cut over tp 3"):
        layout(model(), 0, 3)
    with pytest.raises(UsageFault, match="worker 2 of tp 2"):
        layout(model(), 2, 2)


def test_held_ranges_cover_the_axis() -> None:
    """Workers hold consecutive ranges; above the axis size, replicas of single entries."""
    assert [held(6, worker, 3) for worker in range(3)] == [(0, 2), (2, 4), (4, 6)]
    assert [held(2, worker, 4) for worker in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]


def test_wire_shards_are_independent_of_the_writer() -> None:
    """gcd(heads, max_tp) shards, each a dense slice, together the page."""
    declared = model()
    part = parts(declared)[0]
    assert part.shards(8) == 4
    assert part.shards(6) == 2
    records = [wire_record(declared, part, shard, 4) for shard in range(4)]
    assert sum(record.payload_bytes for record in records) == layout(declared).page_bytes
    assert [record.cuts["layers.0.kv", "k"] for record in records] == [("head", i, i + 1) for i in range(4)]


def test_replicated_parts_have_one_shard() -> None:
    """No field is cut, so there is nothing to cut on the wire."""
    assert [part.shards(8) for part in parts(sparse_mla())] == [1]


def test_wire_is_dense_and_segments_are_whole_layers() -> None:
    """No stride, no alignment on the wire; segments add up and none splits a layer."""
    declared = sparse_mla()
    record = wire_record(declared, parts(declared)[0])
    assert record.payload_bytes == 3_502_592
    assert sum(record.segments) == record.payload_bytes
    ends = {arena.offset_bytes for arena in record.arenas if arena.name.startswith("mla")} | {
        record.payload_bytes
    }
    total = 0
    for segment in record.segments:
        total += segment
        assert total in ends
        assert segment <= SEGMENT_BYTES


def test_part_numbers_do_not_shift_with_other_optional_groups() -> None:
    """An engine without one optional group files the others the same way."""

    def numbers(*names: str) -> dict[str, int]:
        groups = (Group(name="kv"), *(Group(name=name, optional=True) for name in names))
        arenas = (arena(0), *(arena(0, name=name, group=name) for name in names))
        found: tuple[Part, ...] = parts(model(groups=groups, arenas=arenas))
        return {part.name: part.id for part in found}

    both, one = numbers("mtp", "eagle"), numbers("eagle")
    assert both["full"] == one["full"] == 0
    assert both["eagle"] == one["eagle"]


def changed(**more: Any) -> bytes:
    """Identity of the small model after a change."""
    return fingerprint(model(**more)).required


def test_d6_fingerprints_change_with_every_stored_byte() -> None:
    """Weights, numerics, config, fields, order, record size and revision of a conversion are identity."""
    base = changed()
    other = [
        changed(weights=WeightIdentity(kind="digest", value="a")),
        changed(weights=WeightIdentity(kind="unresolved", config="rope")),
        changed(numerics="bfloat16 from e4m3"),
        changed(name="other"),
        changed(page_tokens=32),
        changed(arenas=(arena(1), arena(0))),
        changed(arenas=(arena(0), arena(1, fields=(plane("v"), plane("k"))))),
        changed(arenas=(arena(0), arena(1, fields=(plane("k"), plane("v", dtype="float16"))))),
        changed(groups=(Group(name="kv", reach=Window(tokens=64)),)),
    ]
    assert len({base, *other}) == len(other) + 1


def test_d6_fingerprints_ignore_what_changes_no_byte() -> None:
    """Strides, alignment, allowed page sizes, and the page size where records have their own."""
    assert changed(arenas=(arena(0, stride_multiple_bytes=656), arena(1, align_bytes=256))) == changed()
    assert changed(page_tokens_allowed=(16,), page_tokens_reason="gated") == changed()
    assert changed(page_tokens=16, key_tokens=64) == changed(page_tokens=64)


def test_d6_optional_groups_have_an_identity_of_their_own() -> None:
    """A drafter's weights change its own part's fingerprint, not the pages'."""

    def of(weights: str) -> tuple[bytes, bytes]:
        drafter = Group(name="mtp", optional=True, weights=WeightIdentity(kind="digest", value=weights))
        found = fingerprint(
            model(groups=(Group(name="kv"), drafter), arenas=(arena(0), arena(1, group="mtp")))
        )
        return found.required, found.parts["mtp"]

    assert of("a")[0] == of("b")[0]
    assert of("a")[1] != of("b")[1]

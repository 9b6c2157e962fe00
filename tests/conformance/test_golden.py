"""How the golden checks judge: good arrays pass, every kind of bad one fails in words that say where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from kvc_conformance.checks.layer_map import contradictions
from kvc_conformance.footprint import Batch, Footprint, Place, rows_of_bytes
from kvc_conformance.golden import (
    Distance,
    Logits,
    Run,
    beyond_bounds,
    less_exact,
    nan_words,
    relation,
    wrong_bits,
    wrong_hit,
    wrong_logits,
    wrong_tokens,
)
from kvcontract.contract.layout import layout
from kvcontract.contract.model import Arena, Field, Group, KvModel, WeightIdentity

PAGE = 4
VOCAB = 32
PROMPT = 9
NEW = 4


def logits(seed: int = 0, rows: int = PROMPT + NEW - 1) -> Logits:
    """Distributions whose best token leads clearly."""
    found = np.random.default_rng(seed).normal(size=(rows, VOCAB)).astype(np.float32)
    found[np.arange(rows), (np.arange(rows) * 7) % VOCAB] += 6
    return found


def request(rows: Logits, hit: int = 0) -> Run:
    """A request of 9 + 4 tokens, run in chunks of at most 6 tokens from the end of its hit."""
    sampled = tuple(logits()[PROMPT - 1 :].argmax(axis=1).tolist())
    split = (6, 3) if hit == 0 else (PROMPT - hit,)
    positions = np.arange(hit, PROMPT + NEW - 1)
    sources = {"device": hit} if hit else {}
    return Run("request 0", np.arange(PROMPT), sampled, rows, positions, (*split, 1, 1, 1), hit, sources)


def changed(position: int, by: float = 1e-4, hit: int = 0) -> Logits:
    """Logits that are wrong from one position on."""
    found = logits()[hit:].copy()
    found[position - hit :, 3] += by
    return found


def test_prefix_01_a_map_that_contradicts_the_declaration_is_told() -> None:
    """Other layers' arenas, and fields that two writers share; arenas of no layer may be anyone's."""
    one = Field(name="k", dtype="float32", axes={"dim": 2})
    arenas = tuple(
        Arena.planes(name=name, group="kv", layer=layer, fields=(one,))
        for name, layer in (("a", 0), ("b", 1), ("c", None))
    )
    model = KvModel(
        contract=1,
        name="toy",
        weights=WeightIdentity(kind="unresolved"),
        numerics="test",
        page_tokens=4,
        groups=(Group(name="kv"),),
        arenas=arenas,
    )
    assert contradictions(model, [[0, "a", "k"], [1, "b", "k"], [2, "c", "k"]]) == []
    assert contradictions(model, [[0, "b", "k"], [1, "a", "k"]])[0] == (
        "layer 0 of the model writes into arena b, which declares layer 1"
    )
    shared = contradictions(model, [[0, "c", "k"], [1, "c", "k"], [0, "a", "k"]])
    assert shared == [
        "layers 0 and 1 of the model both write into field k of c",
        "no layer of the model writes into field k of arena b, which is declared",
    ]
    assert "writes twice into field k" in contradictions(model, [[0, "a", "k"], [0, "a", "k"]])[0]


# Gate a


def test_prefix_01_equal_logits_pass() -> None:
    """Differences within the bound are none."""
    assert wrong_logits(request(logits()), logits(), PAGE) is None
    assert wrong_logits(request(changed(0, 5e-6)), logits(), PAGE) is None
    assert wrong_tokens(request(logits()), logits()) is None


@pytest.mark.parametrize(
    ("position", "words"),
    [
        (0, "position 0 reads no row but its own"),
        (3, "it fills its page"),
        (4, "the first of page 1, and so the first to read back the last row (position 3) of page 0"),
        (6, "it is the first of its step"),
        (7, "in the prefill step of positions 6..8; the last row of page 1"),
        (9, "a decode step with 9 tokens before it; row 1 of page 2"),
    ],
)
def test_prefix_01_names_the_first_wrong_position(position: int, words: str) -> None:
    """Position, step, relation to the page boundary and where to look are told."""
    said = wrong_logits(request(changed(position)), logits(), PAGE)
    assert said is not None
    assert f"first wrong: position {position}," in said
    assert f"{PROMPT + NEW - 1 - position} of 12 positions are wrong" in said
    assert words in said


def test_prefix_01_nan_is_wrong() -> None:
    """NaN is no small difference."""
    bad = logits()
    bad[5, 0] = np.nan
    said = wrong_logits(request(bad), logits(), PAGE)
    assert said is not None
    assert "up to inf" in said
    assert "no step has written" in nan_words("the logits of position 5 are NaN")


def test_prefix_01_a_window_that_ends_there_is_named() -> None:
    """What is wrong from about the end of a window on is the window's business before it is a page's."""
    words = "6 tokens are what a window or chunk is declared to reach"
    for position in (5, 6, 7):
        assert words in str(wrong_logits(request(changed(position)), logits(), PAGE, {6}))
    assert words not in str(wrong_logits(request(changed(8)), logits(), PAGE, {6}))


def test_prefix_01_missing_positions_are_wrong() -> None:
    """Logits of fewer positions, or of another vocabulary, are no pass."""
    assert "shape [11, 32]" in str(wrong_logits(request(logits()[:-1]), logits(), PAGE))
    assert "shape [12, 31]" in str(wrong_logits(request(logits()[:, :-1]), logits(), PAGE))


def test_prefix_01_other_tokens_are_wrong() -> None:
    """A sampled token that is not the original's best is told with both and the margin."""
    run = request(logits())
    said = wrong_tokens(replace(run, tokens=(run.tokens[0], 30, *run.tokens[2:])), logits())
    assert said is not None
    assert "after position 9 the token 30 was sampled" in said


def test_relation_to_page_boundaries() -> None:
    """The rows at a boundary are called what they are; with pages of one token every row is one."""
    assert relation(15, 16) == "the last row of page 0"
    assert relation(16, 16).startswith("the first of page 1")
    assert relation(17, 16) == "row 1 of page 1"
    assert relation(1, 1).startswith("the first of page 1")


# Gate b


def test_prefix_02_equal_bits_pass() -> None:
    """The computed rest of a warm run equals the cold one."""
    assert wrong_bits(request(logits()[8:], hit=8), request(logits()), PAGE) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prefix_02_one_bit_is_told(dtype: str) -> None:
    """The last bit of one logit, or the sign of a zero, is a difference; bfloat16 travels as float32."""
    warm = logits()[8:].copy()
    bit = np.uint32(1 if dtype == "float32" else 1 << 16)
    warm.view(np.uint32)[2, 5] ^= bit
    said = wrong_bits(request(warm, hit=8), request(logits()), PAGE)
    assert said is not None
    assert "first different: position 10" in said
    assert "1 of 4 positions differ" in said
    cold, signed = logits(), logits()[8:].copy()
    cold[9, 1], signed[1, 1] = 0.0, -0.0
    assert wrong_bits(request(signed, hit=8), request(cold), PAGE) is not None


def test_offload_02_says_where_the_state_came_from() -> None:
    """A restore is called one."""
    run = replace(request(changed(8, hit=8), hit=8), sources={"dram": 8})
    said = wrong_bits(run, request(logits()), PAGE)
    assert said is not None
    assert "the tier and was restored" in said
    assert "the first after the hit" in said


def test_a_hit_of_another_length_or_source_is_told() -> None:
    """A restore that was a device hit proves nothing, and neither does a miss."""
    run = request(logits()[8:], hit=8)
    assert wrong_hit(run, "device", 8) is None
    assert "hit 8 tokens (8 from device); expected 8 from dram" in str(wrong_hit(run, "dram", 8))
    assert "hit 0 tokens (none); expected 8 from dram" in str(wrong_hit(request(logits()), "dram", 8))


# Gate c


def test_prefix_03_near_distributions_pass() -> None:
    """Rounding stays below the bounds, and the figures are told."""
    near = logits() + np.random.default_rng(1).normal(scale=0.02, size=logits().shape).astype(np.float32)
    assert beyond_bounds(request(near), logits(), PAGE, "the original") is None
    assert "regret 0.000 nat at most" in str(Distance.of(near, logits()))


def _other_best(rows: Logits) -> None:
    rows[7, 0], rows[7, 1] = rows[7].max() + 0.5, rows[7].max() + 0.4


def _noise(rows: Logits) -> None:
    rows += np.random.default_rng(2).normal(scale=0.15, size=rows.shape).astype(np.float32)


def _one_wrong_row(rows: Logits) -> None:
    rows[7] += np.linspace(-1, 1, VOCAB, dtype=np.float32)


def _nan(rows: Logits) -> None:
    rows[7, 0] = np.nan


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_other_best, "regret of the best token"),
        (_noise, "mean |log-probability difference|"),
        (_one_wrong_row, "99th percentile"),
        (_nan, "not finite"),
    ],
)
def test_prefix_03_each_bound_can_be_broken(spoil: Callable[[Logits], None], words: str) -> None:
    """Regret, mean and 99th percentile each have their say, and NaN is not within any."""
    rows = logits()
    spoil(rows)
    said = beyond_bounds(request(rows), logits(), PAGE, "the original")
    assert said is not None
    assert words in said


def test_prefix_03_a_cache_of_fewer_bits_may_be_further_away() -> None:
    """What breaks the bounds of 16 bits is within those of 8."""
    rows = logits()
    _noise(rows)
    assert beyond_bounds(request(rows), logits(), PAGE, "the original", 8) is None


def test_prefix_03_precision_is_measured_in_what_the_original_loses_by_itself() -> None:
    """Other rounding of the same size passes; three times as much is a narrower type somewhere."""
    exact = logits()

    def off_by(scale: float, seed: int) -> Logits:
        noise = np.random.default_rng(seed).normal(scale=scale, size=exact.shape)
        return exact + noise.astype(np.float32)

    assert less_exact(request(off_by(0.01, 3)), off_by(0.01, 4), exact, "bfloat16") is None
    said = less_exact(request(off_by(0.03, 3)), off_by(0.01, 4), exact, "bfloat16")
    assert said is not None
    assert "look for a type narrower than bfloat16" in said


def test_prefix_03_regret_is_the_references() -> None:
    """Regret is how much less likely the reference finds our best token than its own."""
    reference = np.log(np.array([[0.5, 0.3, 0.2] + [1e-9] * 29], np.float32))
    ours = np.zeros((1, VOCAB), np.float32)
    ours[0, 1] = 5
    assert Distance.of(ours, reference).regret[0] == pytest.approx(np.log(0.5 / 0.3), abs=1e-5)


def test_prefix_03_of_equally_likely_tokens_the_first_are_compared() -> None:
    """Which of them are the likeliest does not depend on how they are sorted."""
    reference, ours = np.zeros((1, 64), np.float32), np.zeros((1, 64), np.float32)
    reference[0, 40:] = 1
    ours[0, 40:48] = 1
    first = Distance.of(ours, reference).top
    ours[0, 48:] = -1e3
    assert first.shape == (1, 8)
    assert len(set(first[0].tolist())) == 1
    assert (Distance.of(ours, reference).top < 10).all()


# What a step writes

FILLS = (0xA5, 0x5A)
BLOCKS = 6


def declared() -> KvModel:
    """Two arenas, one of planes and one of interleaved rows, with padding between blocks."""
    axes = {"head": 2, "dim": 3}
    fields = tuple(Field(name=name, dtype="float32", axes=axes) for name in "kv")
    align = {"align_bytes": 128}
    return KvModel(
        contract=1,
        name="toy",
        weights=WeightIdentity(kind="unresolved"),
        numerics="float32",
        page_tokens=PAGE,
        groups=(Group(name="kv"),),
        arenas=(
            Arena.planes(name="planes", group="kv", layer=0, fields=fields, **align),
            Arena.rows(name="rows", group="kv", layer=1, fields=fields, **align),
        ),
    )


BATCHES = [
    Batch([4, 3], [0, 0], {"full": np.array([[2, 0], [5, 0]], np.int32)}),
    Batch([2, 1], [4, 3], {"full": np.array([[2, 4], [5, 0]], np.int32)}),
]
"""Request 0 runs positions 0..3, then 4..5, on pages 2 and 4; request 1 runs 0..2, then 3, on page 5."""


class Memory:
    """Page-first memory that is written as the batches say, over both fillings."""

    def __init__(self) -> None:
        self.model = declared()
        (space,) = layout(self.model).spaces
        self.stride = space.stride_bytes
        self.arenas = {arena.name: arena for arena in space.arenas}
        self.places = {
            arena.name: Place(0, arena.offset_bytes, space.stride_bytes, BLOCKS) for arena in space.arenas
        }
        self.images = tuple(np.full(BLOCKS * self.stride, fill, np.uint8) for fill in FILLS)
        for block, row in [*((2, row) for row in range(4)), (4, 0), (4, 1), *((5, row) for row in range(4))]:
            self.write(block, row)

    def at(self, arena: str, block: int, row: int) -> np.ndarray:
        """Bytes of a row."""
        return self.places[arena].offset_bytes + block * self.stride + self.bytes_of(arena, row)

    def bytes_of(self, arena: str, row: int) -> np.ndarray:
        """The same inside a block, worked out by hand: two planes of 4 rows x 24 B, or rows of 2 x 24 B."""
        if arena == "rows":
            return np.arange(row * 48, (row + 1) * 48)
        return np.concatenate([np.arange(plane + row * 24, plane + (row + 1) * 24) for plane in (0, 96)])

    def write(self, block: int, row: int, arenas: tuple[str, ...] = ("planes", "rows")) -> None:
        """Write a row, with equal bytes over both fillings."""
        for arena in arenas:
            where = self.at(arena, block, row)
            for image in self.images:
                image[where] = np.arange(len(where))

    def unwrite(self, block: int, row: int) -> None:
        """Put a row's fillings back."""
        for arena in self.arenas:
            for image, fill in zip(self.images, FILLS, strict=True):
                image[self.at(arena, block, row)] = fill

    def judge(self, batches: list[Batch] | None = None) -> str | None:
        """The verdict after the last step."""
        one, two = self.images
        return Footprint(self.model, self.places, batches or BATCHES).judge(([one], [two]), FILLS)


def test_prefix_04_exactly_its_rows_pass() -> None:
    """Rows of committed positions and nothing else; bytes belong to the rows worked out by hand."""
    memory = Memory()
    assert memory.judge() is None
    for name, arena in memory.arenas.items():
        rows = rows_of_bytes(arena)
        assert all((rows[memory.bytes_of(name, row)] == row).all() for row in range(PAGE))
        assert (rows >= 0).sum() == PAGE * 48


def test_prefix_04_a_byte_that_happens_to_equal_its_filling_is_no_fault() -> None:
    """A written byte may be what lay there before: the other filling tells."""
    memory = Memory()
    for image in memory.images:
        image[memory.at("rows", 4, 1)] = FILLS[0]
    assert memory.judge() is None


@pytest.mark.parametrize(
    ("block", "row", "words"),
    [
        (0, 0, "page 0, row 0: page 0 pads page tables and is nobody's"),
        (4, 2, "page 4, row 2: position 6 of request 0, of which positions 0..5 have been run"),
        (3, 1, "page 3, row 1: no request of the step has that page"),
    ],
)
def test_prefix_04_a_row_too_many_is_told(block: int, row: int, words: str) -> None:
    """Page 0, later rows of the last page, and other pages: arena, page, row and whose it is."""
    memory = Memory()
    memory.write(block, row, ("planes",))
    said = memory.judge()
    assert said is not None
    assert said.startswith("the step that ran positions 4..5 and positions 3..3 also wrote arena planes")
    assert words in said
    assert "(48 B too many in all)" in said


def test_prefix_04_another_requests_later_row_is_told() -> None:
    """After the first step, position 3 of request 1 is not anyone's to write yet."""
    memory = Memory()
    for row in (0, 1):
        memory.unwrite(4, row)
    said = memory.judge(BATCHES[:1])
    assert said is not None
    assert "page 5, row 3: position 3 of request 1, of which positions 0..2 have been run" in said


def test_prefix_04_a_row_of_an_earlier_step_is_not_written_again() -> None:
    """What has been written may be shared by now: other numbers there are told, whoever put them there."""
    memory = Memory()
    one, two = memory.images
    before = [one.copy()], [two.copy()]
    for row in (0, 1):
        where = memory.at("planes", 4, row)
        for image, fill in zip(before, FILLS, strict=True):
            image[0][where] = fill
    one[memory.at("planes", 5, 1)] += 1
    said = Footprint(memory.model, memory.places, BATCHES).judge(([one], [two]), FILLS, before)
    assert "page 5, row 1: position 1 of request 1, which an earlier step has written" in str(said)


def test_prefix_04_padding_is_nobodys() -> None:
    """Bytes between blocks are not to be touched."""
    memory = Memory()
    memory.images[0][memory.stride - 1] = 0
    assert memory.stride > 2 * 192
    assert "padding" in str(memory.judge())


def test_prefix_04_a_row_that_was_not_written_is_told() -> None:
    """State that went elsewhere leaves its row as it was."""
    memory = Memory()
    memory.unwrite(5, 3)
    said = str(memory.judge())
    assert "arena planes, page 5, row 3 (position 3 of request 1) was not written" in said


def test_prefix_04_a_row_that_depends_on_old_memory_is_told() -> None:
    """What is written must not come from what lay there."""
    memory = Memory()
    memory.images[1][memory.at("planes", 2, 1)] += 1
    assert "page 2, row 1 (position 1 of request 0) depends on what lay in memory before" in str(
        memory.judge()
    )

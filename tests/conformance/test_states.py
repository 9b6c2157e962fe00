"""How states that lie in slots are judged: against the original's, against a cold run's, byte by byte."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvc_conformance.footprint import Batch, Footprint, Place
from kvc_conformance.golden import Run
from kvc_conformance.states import Kept, state_fields, unlike_original, wrong_states
from kvcontract import Arena, Field, Group, KvModel, WeightIdentity
from kvcontract.contract.layout import layout

ROW = Field(name="k", dtype="float32", axes={"head": 1, "dim": 2})
STATE = Field(name="state", dtype="float32", axes={"head": 2, "key": 3})
Q = Field(name="q", dtype="float32", axes={"head": 2, "dim": 1, "column": 3})
V = Field(name="v", dtype="float32", axes={"head": 2, "dim": 2, "column": 3})
MODEL = KvModel(
    contract=1,
    name="toy",
    weights=WeightIdentity(kind="unresolved"),
    numerics="float32",
    page_tokens=4,
    groups=(Group(name="kv"), Group(name="gdn", kind="bounded", boundary_tokens=4)),
    arenas=(
        Arena.planes(name="rows", group="kv", layer=1, fields=(ROW,)),
        Arena.planes(name="state", group="gdn", layer=0, fields=(STATE,)),
        Arena.planes(name="conv", group="gdn", layer=0, fields=(Q, V)),
    ),
)
SPLIT = (4, 3)
KEPT = Kept.of(MODEL, [0, ["state", "state"], [["conv", "q"], ["conv", "v"]]])


def original(seed: int = 0) -> dict[str, np.ndarray]:
    """What the unmodified model kept after each of two steps."""
    rng = np.random.default_rng(seed)
    return {
        "state_0_0": rng.normal(size=(2, 2, 3)).astype(np.float32),
        "conv_0_0": rng.normal(size=(2, 6, 3)).astype(np.float32),
    }


def slots(arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The same as it lies in slots, after each step."""
    return [
        np.concatenate([arrays["state_0_0"][step].ravel(), arrays["conv_0_0"][step].ravel()]).view(np.uint8)
        for step in range(2)
    ]


def run(after: list[np.ndarray], hit: int = 0) -> Run:
    """Steps of positions 0..3 and 4..6, or the second alone after a hit."""
    blank = np.zeros_like(after[0])
    states = {0: (blank, after[0]), 4: (after[0], after[1])}
    if hit:
        del states[0]
    logits, positions = np.zeros((7 - hit, 8), np.float32), np.arange(hit, 7)
    sources = {"device": hit} if hit else {}
    split = SPLIT[1:] if hit else SPLIT
    return Run("request 0", np.arange(7), (1,), logits, positions, split, hit, sources, states)


def test_prefix_01_the_originals_state_passes_and_channels_follow_one_another() -> None:
    """KVC-PREFIX-01: q and v are the channels of one convolution, one after another."""
    arrays = original()
    assert [str(item) for item in state_fields(MODEL)] == ["layer 0 state", "layer 0 q", "layer 0 v"]
    assert unlike_original(run(slots(arrays)), 0, [KEPT], arrays) == (None, 0.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda a: a["state_0_0"].__setitem__((1, 0, 0), 9.0),
            "positions 4..6, the recurrent state in layer 0",
        ),
        (lambda a: a["conv_0_0"].__setitem__((0, 5, 2), np.nan), "convolution in layer 0 v differs from"),
        (lambda a: a["conv_0_0"].__setitem__(0, np.roll(a["conv_0_0"][0], 1, -1)), "in layer 0 q differs"),
        (lambda a: a["state_0_0"].__setitem__(1, a["state_0_0"][0]), "after the step of positions 4..6"),
    ],
)
def test_prefix_01_another_state_is_told(change: object, words: str) -> None:
    """KVC-PREFIX-01: one number, NaN, a column off, a step late."""
    ours = original()
    change(ours)  # type: ignore[operator]
    said, worst = unlike_original(run(slots(ours)), 0, [KEPT], original())
    assert words in str(said)
    assert worst > 0


def test_prefix_02_the_state_at_the_hit_and_after_each_step_is_the_cold_runs() -> None:
    """KVC-PREFIX-02: bit for bit; where logits are equal all the same, too."""
    after = slots(original())
    cold, warm = run(after), run(after, hit=4)
    assert wrong_states(warm, cold, MODEL) is None
    late = replace(warm, states={4: (after[1], after[1])})
    assert "the state before the step from position 4 on is not the cold run's" in str(
        wrong_states(late, cold, MODEL)
    )
    flipped = after[1].copy()
    flipped[30] ^= 1
    said = str(wrong_states(replace(warm, states={4: (after[0], flipped)}), cold, MODEL))
    assert "the state after the step from position 4 on" in said
    assert "(layer 0 q, 1 B differ in all)" in said
    assert "no step of the cold run began at position 5" in str(
        wrong_states(replace(warm, states={5: (after[0], after[1])}), cold, MODEL)
    )


# What a step writes of slots

FILLS = (0xA5, 0x5A)
BLOCKS = 5
BATCHES = [
    Batch([4], [0], {"full": np.array([[2]], np.int32)}, {"gdn": np.array([3], np.int32)}),
    Batch([1], [4], {"full": np.array([[2, 4]], np.int32)}, {"gdn": np.array([3], np.int32)}),
]


class Memory:
    """Slot 3 and the rows of positions 0..4, written over both fillings."""

    def __init__(self) -> None:
        spaces = layout(MODEL).spaces
        self.slot_bytes = spaces[1].stride_bytes
        self.places = {
            arena.name: Place(region, arena.offset_bytes, space.stride_bytes, BLOCKS)
            for region, space in enumerate(spaces)
            for arena in space.arenas
        }
        self.images = tuple(
            [np.full(BLOCKS * space.stride_bytes, fill, np.uint8) for space in spaces] for fill in FILLS
        )
        for image in self.images:
            image[0][2 * spaces[0].stride_bytes : 3 * spaces[0].stride_bytes] = 1
            image[0][4 * spaces[0].stride_bytes : 4 * spaces[0].stride_bytes + 8] = 1
            image[1][3 * self.slot_bytes : 4 * self.slot_bytes] = 1

    def judge(self) -> str | None:
        """What is wrong with slots; rows are right throughout."""
        assert Footprint(MODEL, self.places, BATCHES).judge(self.images, FILLS) is None
        return Footprint(MODEL, self.places, BATCHES, "bounded").judge(self.images, FILLS)


def test_prefix_04_a_slot_that_is_written_whole_passes() -> None:
    """KVC-PREFIX-04: its own slot, all of it, and nothing of others."""
    assert Memory().judge() is None


def test_prefix_04_another_slot_is_told() -> None:
    """KVC-PREFIX-04: padding and strangers' slots alike; rows of pages are another clause's."""
    memory = Memory()
    memory.images[0][1][1 * memory.slot_bytes + 30] = 7
    said = str(memory.judge())
    assert (
        "the step that ran positions 4..4 also wrote arena conv, slot 1: no request of the step has it"
        in said
    )
    assert "theirs: 3 (1 B too many in all)" in said
    memory = Memory()
    memory.images[1][1][0] = 7
    assert "slot 0 is padding" in str(memory.judge())


def test_prefix_04_a_field_that_is_left_out_is_told() -> None:
    """KVC-PREFIX-04: what is not written is read by nobody but the next occupant."""
    memory = Memory()
    for image, fill in zip(memory.images, FILLS, strict=True):
        image[1][4 * memory.slot_bytes - 8 : 4 * memory.slot_bytes] = fill
    assert "arena conv, slot 3 (of request 0, after position 4) was not written" in str(memory.judge())


def test_prefix_04_a_leftover_that_was_read_is_told() -> None:
    """KVC-PREFIX-04: a request that begins reads nothing of its slot."""
    memory = Memory()
    memory.images[1][1][3 * memory.slot_bytes] = 2
    assert "slot 3 (of request 0, after position 4) depends on what lay in memory before" in str(
        memory.judge()
    )

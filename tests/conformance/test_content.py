"""Content that is a pure function of the tokens: what it gives, and how a wrong row is told."""

from __future__ import annotations

import numpy as np
import pytest

from kvc_conformance.beside import Beside
from kvc_conformance.content import POISON, Content, page_sizes, trimmed
from kvcontract import Arena, Field, Group, KvModel, WeightIdentity, Window
from kvcontract.contract.check import check_model
from kvcontract.contract.layout import layout
from kvcontract.contract.model import Chunk
from kvcontract.pool.sides import make_sides

K = Field(name="k", dtype="bfloat16", axes={"head": 2, "dim": 3})
V = Field(name="v", dtype="float32", axes={"head": 2, "dim": 3})
SUMMARY = Field(name="s", dtype="uint8", axes={"dim": 5})
MODEL = KvModel(
    contract=1,
    name="toy",
    weights=WeightIdentity(kind="unresolved"),
    numerics="test",
    page_tokens=4,
    groups=(Group(name="kv"),),
    arenas=(
        *(Arena.planes(name=f"l{i}", group="kv", layer=i, fields=(K, V)) for i in range(3)),
        Arena.planes(name="sum", group="kv", fields=(SUMMARY,), tokens_per_row=2),
    ),
)
TOKENS = [7, 8, 9, 10]


def test_rows_depend_on_every_token_before_and_on_nothing_else() -> None:
    """Equal prefixes have equal rows; another token, or another scope, changes all that follow."""
    content = Content(MODEL)
    assert content.row_bytes == 3 * (12 + 24) + 5
    rows = content.rows(TOKENS)
    assert (content.rows(TOKENS, 1, 3) == rows[1:3]).all()
    assert (Content(MODEL).rows(TOKENS) == rows).all()
    other = content.rows([7, 0, 9, 10])
    assert (other[0] == rows[0]).all()
    assert (other[1:] != rows[1:]).any(axis=1).all()
    assert (content.rows(TOKENS, whose="x") != rows).any(axis=1).all()


def test_a_wrong_row_is_told_by_what_was_found_instead() -> None:
    """Another token, another field, another prompt, poison and noise each have their words."""
    content = Content(MODEL)
    right = content.rows(TOKENS)
    content.rows([1, 2], whose="salt 'x'")
    assert content.wrong(right, TOKENS) is None
    assert content.wrong(right[2:], TOKENS, first=2) is None

    def told(change: object, at: int = 1, first: int = 0, end: int = 12) -> str:
        found = right.copy()
        found[at, first:end] = change
        return str(content.wrong(found, TOKENS))

    assert told(right[3, :12]) == "token 1, layer 0 k: found the value of token 3 of this prompt"
    assert told(right[1, 36:48]).endswith("the value of token 1, layer 1 k of this prompt")
    stranger = content.rows([1, 2], whose="salt 'x'")[0, :12]
    assert told(stranger).endswith("the value of token 0 of another prompt in scope (salt 'x')")
    assert "poison" in told(POISON)
    assert "belong nowhere" in told(0)


def test_rows_that_stand_for_several_tokens_are_judged_at_the_last() -> None:
    """A compressed row exists once its last token is there."""
    content = Content(MODEL)
    found = content.rows(TOKENS)
    found[[0, 2], -5:] = 0
    assert content.wrong(found, TOKENS) is None
    found[1, -5:] = 0
    assert "token 1, sum s" in str(content.wrong(found, TOKENS))


def test_a_trimmed_declaration_is_whole() -> None:
    """As many arenas as fit, at least one of each group, at the page size asked for, with no new findings."""
    small = trimmed(MODEL, 6, 80)
    assert [arena.name for arena in small.arenas] == ["l0", "l1", "sum"]
    assert {item.clause for item in check_model(small)} <= {item.clause for item in check_model(MODEL)}
    assert layout(small).page_tokens == 6
    assert len(trimmed(MODEL, 6, 1).arenas) == 1
    assert page_sizes(MODEL, (1, 3, 16)) == (2, 4, 16)
    assert np.unique(page_sizes(small, (1, 2))).tolist() == [2]


STATE = Field(name="state", dtype="float32", axes={"head": 2, "key": 3})
CONV = Field(name="q", dtype="bfloat16", axes={"head": 2, "column": 3})
HYBRID = MODEL.model_copy(
    update={
        "groups": (
            *MODEL.groups,
            Group(name="win", reach=Window(tokens=6)),
            Group(name="gdn", kind="bounded", boundary_tokens=8),
        ),
        "arenas": (
            *MODEL.arenas[:2],
            Arena.planes(name="near", group="win", layer=2, fields=(K,)),
            *(Arena.planes(name=f"s{i}", group="gdn", layer=3 + i, fields=(STATE, CONV)) for i in range(3)),
        ),
    }
)


def test_f2_a_state_depends_on_every_token_so_far_and_a_wrong_one_is_told() -> None:
    """F2: one that was taken a token late, in another place, or of another prompt is told as such."""
    content = Content(HYBRID)
    assert content.state_bytes == 3 * (24 + 12)
    right, late = content.state(TOKENS, 3), content.state(TOKENS, 4)
    assert content.wrong_state(right, TOKENS, 3) is None
    assert content.wrong_state(late, TOKENS, 3) == (
        "the state after 3 tokens, layer 3 state: found the state after token 3 of this prompt"
    )
    moved = right.copy()
    moved[24:36] = right[60:72]
    assert str(content.wrong_state(moved, TOKENS, 3)).endswith(
        "layer 3 q: found the state after token 2, layer 4 q of this prompt"
    )
    assert "another prompt" in str(content.wrong_state(content.state([1], 1), TOKENS, 3))
    assert "poison" in str(content.wrong_state(np.full_like(right, POISON), TOKENS, 3))


def test_rows_of_one_space_are_judged_by_themselves() -> None:
    """What lies in a window is the columns of its arenas, and no more."""
    content = Content(HYBRID)
    assert content.windows == ("window-6",)
    rows = content.rows(TOKENS)
    near = rows[:, -12:].copy()
    assert content.wrong(near, TOKENS, space="window-6") is None
    near[2] = rows[2, :12]
    told = content.wrong(near, TOKENS, space="window-6")
    assert told == "token 2, layer 2 k: found the value of token 2, layer 0 k of this prompt"


def test_a_trimmed_hybrid_keeps_its_kinds_over_a_few_pages() -> None:
    """Windows end within a few pages, states may be taken at each, and a bounded group keeps two arenas."""
    small = trimmed(HYBRID, 2, 1)
    assert [arena.name for arena in small.arenas] == ["l0", "near", "s0", "s1"]
    assert [group.reach.key for group in small.groups] == ["full", "window-5", "full"]
    assert [group.boundary_tokens for group in small.groups] == [None, None, 2]
    assert not check_model(small)


@pytest.mark.parametrize("record_pages", [1, 2])
@pytest.mark.parametrize("reach", [Window(tokens=6), Window(tokens=9, sink_tokens=5), Chunk(tokens=12)])
def test_r2_what_a_hit_needs_agrees_with_the_pools(reach: Window | Chunk, record_pages: int) -> None:
    """R2: the suite counts pages one by one, the pools by a formula; they agree at every boundary."""
    groups = (HYBRID.groups[0], Group(name="win", reach=reach), HYBRID.groups[2])
    model = HYBRID.model_copy(update={"groups": groups, "key_tokens": 4 * record_pages})
    beside = Beside.of(model)
    sides = make_sides(model, {reach.key: 40, "slots-gdn": 9}, 16)
    assert beside.granule_tokens == beside.stored_tokens == sides.granule_tokens == 8
    for boundary in range(0, 80, beside.granule_tokens):
        wanted = sides.windows[0].needed(boundary // 4).tolist()
        assert beside.needed(reach.key, boundary) == wanted
    assert beside.stops(17) == [8, 16]
    assert [beside.step_end(3, end, [8, 16]) for end in (5, 9, 20)] == [5, 8, 8]
    assert not Beside.of(MODEL)

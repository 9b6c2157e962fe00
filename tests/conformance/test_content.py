"""Content that is a pure function of the tokens: what it gives, and how a wrong row is told."""

from __future__ import annotations

import numpy as np

from kvc_conformance.content import POISON, Content, page_sizes, trimmed
from kvcontract import Arena, Field, Group, KvModel, WeightIdentity
from kvcontract.contract.check import check_model
from kvcontract.contract.layout import layout

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

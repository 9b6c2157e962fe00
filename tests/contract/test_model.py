"""The declaration objects: closed, frozen, strict, JSON in and out, and they know where they were made."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from kvcontract import Arena, Chunk, Field, Full, Group, KvModel, Repack, Scope, WeightIdentity, Window

from .declarations import arena, model, plane


def test_json_round_trip_is_exact() -> None:
    """A declaration survives JSON with equality, hash and digest."""
    declared = model(
        groups=(Group(name="kv", reach=Window(tokens=8, sink_tokens=2)),), repack=Repack(arenas=())
    )
    again = KvModel.model_validate_json(declared.canonical_json())
    assert again == declared
    assert hash(again) == hash(declared)
    assert again.digest == declared.digest


def test_order_of_axes_is_part_of_a_field() -> None:
    """[head, dim] and [dim, head] are other bytes, so other fields with other JSON."""
    one = Field(name="k", dtype="bfloat16", axes={"head": 2, "dim": 3})
    two = Field(name="k", dtype="bfloat16", axes={"dim": 3, "head": 2})
    assert one != two
    assert one.model_dump_json() != two.model_dump_json()


def test_d8_unknown_fields_are_errors_and_all_faults_come_at_once() -> None:
    """A misspelt field, a wrong type and a bad size are all named in one error."""
    with pytest.raises(ValidationError) as caught:
        Field(name="k", dtype=3, axes={"head": 0}, shard_axes="head")
    assert {item["loc"][0] for item in caught.value.errors()} == {"dtype", "axes", "shard_axes"}


@pytest.mark.parametrize("bad", [{"head": 2.0}, {"head": True}, [("head", 2), ("head", 3)], [3], 7, {1: 2}])
def test_d8_axes_that_are_no_axes_are_refused(bad: object) -> None:
    """Sizes are integers of at least 1, names are text and used once."""
    with pytest.raises(ValidationError):
        Field(name="k", dtype="bfloat16", axes=bad)


def test_declarations_are_frozen_and_strict() -> None:
    """Nothing can be changed afterwards, and numbers in text are not numbers."""
    declared = model()
    with pytest.raises(ValidationError):
        declared.page_tokens = 32
    with pytest.raises(ValidationError):
        model(page_tokens="16")
    with pytest.raises(TypeError):
        declared.arenas[0].fields[0].axes["head"] = 9


def test_objects_know_the_line_that_made_them() -> None:
    """The author's file and line travel with the object, but not into equality, hash or JSON."""
    one, two = plane("k"), plane("k")
    here = Arena.planes(name="a", group="kv", fields=(one, two))
    assert here.where is not None
    assert here.where.split(":")[0] == __file__
    assert one == two
    assert "where" not in one.model_dump_json()
    assert KvModel.model_validate_json(model().canonical_json()).where is None


def test_d2_scopes_tell_absent_from_empty_and_d4_hide_their_salt() -> None:
    """None is absence, "" and "None" are values; a salt is shown nowhere."""
    assert Scope() == Scope(salt=None)
    assert len({Scope(), Scope(salt=""), Scope(salt="None"), Scope(lora="None")}) == 4
    assert "hush" not in repr(Scope(salt="hush"))
    assert "hush" not in str(Scope(salt="hush"))


def test_window_needs_the_last_tokens_and_its_sinks() -> None:
    """A window of 8 counts the current token: 7 before the boundary are needed, and the sinks."""
    window = Window(tokens=8, sink_tokens=2)
    assert window.needed(5) == ((0, 5),)
    assert window.needed(20) == ((0, 2), (13, 20))
    assert window.needed(0) == ()


@pytest.mark.parametrize("page_tokens", [1, 3, 4, 16])
@pytest.mark.parametrize(
    "reach", [Full(), Window(tokens=5), Window(tokens=1), Window(tokens=9, sink_tokens=4), Chunk(tokens=6)]
)
def test_a_dead_page_is_never_needed_again(reach: Full | Window | Chunk, page_tokens: int) -> None:
    """dead() at a frontier is exactly: no boundary from there on needs a token of the page."""
    horizon = 60
    for frontier in range(40):
        for page in range(frontier // page_tokens):
            mine = range(page * page_tokens, (page + 1) * page_tokens)
            wanted = any(
                first < mine.stop and mine.start < end
                for boundary in range(frontier, horizon)
                for first, end in reach.needed(boundary)
            )
            assert reach.dead(page, page_tokens, frontier) == (not wanted), (
                reach,
                page_tokens,
                page,
                frontier,
            )


def test_unresolved_weights_say_so() -> None:
    """Only a digest or a revision lets bytes outlive the process (D6)."""
    assert not WeightIdentity(kind="unresolved").resolved
    assert WeightIdentity(kind="digest", value="ab").resolved


def test_record_tokens_default_to_the_page() -> None:
    """Without key_tokens a record is a page."""
    assert model().record_tokens == 16
    assert model(key_tokens=64).record_tokens == 64
    assert model(arenas=(arena(0),)).arenas[0].rows is not None

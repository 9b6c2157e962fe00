"""Static clauses: every finding at once, each with path, value, what is allowed, clause and line."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcontract import (
    Arena,
    Chunk,
    Conversion,
    Field,
    Group,
    KvModel,
    Repack,
    StaticScale,
    WeightIdentity,
    Window,
)
from kvcontract.contract.check import check_model, static_clauses
from kvcontract.contract.clauses import CLAUSES, LEVELS, clause
from kvcontract.contract.errors import UsageFault

from .declarations import arena, model, plane


def one_field(**more: object) -> tuple[Arena, ...]:
    """One arena of one plane."""
    given: dict[str, object] = {"name": "k", "dtype": "bfloat16", "axes": {"head": 4, "dim": 8}}
    return (arena(0, fields=(Field(**{**given, **more}),)),)


STATE = Field(name="s", dtype="float32", axes={"n": 4})
RING = Field(name="k", dtype="bfloat16", axes={"token": 32, "dim": 8})

SLOT = Arena.planes(name="s", group="gdn", fields=(STATE,))


def of_states(**more: object) -> KvModel:
    """Beside full attention, states that are rewritten at each token."""
    given: dict[str, object] = {"name": "gdn", "kind": "bounded", "boundary_tokens": 16}
    return model(groups=(Group(name="kv"), Group(**{**given, **more})), arenas=(arena(0), SLOT))


BROKEN: list[tuple[str, str, Callable[[], KvModel]]] = [
    ("KVC-DECL-06", "groups[1].name", lambda: model(groups=(Group(name="kv"), Group(name="kv")))),
    ("KVC-DECL-06", "arenas[1].name", lambda: model(arenas=(arena(0), arena(0)))),
    ("KVC-DECL-06", "arenas[1].group", lambda: model(arenas=(arena(0), arena(1, group="vk")))),
    (
        "KVC-DECL-06",
        "arenas[0].fields[1].name",
        lambda: model(arenas=(arena(0, fields=(plane("k"), plane("k"))),)),
    ),
    ("KVC-DECL-06", "arenas[0].fields[0].scale", lambda: model(arenas=one_field(scale="scales"))),
    ("KVC-DECL-07", "page_tokens", lambda: model(page_tokens_allowed=(64,), page_tokens_reason="gates")),
    ("KVC-DECL-07", "page_tokens_reason", lambda: model(page_tokens_allowed=(16,))),
    ("KVC-DECL-08", "key_tokens", lambda: model(key_tokens=24)),
    ("KVC-DECL-08", "arenas[0].tokens_per_row", lambda: model(arenas=(arena(0, tokens_per_row=3),))),
    ("KVC-DECL-09", "groups", lambda: model(groups=(), arenas=())),
    ("KVC-DECL-09", "groups[1]", lambda: model(groups=(Group(name="kv"), Group(name="idx")))),
    ("KVC-DECL-09", "arenas[0].fields", lambda: model(arenas=(arena(0, fields=()),))),
    ("KVC-DECL-12", "groups", lambda: model(groups=(Group(name="kv", reach=Chunk(tokens=8)),))),
    ("KVC-DECL-12", "groups[0].optional", lambda: model(groups=(Group(name="kv", optional=True),))),
    ("KVC-DECL-12", "groups[0].restore", lambda: model(groups=(Group(name="kv", restore="recomputed"),))),
    (
        "KVC-DECL-12",
        "groups[0].lookahead_tokens",
        lambda: model(groups=(Group(name="kv", lookahead_tokens=1),)),
    ),
    (
        "KVC-DECL-12",
        "groups[0].weights",
        lambda: model(groups=(Group(name="kv", weights=WeightIdentity(kind="unresolved")),)),
    ),
    (
        "KVC-DECL-12",
        "groups[2].reach",
        lambda: model(
            groups=(
                Group(name="kv"),
                Group(name="near", reach=Window(tokens=17)),
                Group(name="ring", kind="bounded", reach=Window(tokens=17)),
            ),
            arenas=(arena(0), arena(1, group="near"), arena(2, group="ring", fields=(RING,))),
        ),
    ),
    ("KVC-DECL-12", "groups[0].kind", lambda: model(groups=(Group(name="kv", kind="static"),))),
    ("KVC-DECL-12", "arenas[0].tokens_per_row", lambda: model(arenas=(arena(0, tokens_per_row=4),))),
    (
        "KVC-DECL-13",
        "groups[0].boundary_tokens",
        lambda: model(groups=(Group(name="kv", boundary_tokens=64),)),
    ),
    (
        "KVC-DECL-13",
        "groups[0].snapshot_dtype",
        lambda: model(groups=(Group(name="kv", snapshot_dtype="f16"),)),
    ),
    (
        "KVC-DECL-13",
        "groups[0].reach",
        lambda: model(
            groups=(Group(name="kv", kind="bounded", reach=Chunk(tokens=4)),),
            arenas=(Arena.planes(name="s", group="kv", fields=(STATE,)),),
        ),
    ),
    ("KVC-LAYOUT-01", "arenas[0].fields[0].dtype", lambda: model(arenas=one_field(dtype="bf16"))),
    (
        "KVC-LAYOUT-01",
        "arenas[0].fields[0].axes",
        lambda: model(arenas=one_field(dtype="int4", axes={"dim": 3})),
    ),
    ("KVC-LAYOUT-01", "arenas[0].fields[0].axes", lambda: model(arenas=one_field(axes={}))),
    ("KVC-LAYOUT-02", "arenas[0].fields[0].shard_axis", lambda: model(arenas=one_field(shard_axis="heads"))),
    (
        "KVC-LAYOUT-03",
        "arenas[0].fields[1]",
        lambda: model(
            arenas=(
                arena(
                    0,
                    fields=(
                        Field(name="a", dtype="uint8", axes={"n": 3}),
                        Field(name="b", dtype="float32", axes={"n": 1}),
                    ),
                    arrangement="rows",
                ),
            )
        ),
    ),
    (
        "KVC-LAYOUT-04",
        "arenas[0].fields[0].axes",
        lambda: model(arenas=one_field(axes={"token": 16, "dim": 8})),
    ),
    (
        "KVC-LAYOUT-04",
        "arenas[0].fields[0].axes",
        lambda: model(
            arenas=(
                arena(0, arrangement="rows", fields=(plane("k").model_copy(update={"axes": {"token": 1}}),)),
            )
        ),
    ),
    *(
        (
            "KVC-DECL-06",
            "arenas[0].fields[0].axes",
            lambda field=field: model(arenas=(arena(0, fields=(field,)), arena(1))),
        )
        for field in (
            Field(name="kv", dtype="bfloat16", axes={"k|v": 3, "dim": 8}),
            Field(name="kv", dtype="bfloat16", axes={"k|k": 2, "dim": 8}),
            Field(name="kv", dtype="bfloat16", axes={"k|": 2, "dim": 8}),
            Field(name="kv", dtype="bfloat16", axes={"k|v": 2, "q|w": 2}),
            Field(name="kv", dtype="bfloat16", axes={"k|v": 2, "dim": 8}, shard_axis="k|v"),
            Field(name="kv", dtype="int4", axes={"dim": 8, "k|v": 2}),
        )
    ),
    ("KVC-REPACK-01", "repack.arenas", lambda: model(repack=Repack(arenas=(arena(0),)))),
    (
        "KVC-REPACK-01",
        "repack.arenas layers.0.kv.v",
        lambda: model(
            arenas=(arena(0),),
            repack=Repack(arenas=(arena(0, fields=(plane("k"), plane("v", dtype="float16"))),)),
        ),
    ),
    (
        "KVC-REPACK-01",
        "repack.arenas layers.0.kv.k",
        lambda: model(
            arenas=(arena(0),),
            repack=Repack(
                arenas=(arena(0, fields=(plane("k").model_copy(update={"shard_axis": None}), plane("v"))),)
            ),
        ),
    ),
    (
        "KVC-REPACK-01",
        "repack.arenas layers.0.kv.k",
        lambda: model(
            arenas=(arena(0),), repack=Repack(arenas=(arena(0, fields=(plane("k", dim=4), plane("v"))),))
        ),
    ),
    (
        "KVC-REPACK-01",
        "repack.bound",
        lambda: model(repack=Repack(arenas=(arena(0), arena(1)), lossless=False)),
    ),
    *(
        ("KVC-DECL-06", path, lambda more=more: model(**more))
        for path, more in (
            ("name", {"name": ""}),
            ("numerics", {"numerics": "a\n"}),
            ("groups[0].name", {"groups": (Group(name=""),), "arenas": (arena(0, group=""),)}),
            ("arenas[1].name", {"arenas": (arena(0), arena(1, name="a/b"))}),
            ("arenas[1].fields[0].name", {"arenas": (arena(0), arena(1, fields=(plane("a/b"),)))}),
            ("arenas[0].fields[0].axes", {"arenas": one_field(axes={"": 4})}),
            ("repack.arenas[0].name", {"repack": Repack(arenas=(arena(0, name="a/b"), arena(1)))}),
            (
                "repack.arenas[0].fields[0].name",
                {"repack": Repack(arenas=(arena(0, fields=(plane("a/b"),)), arena(1)))},
            ),
            ("repack.arenas[1].group", {"repack": Repack(arenas=(arena(0), arena(1, group="vk")))}),
        )
    ),
    *(
        (clause_id, path, lambda more=more: of_states(**more))
        for clause_id, path, more in (
            ("KVC-DECL-13", "groups[1].snapshot_dtype", {"snapshot_dtype": "f16", "snapshot_bound": 0.1}),
            ("KVC-DECL-13", "groups[1].snapshot_bound", {"snapshot_dtype": "bfloat16"}),
            ("KVC-DECL-13", "groups[1].snapshot_dtype", {"snapshot_dtype": "float32", "snapshot_bound": 0.1}),
            ("KVC-DECL-13", "groups[1].arenas", {"reach": Window(tokens=17)}),
            ("KVC-DECL-12", "groups[1].restore", {"restore": "recomputed"}),
            ("KVC-DECL-12", "groups[1].lookahead_tokens", {"lookahead_tokens": 1}),
        )
    ),
    (
        "KVC-DECL-12",
        "groups[1].snapshot_dtype",
        lambda: of_states(snapshot_dtype="bfloat16", snapshot_bound=0.1).model_copy(
            update={"repack": Repack(arenas=(arena(0), SLOT))}
        ),
    ),
    (
        "KVC-DECL-13",
        "groups[0].snapshot_bound",
        lambda: model(groups=(Group(name="kv", snapshot_bound=0.1),)),
    ),
    (
        "KVC-LAYOUT-01",
        "arenas[0].stride_multiple_bytes",
        lambda: model(arenas=(arena(0, stride_multiple_bytes=1 << 50),)),
    ),
    (
        "KVC-LAYOUT-01",
        "arenas[1].align_bytes",
        lambda: model(arenas=(arena(0), arena(1, align_bytes=1 << 50))),
    ),
    ("KVC-LAYOUT-01", "arenas", lambda: model(key_tokens=1 << 50)),
    ("KVC-LAYOUT-01", "arenas", lambda: model(arenas=one_field(axes={"head": 4, "dim": 1 << 50}))),
    (
        "KVC-LAYOUT-04",
        "arenas[1].fields[0].axes",
        lambda: model(
            groups=(Group(name="kv"), Group(name="gdn", kind="bounded")),
            arenas=(
                arena(0),
                Arena.planes(
                    name="s",
                    group="gdn",
                    fields=(Field(name="s", dtype="float32", axes={"token": 1, "n": 4}),),
                ),
            ),
        ),
    ),
    (
        "KVC-REPACK-01",
        "repack.bound",
        lambda: model(repack=Repack(arenas=(arena(0), arena(1)), bound=0.1)),
    ),
]


def test_a_sound_declaration_has_no_findings() -> None:
    """The smallest real one, one with scales, one with a head-major wire form."""
    assert check_model(model(), tp=2) == ()
    scaled = (plane("k", scale="s"), Field(name="s", dtype="float32", axes={"head": 4}, shard_axis="head"))
    assert check_model(model(arenas=(arena(0, fields=scaled),))) == ()
    assert check_model(of_states()) == ()
    assert check_model(of_states(snapshot_dtype="bfloat16", snapshot_bound=0.1)) == ()
    assert check_model(model(page_tokens_allowed=(16, 64), page_tokens_reason="gates", key_tokens=48)) == ()
    wider = tuple(plane(name, dtype="float32") for name in "kv")
    assert check_model(model(arenas=(arena(0),), repack=Repack(arenas=(arena(0, fields=wider),)))) == ()
    lossy = Repack(arenas=(arena(0), arena(1)), lossless=False, bound=0.1)
    assert check_model(model(repack=lossy)) == ()
    fixed = plane("k", scale=StaticScale(digest="ab"))
    assert check_model(model(arenas=(arena(0, fields=(fixed,)),))) == ()
    turned = Field(name="k", dtype="bfloat16", axes={"head": 4, "token": 1, "dim": 8}, shard_axis="head")
    plain = Field(name="k", dtype="bfloat16", axes={"head": 4, "token": 1, "dim": 8}, shard_axis="head")
    assert (
        check_model(
            model(arenas=(arena(0, fields=(plain,)),), repack=Repack(arenas=(arena(0, fields=(turned,)),)))
        )
        == ()
    )


@pytest.mark.parametrize(
    ("clause_id", "path", "build"), BROKEN, ids=[f"{item[0]} {item[1]} {n}" for n, item in enumerate(BROKEN)]
)
def test_i3_each_breach_is_found_at_its_place(
    clause_id: str, path: str, build: Callable[[], KvModel]
) -> None:
    """The finding names clause, path, value, what is allowed and the author's line."""
    found = [item for item in check_model(build()) if (item.clause, item.path) == (clause_id, path)]
    assert found
    assert found[0].allowed
    assert found[0].message
    assert found[0].where is not None
    assert found[0].where.split(":")[0].endswith((".py",))
    assert clause_id in found[0].line()


def test_every_static_clause_has_a_breach_here() -> None:
    """No static clause is without a declaration that breaks it."""
    assert {item[0] for item in BROKEN} == set(static_clauses())


def test_i3_all_findings_come_at_once() -> None:
    """Faults of several clauses and places are listed together."""
    broken = model(
        page_tokens_allowed=(64,),
        page_tokens_reason="gates",
        groups=(Group(name="kv", optional=True), Group(name="idx")),
        arenas=(arena(0, group="vk"), arena(1, fields=(plane("k", dtype="bf16"),))),
    )
    found = {item.clause for item in check_model(broken)}
    assert found == {"KVC-DECL-06", "KVC-DECL-07", "KVC-DECL-09", "KVC-DECL-12", "KVC-LAYOUT-01"}


def test_e3_a_tp_that_cannot_cut_is_a_finding_with_numbers() -> None:
    """Each sharded field that three workers cannot cut is named."""
    found = check_model(model(), tp=3)
    assert {item.clause for item in found} == {"KVC-LAYOUT-02"}
    assert len(found) == 4
    assert "4 cannot be cut over tp 3" in found[0].message


def test_callables_need_no_field_by_field_match() -> None:
    """A conversion may change dtypes and fields."""
    repack = Repack(
        arenas=(arena(0, fields=(plane("row", dtype="float32"),)),),
        conversion=Conversion(to_wire="a:b", from_wire="a:c"),
    )
    assert check_model(model(arenas=(arena(0),), repack=repack)) == ()


def test_clauses_are_complete_and_well_formed() -> None:
    """Ids are unique; what a clause requires exists, comes first, and is not of a higher level."""
    ids = [item.id for item in CLAUSES]
    assert len(set(ids)) == len(ids)
    for number, item in enumerate(CLAUSES):
        assert item.level in LEVELS
        assert all([item.rule.endswith("."), item.why.endswith("."), item.fix.endswith(".")])
        for required in item.requires:
            assert required in ids[:number], (item.id, required)
            assert clause(required).level <= item.level


def test_i4_an_unknown_clause_suggests_the_nearest() -> None:
    """A typo in an id is answered with the ids that are near."""
    with pytest.raises(UsageFault, match="KVC-LAYOUT-05"):
        clause("KVC-LAYUOT-05")
    assert clause("kvc-layout-05").id == "KVC-LAYOUT-05"


def test_i3_a_granularity_that_does_not_fit_is_refused_with_all_faults() -> None:
    """I3: records of half pages, and pages of half rows, are named at once, each with what is allowed."""
    arenas = tuple(arena.model_copy(update={"tokens_per_row": 3}) for arena in model().arenas)
    found = [
        item for item in check_model(model(key_tokens=24, arenas=arenas)) if item.clause == "KVC-DECL-08"
    ]
    assert [item.path for item in found] == [
        "key_tokens",
        *(f"arenas[{i}].tokens_per_row" for i in range(len(arenas))),
    ]
    assert found[0].allowed == "a multiple of 16"

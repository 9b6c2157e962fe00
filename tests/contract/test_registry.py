"""The clause registry: complete, held to the manifest of its revision, and told from declarations."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvcontract.contract.revision as revisions
from kvcontract import Arena, Conversion, Field, Group, KvModel, Repack, WeightIdentity, Window
from kvcontract.contract.capability import CAPABILITIES, applies
from kvcontract.contract.check import check_model
from kvcontract.contract.clauses import CLAUSES, TIER_CLAUSES
from kvcontract.contract.errors import UsageFault
from kvcontract.contract.model import CONTRACT_REVISION
from kvcontract.contract.revision import revision

EVERY = (*CLAUSES, *TIER_CLAUSES)
MANIFESTS = sorted((Path(revisions.__file__).parent / "revisions").glob("*.toml"))
FROZEN: dict[int, str] = {}
"""Digests of the manifests of frozen revisions: written here once, when a revision is frozen."""

AUTHORS = 28
"""Clauses that an author of a model's plugin can be asked to read."""


def test_the_registry_is_what_the_manifest_says() -> None:
    """Ids, levels and keepers of the revision served, no more and no fewer."""
    served = revision()
    assert served.number == CONTRACT_REVISION
    assert served.clauses == {item.id: (item.level, item.who) for item in EVERY}


def test_an_id_is_never_used_again() -> None:
    """No clause bears the id of one that was retired, in this revision or before."""
    retired = {name for file in MANIFESTS for name in revision(int(file.stem)).retired}
    assert not retired & {item.id for item in EVERY}


def test_frozen_manifests_are_pinned_and_drafts_are_not() -> None:
    """A frozen revision's file is, byte for byte, what it was when it was frozen."""
    found = {item.number: item for item in (revision(int(file.stem)) for file in MANIFESTS)}
    assert {number: item.digest for number, item in found.items() if not item.draft} == FROZEN
    assert [number for number, item in found.items() if item.draft] in ([], [max(found)])


def test_a_draft_stays_one_while_a_field_is_not_served() -> None:
    """Revision 1 is frozen when KVC-DECL-12 refuses no value of a field."""
    model = KvModel(
        contract=1,
        name="m",
        weights=WeightIdentity(kind="unresolved"),
        numerics="float32",
        page_tokens=4,
        groups=(Group(name="kv"), Group(name="more", optional=True, lookahead_tokens=1)),
        arenas=(arena("kv"), arena("more")),
    )
    unserved = [item for item in check_model(model) if item.clause == "KVC-DECL-12"]
    assert revision().draft == bool(unserved)


def test_an_unknown_revision_names_those_there_are() -> None:
    """A number without a manifest is refused with what there is."""
    with pytest.raises(UsageFault, match="no contract revision 99; there is 1"):
        revision(99)
    assert revision().title == "revision 1 (draft)"


def test_every_clause_of_an_author_can_be_read_in_one_line() -> None:
    """At most 28 on models, each short enough for a line of the page; texts end like sentences."""
    authors = [item for item in CLAUSES if item.who == "author"]
    assert len(authors) <= AUTHORS
    assert all(len(item.rule) <= 82 for item in authors)
    assert all(item.since <= CONTRACT_REVISION for item in EVERY)


def arena(group: str, dtype: str = "float32") -> Arena:
    """One field of a group."""
    field = Field(name="x", dtype=dtype, axes={"dim": 4})
    return Arena.planes(name=group, group=group, fields=(field,))


def declaration(*groups: Group, repack: Repack | None = None) -> KvModel:
    """A model of full attention, and what is given beside it."""
    every = (Group(name="kv"), *groups)
    return KvModel(
        contract=1,
        name="m",
        weights=WeightIdentity(kind="unresolved"),
        numerics="float32",
        page_tokens=4,
        groups=every,
        arenas=tuple(arena(group.name) for group in every),
        repack=repack,
    )


STATE = Group(name="state", kind="bounded", boundary_tokens=4)
NEVER = Group(name="draft", kind="bounded", boundary_tokens=4, restore="never")
WINDOW = Group(name="near", reach=Window(tokens=8))
PLAIN = Repack(arenas=(arena("kv", "float64"),))
CALLED = Repack(arenas=(arena("kv", "float16"),), conversion=Conversion(to_wire="a:b", from_wire="a:c"))


@pytest.mark.parametrize(
    ("model", "has"),
    [
        (declaration(), {"reuse"}),
        (declaration(repack=PLAIN), {"reuse", "repack"}),
        (declaration(repack=CALLED), {"reuse", "repack", "conversion"}),
        (declaration(STATE), {"reuse", "bounded", "snapshots", "beside"}),
        (declaration(WINDOW), {"reuse", "windows", "beside"}),
        (declaration(WINDOW, STATE), {"reuse", "bounded", "snapshots", "windows", "beside"}),
        (declaration(NEVER), {"bounded"}),
        (declaration(WINDOW, STATE, NEVER), {"bounded"}),
    ],
)
def test_which_clauses_apply_follows_from_the_declaration(model: KvModel, has: set[str]) -> None:
    """Each capability is read off one attribute or two; clauses without one always apply."""
    assert {name for name, asked in CAPABILITIES.items() if asked.of(model)} == has
    for item in CLAUSES:
        assert applies(item, model) == (item.capability is None or item.capability in has)


def test_every_capability_has_a_clause() -> None:
    """None stands in the table for nothing."""
    assert {item.capability for item in CLAUSES} == {None, *CAPABILITIES}

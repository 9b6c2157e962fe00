"""The one page: short, complete, and its example is a plugin that is certified."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from pydantic import BaseModel

import kvcontract
from kvc_conformance.report import lines
from kvc_conformance.runner import Request, run
from kvcontract.contract import hooks, page
from kvcontract.contract.clauses import CLAUSES, TIER_CLAUSES
from kvcontract.contract.errors import EXIT_CODES
from kvcontract.contract.options import LaunchOptions, option_table

LONGEST = 90
WIDEST = 100
TEXT = page.page()


def test_it_is_one_page() -> None:
    """At most 90 lines of at most 100 columns."""
    found = TEXT.splitlines()
    assert len(found) <= LONGEST
    assert max(map(len, found)) <= WIDEST
    assert TEXT.endswith("\n")


def test_it_lists_each_clause_of_an_author_once_and_no_other() -> None:
    """Every clause that an author of a model's plugin keeps, with its rule."""
    authors = {item.id: item.rule for item in CLAUSES if item.who == "author"}
    listed = re.findall(r"^- (KVC-[A-Z]+-\d\d) (.*)$", TEXT, re.MULTILINE)
    assert dict(listed) == authors
    assert len(listed) == len(authors)
    others = {item.id for item in (*CLAUSES, *TIER_CLAUSES)} - set(authors)
    assert not [name for name in others if name in TEXT]


def test_it_shows_every_hook_of_a_model_as_it_is() -> None:
    """Names, arguments and results are those of the specifications; only that of tiers is left out."""
    for name in set(hooks.HOOKS) - {"kvc_tier"}:
        shown = inspect.signature(getattr(hooks, name))
        assert f"{name}{shown}".replace("'", "") in TEXT


@pytest.mark.parametrize("shown", page.OBJECTS, ids=lambda item: item.__name__)
def test_it_shows_every_object_with_all_its_fields(shown: type) -> None:
    """What a field is called stands on the page; each object is public, and documents each field."""
    assert getattr(kvcontract, shown.__name__) is shown
    names = shown.model_fields if issubclass(shown, BaseModel) else [item.name for item in fields(shown)]
    assert is_dataclass(shown) or issubclass(shown, BaseModel)
    written = page.signature(shown)
    assert re.sub(r"\s+", " ", written) in re.sub(r"\s+", " ", TEXT)
    own = {name for name in names if re.search(rf"[( ]{name}[:=,)]", written)}
    assert set(names) - own <= {"kind", "arrangement"}
    described = {row.name for row in option_table()} if shown is LaunchOptions else set()
    assert all(re.search(rf"\b{name}\b", shown.__doc__ or "") for name in own - described)


def test_it_names_every_exit_code() -> None:
    """With the words of `kvc help exit-codes`."""
    said = re.sub(r"\s+", " ", TEXT)
    assert all(f" {code} {words}" in said for code, words in EXIT_CODES.items())


def test_its_example_is_certified(tmp_path: Path) -> None:
    """The plugin on the page, saved as it stands, is conformant up to the runtime's level."""
    file = tmp_path / "mini.py"
    file.write_text(page.example())
    report = run(Request(name="mini", file=file))
    assert report.verdict.sentence == "mini: conformant at L2", "\n".join(lines(report))

"""docs/keys.md: its golden vectors are derived anew, by the library and by the plain-Python reference."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import reference_keys

from kvcontract.contract.model import Scope
from kvcontract.pool import FleetSecret, Keyer

PAGE = (Path(__file__).parents[2] / "docs" / "keys.md").read_text()
SECRET = FleetSecret(bytes(range(32)))


def rows(width: int) -> list[list[str]]:
    """Cells of the table rows that have a key in them."""
    lines = [line.strip("|").split("|") for line in PAGE.splitlines() if re.search(r"\b[0-9a-f]{32}\b", line)]
    cells = [[cell.strip() for cell in line] for line in lines]
    return [line for line in cells if len(line) == width]


def text(cell: str) -> str | None:
    """A dash is an absent field; what stands in backquotes is a value, the empty one included."""
    return None if cell == "-" else cell.strip("`")


@pytest.mark.parametrize("row", rows(7), ids=lambda row: " ".join(row[:4]))
def test_d1_documented_keys_are_the_derived_ones(row: list[str]) -> None:
    """Page size, scope, keys and tag of each row; D2: absent and empty are two rows."""
    page_tokens, lora, revision, salt = int(row[0]), *(text(cell) for cell in row[1:4])
    scope = Scope(lora=lora, lora_revision=revision, salt=salt)
    keyer = Keyer(b"golden", SECRET, page_tokens)
    derived = [key.tobytes().hex() for key in keyer.chain(range(2 * page_tokens), scope)]
    assert derived == row[4:6]
    assert keyer.scope_tag(scope) == (text(row[6]) or "")
    slow = reference_keys.chain(
        b"golden", SECRET.value, page_tokens, list(range(2 * page_tokens)), (lora, revision, salt)
    )
    assert [key.hex() for key in slow] == row[4:6]


def test_d7_documented_names_of_other_kinds_are_the_derived_ones() -> None:
    """Extra identity and partial pages, and the public id of the secret."""
    keyer = Keyer(b"golden", SECRET, 16)
    parent = keyer.chain(range(32), Scope())[1]
    names = [
        keyer.chain(range(32), Scope(), extras={1: b"image"})[1],
        *(
            keyer.partial(parent, range(32, 40), Scope(), committed_tokens=40, anchor=anchor)
            for anchor in (7, None)
        ),
    ]
    assert [name.tobytes().hex() for name in names] == [row[1] for row in rows(2)]
    assert f"`{SECRET.id}`" in PAGE


def test_the_page_has_vectors() -> None:
    """Nothing above passes for want of rows."""
    assert (len(rows(7)), len(rows(2))) == (5, 3)

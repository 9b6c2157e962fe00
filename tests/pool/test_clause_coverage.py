"""Every clause of behaviours B, D and F has a test that names it, here or in another room's tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
CLAUSES = {
    f"{letter}{number}" for letter, last in (("B", 23), ("D", 9), ("F", 8)) for number in range(1, last + 1)
}


def cited(text: str) -> set[str]:
    """Clause ids in a name (`test_b12_...`) or a docstring (`B12`)."""
    found = re.findall(r"(?:^|_)([bdf]\d+)(?=_)|\b([BDF]\d+)\b", text)
    return {(name or doc).upper() for name, doc in found}


def citations() -> dict[str, set[str]]:
    """Clause ids of every test function under tests/."""
    found = {}
    for file in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                text = ast.get_docstring(node) or ""
                found[f"{file.name}::{node.name}"] = cited(node.name) | cited(text)
    return found


def test_every_clause_is_named_by_a_test() -> None:
    """B1 to B23, D1 to D9 and F1 to F8: a clause without a test fails here."""
    missing = sorted(CLAUSES - set().union(*citations().values()))
    assert not missing, f"no test names {', '.join(missing)}"


def test_cited_finds_names_and_docstrings() -> None:
    """Ids count in either place, and only as whole words."""
    assert cited("test_b12_and_d4_meet") == {"B12", "D4"}
    assert cited("Says why (B5, D1); not AB12, B.") == {"B5", "D1"}

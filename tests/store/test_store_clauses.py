"""Every clause of behaviours A and C, and those of E and I that the store keeps, has a test here."""

from __future__ import annotations

import ast
import re
from pathlib import Path

CLAUSES = {
    *(f"A{number}" for number in range(1, 27)),
    *(f"C{number}" for number in range(1, 13)),
    *("D2", "D3", "D4", "D5", "D6", "E3", "I6", "I7", "I8", "R2", "R4", "R6", "R8"),
}


def cited() -> set[str]:
    """Clause ids in names and docstrings of the tests of this folder."""
    found: set[str] = set()
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                pairs = re.findall(r"(?:^|_)([a-z]\d+)(?=_)|\b([A-Z]\d+)\b", _text(node))
                found |= {(name or doc).upper() for name, doc in pairs}
    return found


def _text(node: ast.FunctionDef) -> str:
    return f"{node.name} {ast.get_docstring(node)}"


def test_every_clause_of_the_store_is_named_by_a_test() -> None:
    """A clause without a test fails here."""
    missing = sorted(CLAUSES - cited())
    assert not missing, f"no test names {', '.join(missing)}"

"""Values as Python source: they read back as they were, and formatters leave them alone."""

from __future__ import annotations

import ast
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_templates.literal import Missing, literal

SLIDING, FULL = "sliding_attention", "full_attention"

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=9) | st.dictionaries(st.text("ab\"'", max_size=3), inner, max_size=3)
    ),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(VALUES)
def test_a_value_reads_back_as_it_was(value: Any) -> None:
    """True stays True and 1 stays 1, repeated or not."""
    assert repr(eval(literal(value), {})) == repr(value)  # noqa: S307 - what is tested


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([*[SLIDING] * 5, FULL] * 8, f'[*["{SLIDING}"] * 5, "{FULL}"] * 8'),
        ([FULL] * 30, f'["{FULL}"] * 30'),
        (["a", "b", "b", "b", "b"], '["a", *["b"] * 4]'),
        ([1, 2, 3], "[1, 2, 3]"),
        ([], "[]"),
        ({}, "{}"),
        ('say "a"', "'say \"a\"'"),
        (Missing("n", 4), 'fill_in("n", 4)'),
    ],
)
def test_repeats_are_told_once(value: Any, text: str) -> None:
    """Lists of layers stay readable."""
    assert literal(value) == text


@pytest.mark.skipif(shutil.which("ruff") is None, reason="ruff is not on the path")
def test_formatters_leave_it_alone(tmp_path: Path) -> None:
    """Long lists get a line each, short ones one line, whatever stands before them."""
    value = {
        "short": ["a", "b"],
        "long": [f"layer_{number}" for number in range(12)],
        "k" * 60: ["x" * 20, "y" * 20],
        "nested": {"list": [{"a": 1}, [1.5, None]], "many": list(range(40))},
        "stood in": Missing("layers", ["a", "b"] * 9),
    }
    file = tmp_path / "value.py"
    file.write_text(f"VALUE = {literal(value)}\n")
    ast.parse(file.read_text())
    command = ["ruff", "format", "--line-length", "110", "--isolated", "--diff", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout

"""What the documents show runs, and what they say of the code is true."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from kvcontract.cli.main import COMMANDS
from kvcontract.contract.clauses import CLAUSES, TIER_CLAUSES

ROOT = Path(__file__).parents[1]
LONGEST_EXAMPLE = 40


def test_the_embedding_example_runs_and_is_short() -> None:
    """An engine's whole use of the store: the first run is cold, the second hits every full page."""
    file = ROOT / "docs" / "embedding.py"
    assert len(file.read_text().splitlines()) <= LONGEST_EXAMPLE
    command = [sys.executable, "-W", "error", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith("[0, 48] True")
    assert "'device': 48" in done.stdout


def test_the_hybrid_example_runs() -> None:
    """A window and a state beside full pages: the second run hits up to the last boundary of all."""
    command = [sys.executable, "-W", "error", str(ROOT / "docs" / "hybrid.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith("[0, 128] True")


def test_the_readme_names_every_command_and_only_those() -> None:
    """The table of commands and the program agree."""
    named = set(re.findall(r"^\| `kvc ([a-z-]+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert named == set(COMMANDS)


def test_clauses_that_documents_cite_exist() -> None:
    """No document speaks of a clause that is not in the registry."""
    known = {item.id for item in (*CLAUSES, *TIER_CLAUSES)}
    for file in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        cited = set(re.findall(r"KVC-[A-Z]+-\d\d", file.read_text()))
        assert cited <= known, file


def test_every_dependency_has_its_reason() -> None:
    """Each distribution that pyproject.toml asks for is in the table of docs/why.md."""
    wanted = set(re.findall(r'"([a-z0-9]+)>=', (ROOT / "pyproject.toml").read_text()))
    table = (ROOT / "docs" / "why.md").read_text().split("What each dependency is for")[1]
    assert {name for name in wanted if not re.search(rf"\b{name}\b", table)} == set()

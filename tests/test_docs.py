"""What the documents show runs, and what they say of the code is true."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import kvcontract
from kvcontract.cli.main import COMMANDS
from kvcontract.contract import errors, options
from kvcontract.contract.clauses import CLAUSES, TIER_CLAUSES
from kvcontract.contract.errors import EXIT_CODES, KvContractError
from kvcontract.contract.page import page

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


def error_classes() -> dict[str, type[KvContractError]]:
    """Every class of the library that is a `KvContractError`, by its name."""
    source = "\n".join(file.read_text() for file in (ROOT / "kvcontract").rglob("*.py"))
    names = ["KvContractError"]
    for name in names:  # grows while it is read: heirs of heirs
        names += re.findall(rf"^class (\w+)\((?:\w+, )*{name}\b", source, re.MULTILINE)
    return {name: getattr(errors, name, None) or getattr(options, name) for name in names}


def test_every_error_class_is_documented_with_its_exit_code() -> None:
    """The table of docs/errors.md has each class once, with the code that the command line ends with."""
    text = (ROOT / "docs" / "errors.md").read_text()
    listed = re.findall(r"^\| `(\w+)`(?: \(options\))? \| (\d+) \|", text, re.MULTILINE)
    assert dict(listed) == {name: str(kind.exit_code) for name, kind in error_classes().items()}
    assert len(listed) == len(dict(listed))
    elsewhere = set(re.findall(r"^\| `(\w+)` \(options\)", text, re.MULTILINE))
    assert elsewhere == {
        name for name, kind in error_classes().items() if kind.__module__ == options.__name__
    }


def test_the_tree_of_errors_names_every_class() -> None:
    """What errors.py draws is what there is."""
    assert all(re.search(rf"[─ ]?{name}\b", errors.__doc__ or "") for name in error_classes())


def test_every_exit_code_is_documented() -> None:
    """docs/errors.md has the codes and words of `kvc help exit-codes`."""
    text = (ROOT / "docs" / "errors.md").read_text().split("## Exit codes")[1]
    listed = re.findall(r"^\| (\d+) \| (.*) \|$", text, re.MULTILINE)
    assert {int(code): words for code, words in listed} == EXIT_CODES


def test_the_contract_in_the_docs_is_current() -> None:
    """docs/CONTRACT.md is what the registry gives."""
    assert (ROOT / "docs" / "CONTRACT.md").read_text() == page()


def test_the_glossary_is_in_order_and_has_the_words_of_the_contract() -> None:
    """Each word once; those that the declaration objects are named by are there."""
    words = re.findall(r"^\| ([a-z]+) \|", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)[1:]
    assert words == sorted(set(words))
    assert {"arena", "clause", "executor", "field", "group", "page", "repack", "scope", "tier"} <= set(words)


def test_links_between_documents_lead_somewhere() -> None:
    """Every relative link of a document is a file of this repository."""
    for file in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^):#]+)\)", file.read_text()):
            assert (file.parent / target).exists(), f"{file.name}: {target}"


def test_names_that_the_guides_show_exist() -> None:
    """`KvStore.name`, `Group(name)` and the like in the guides are of the public objects."""
    for name in ("author-guide.md", "engine-guide.md", "errors.md"):
        text = (ROOT / "docs" / name).read_text()
        for owner, attribute in re.findall(r"`([A-Z]\w+)\.(\w+)", text):
            if owner != "KvContractError" and hasattr(kvcontract, owner):
                known = getattr(kvcontract, owner)
                shown = {*dir(known), *getattr(known, "__dataclass_fields__", ()), *_fields(known)}
                assert attribute in shown, f"{name}: {owner}.{attribute}"
        for verb in re.findall(r"`(?:await )?store\.(\w+)\(", text):
            assert hasattr(kvcontract.KvStore, verb), f"{name}: {verb}"
    table = (ROOT / "docs" / "engine-guide.md").read_text().split("## Switches")[1]
    calls = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    verbs = [verb for cell in calls for verb in re.findall(r"`(\w+)", cell)]
    assert verbs
    assert not [verb for verb in verbs if not hasattr(kvcontract.KvStore, verb)]


def _fields(known: object) -> tuple[str, ...]:
    return tuple(getattr(known, "model_fields", ()))

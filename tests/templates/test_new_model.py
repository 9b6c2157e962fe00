"""`kvc new-model`: what it writes, what it refuses, and what the suite says of what it wrote."""

from __future__ import annotations

import json
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES

from kvc_conformance import report as reports
from kvc_conformance.outcomes import Outcome
from kvc_conformance.runner import Request, run
from kvc_templates.facts import KINDS, Kind
from kvcontract.cli.main import main
from kvcontract.contract.clauses import Level
from kvcontract.core.launch import Source, launch

HERE = Path(__file__).parent
CONFIGS = HERE.parent / "configs"
GOLDEN = HERE / "golden"
TREES = {
    **{f"toy_{kind}": ("--kind", kind) for kind in KINDS},
    "toy_nested": ("--from", str(CONFIGS / "gemma4-12b.json")),
}
MARK = re.compile(r'fill_in\("([^"]+)", (.*)\)(,?)$', re.MULTILINE)

_SIZES = {"hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads", "vocab_size"}
_MLA_SIZES = {"first_k_dense_replace", "num_key_value_heads", "q_lora_rank", "qk_nope_head_dim", "v_head_dim"}
UNREAD: dict[Kind, set[str]] = {
    "gqa": _SIZES,
    "mla": _SIZES | _MLA_SIZES,
    "sliding": _SIZES,
    "hybrid": _SIZES,
}
"""Keys of a sample that a declaration does not read: without one, transformers' own value holds."""


def new_model(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any, str]:
    """Exit code, the JSON document, and what was said."""
    code = main(["new-model", *arguments, "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


def tree(folder: Path) -> dict[str, str]:
    """Every file under a folder, by path; what linters keep beside them left out."""
    files = [file.relative_to(folder) for file in folder.rglob("*") if file.is_file()]
    own = [file for file in files if not any(part.endswith(("cache__", "_cache")) for part in file.parts)]
    return {file.as_posix(): (folder / file).read_text() for file in own}


def module_of(name: str, folder: Path, *arguments: str) -> Path:
    """A new plugin's module as a plugin file."""
    assert main(["new-model", name, *arguments, "--out", str(folder / "package")]) == 0
    file = folder / f"{name}.py"
    file.write_text((folder / "package" / f"kvc_{name}" / "__init__.py").read_text())
    return file


def filled_in(text: str) -> str:
    """A module whose marks are gone: what stood in is taken for the fact."""
    return MARK.sub(r"\2\3", text)


def certified(file: Path, level: Level = "L2") -> tuple[int, str]:
    """Exit code and last line of a report."""
    report = run(Request(name=file.stem, file=file, level=level))
    return report.verdict.exit_code, reports.lines(report)[-1]


# What is written


@pytest.mark.parametrize("name", TREES)
def test_the_trees_are_as_committed(name: str, tmp_path: Path) -> None:
    """To renew one: remove tests/templates/golden/NAME, and write it there with `kvc new-model`."""
    assert main(["new-model", name, *TREES[name], "--out", str(tmp_path / name)]) == 0
    assert tree(tmp_path / name) == tree(GOLDEN / name)


def test_no_tree_is_forgotten() -> None:
    """Each committed tree is compared."""
    assert {folder.name for folder in GOLDEN.iterdir()} == set(TREES)


@pytest.mark.parametrize("name", TREES)
def test_nothing_of_the_templates_is_left(name: str) -> None:
    """No mark of the template language, no blank at an end of line, a newline at the end of each file."""
    for path, text in tree(GOLDEN / name).items():
        assert not re.search(r"\{%|%\}|\{#|[ \t]+$", text, re.MULTILINE), path
        assert "{{" not in text or path.endswith(".py"), path
        assert not text or (text.endswith("\n") and not text.endswith("\n\n")), path
    assert len(tree(GOLDEN / name)["AGENTS.md"].splitlines()) <= 60


def test_what_is_said_and_what_is_written_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run tells the same and writes nothing; the folder is kvc-NAME where none is named."""
    monkeypatch.chdir(tmp_path)
    code, told, _ = new_model(capsys, "my_model", "--kind", "mla", "--dry-run")
    assert (code, told["written"], list(tmp_path.iterdir())) == (0, False, [])
    code, written, _ = new_model(capsys, "my_model", "--kind", "mla")
    assert (code, written) == (0, {**told, "written": True})
    assert set(written["files"]) == set(tree(tmp_path / "kvc-my-model"))
    assert written["folder"] == "kvc-my-model"
    assert written["next"][-1] == "kvc conformance my_model"


def test_people_are_told_what_is_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was derived, assumed, left out and could not be told, each by its key."""
    config = tmp_path / "config.json"
    family = {key: value for key, value in FAMILIES["qwen3_next"].items() if key != "linear_key_head_dim"}
    config.write_text(json.dumps({**family, "auto_map": {}}))
    assert main(["new-model", "mine", "--from", str(config), "--out", str(tmp_path / "mine")]) == 0
    out = capsys.readouterr().out
    assert "derived: layer_types = every full_attention_interval-th layer is full" in out
    assert "assumed: boundary_tokens = 64" in out
    assert "left out of SAMPLE: auto_map" in out
    assert f"to fill in ({config} lacks them): linear_key_head_dim\n" in out


# What is refused


def test_nothing_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything in the way is named, a folder's name that a file has included; then nothing is written."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "README.md").write_text("mine")
    (folder / "tests").write_text("a file")
    (folder / "LICENSE").symlink_to("nowhere")
    before = {path.name for path in folder.iterdir()}
    for dry in ((), ("--dry-run",)):
        code, told, _ = new_model(capsys, "mine", "--out", str(folder), *dry)
        assert code == 2
        assert "nothing was written" in told["error"]
        for taken in ("README.md", "LICENSE", "tests (no folder)"):
            assert taken in told["error"]
    assert {path.name for path in folder.iterdir()} == before
    assert (folder / "README.md").read_text() == "mine"


def test_a_folder_with_other_files_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A fresh repository has files of its own."""
    (tmp_path / ".git").mkdir()
    code, _, _ = new_model(capsys, "mine", "--out", str(tmp_path))
    assert code == 0
    assert (tmp_path / "kvc_mine" / "__init__.py").is_file()


def test_what_was_begun_is_taken_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A disk that takes some files and not the next leaves nothing behind."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        code = main(["new-model", "mine", "--out", str(tmp_path / "some" / "mine")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = capsys.readouterr().err
    assert code == 2
    assert "nothing was written: File too large" in said
    assert "--out" in said
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A path beyond what a path may be is told like any other fault."""
    code, told, _ = new_model(capsys, "mine", "--out", str(tmp_path / ("d" * 300)))
    assert code == 2
    assert "nothing was written: File name too long" in told["error"]


def test_a_place_that_cannot_be_written_to(capsys: pytest.CaptureFixture[str]) -> None:
    """One message, what to do, no traceback."""
    code, told, err = new_model(capsys, "mine", "--out", "/proc/mine")
    assert code == 2
    assert "nothing was written" in told["error"]
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("Qwen-3",), "try 'qwen_3'"),
        (("mine", "--kind", "moe"), "there is no such kind (gqa: keys and values"),
        (("mine", "--from", "nowhere.json"), "no such file"),
        (("mine", "--kind", "gqa", "--from", str(CONFIGS / "glm-5.2.json")), "it is of kind mla"),
    ],
)
def test_a_command_line_that_cannot_be_served(
    arguments: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and nothing is written."""
    code, told, _ = new_model(capsys, *arguments, "--out", str(tmp_path / "mine"))
    assert code == 2
    assert said in told["error"]
    assert list(tmp_path.iterdir()) == []


# What the suite says of it


@pytest.mark.parametrize("kind", KINDS)
def test_unedited_nothing_fails_and_nothing_is_certified(kind: Kind, tmp_path: Path) -> None:
    """Exit 3; the last line names the facts that are to be filled in (I5)."""
    file = module_of(f"new_{kind}", tmp_path, "--kind", kind)
    facts = [fact for fact, _, _ in MARK.findall(file.read_text())]
    assert len(facts) >= 10
    assert certified(file, "L0") == (
        3,
        f"new_{kind}: L0 needs facts that are still to be filled in: {', '.join(facts)}",
    )


def marked_lines(kind: Kind) -> Iterator[tuple[str, str]]:
    """A fact that is marked, and the module without its line."""
    lines = tree(GOLDEN / f"toy_{kind}")[f"kvc_toy_{kind}/__init__.py"].splitlines()
    for number, line in enumerate(lines):
        if mark := MARK.search(line):
            yield mark.group(1), "\n".join([*lines[:number], *lines[number + 1 :]])


@pytest.mark.parametrize("kind", KINDS)
def test_a_marked_line_that_is_removed_is_missed(kind: Kind, tmp_path: Path) -> None:
    """A fact that is gone is named by its clause, whatever is still marked."""
    file = tmp_path / f"toy_{kind}.py"
    silent = set()
    for fact, text in marked_lines(kind):
        file.write_text(text)
        found = launch(Source(file.stem, file)).findings
        if found:
            [clause] = {item.clause for item in found}
            assert clause == ("KVC-DECL-01" if fact == "boundary_tokens" else "KVC-DECL-11"), fact
            assert fact in found[0].path or "CHUNK_TOKENS" in found[0].message
        else:
            silent.add(fact)
    assert silent == UNREAD[kind]


def test_filled_in_it_is_conformant(tmp_path: Path) -> None:
    """Level 2, by the generic executor, on a small random checkpoint."""
    file = module_of("new_gqa", tmp_path)
    file.write_text(filled_in(file.read_text()))
    assert certified(file) == (0, "new_gqa: conformant at L2")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_conformant_once_filled_in(kind: Kind, tmp_path: Path) -> None:
    """Unedited, every other clause holds up to level 2 already; filled in, all do."""
    file = module_of(f"new_{kind}", tmp_path, "--kind", kind)
    report = run(Request(name=file.stem, file=file))
    assert report.verdict.exit_code == 3
    held = {Outcome.PASS, Outcome.NOT_APPLICABLE}
    assert {item.clause for item in report.results if item.outcome not in held} == {"KVC-DECL-11"}
    file.write_text(filled_in(file.read_text()))
    assert certified(file) == (0, f"new_{kind}: conformant at L2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "file",
    ["qwen3-0.6b.json", "qwen3.5-4b.json", "gemma4-12b.json", "glm-5.2.json"],
    ids=["gqa", "hybrid", "sliding", "mla"],
)
def test_from_a_real_config_it_is_conformant_at_once(file: str, tmp_path: Path) -> None:
    """Nothing is edited: what the config tells is enough."""
    made = module_of("mine", tmp_path, "--from", str(CONFIGS / file))
    assert certified(made) == (0, "mine: conformant at L2")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_from_a_familys_config_it_is_conformant_at_once(name: str, tmp_path: Path) -> None:
    """Whatever a family leaves out of its configs, or spells in its own way."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(FAMILIES[name]))
    made = module_of("mine", tmp_path, "--from", str(config))
    assert certified(made) == (0, "mine: conformant at L2")

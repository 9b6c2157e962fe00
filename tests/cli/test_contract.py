"""`kvc contract`: the page, the same as JSON, and whether a copy is current."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcontract.cli.main import main
from kvcontract.contract.clauses import CLAUSES

COPY = Path(__file__).parents[2] / "docs" / "CONTRACT.md"


def test_it_prints_the_page_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    """Stdout is the file in the docs, byte for byte."""
    assert main(["contract"]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == (COPY.read_text(), "")


def test_the_json_has_what_the_page_lists(capsys: pytest.CaptureFixture[str]) -> None:
    """Revision, author's clauses with reasons, signatures, dtypes, exit codes and the example."""
    assert main(["contract", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["contract"], found["draft"]) == ("kvc.contract/1", 1, True)
    kept = {item.id: item for item in CLAUSES if item.who == "author"}
    assert {item["id"] for item in found["clauses"]} == set(kept)
    assert all(item["why"] == kept[item["id"]].why for item in found["clauses"])
    assert found["hooks"]["kvc_model"] == "kvc_model(ctx: Context) -> KvModel"
    assert found["objects"]["Chunk"] == "Chunk(tokens: int)"
    assert "bfloat16" in found["dtypes"]
    assert set(found["exit_codes"]) == {"0", "1", "2", "3", "4", "5", "130"}
    assert found["example"].startswith("from kvcontract import ")


def test_check_tells_current_from_stale(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A current copy exits 0; another exits 1 with a diff; docs/CONTRACT.md is looked at if none is named."""
    monkeypatch.chdir(COPY.parents[1])
    assert main(["contract", "--check"]) == 0
    assert capsys.readouterr().out == "docs/CONTRACT.md is what the registry gives\n"
    stale = tmp_path / "CONTRACT.md"
    stale.write_text(COPY.read_text().replace("KVC-DECL-05", "KVC-DECL-50"))
    assert main(["contract", "--check", str(stale)]) == 1
    out, err = capsys.readouterr()
    assert "\n-- KVC-DECL-50 " in out
    assert "\n+- KVC-DECL-05 " in out
    assert f"kvc contract > {stale}" in err
    assert main(["contract", "--check", str(stale), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["path"], found["current"]) == (str(stale), False)
    assert "+- KVC-DECL-05 " in "\n".join(found["diff"])


def test_a_copy_without_its_last_line_end_is_not_current(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What no line of a diff shows is said in words."""
    copy = tmp_path / "c.md"
    copy.write_text(COPY.read_text().rstrip("\n"))
    assert main(["contract", "--check", str(copy)]) == 1
    assert "ends of lines" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--check", "nowhere.md"], "nowhere.md cannot be read"),
        (["page.md"], "'page.md' is the copy that --check compares"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    """A copy that is not there, and a path without --check, are usage errors."""
    assert main(["contract", *arguments]) == 2
    assert said in capsys.readouterr().err

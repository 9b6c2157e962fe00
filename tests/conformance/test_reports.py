"""Reports in other forms: JUnit's XML, one HTML page, tests of a plugin's own; and waivers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from datetime import date
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from pydantic import TypeAdapter, ValidationError

from kvc_conformance import report as reports
from kvc_conformance.claims import claims
from kvc_conformance.document import ReportDocument
from kvc_conformance.junit import junit
from kvc_conformance.outcomes import Evidence, Outcome, Result, Verdict, judge
from kvc_conformance.page import page
from kvc_conformance.runner import Report, Request, run
from kvc_conformance.waivers import Waiver, read, weighed
from kvcontract.cli.main import main
from kvcontract.contract.clauses import CLAUSES
from kvcontract.contract.errors import UsageFault

ZOO = Path(__file__).parent.parent / "zoo" / "models"
SOON = date(2031, 1, 1)
TODAY = date(2030, 1, 1)


@pytest.fixture(scope="module")
def broken() -> Report:
    """An animal that fails one clause of level 1."""
    return run(Request(name="swapped_restore", file=ZOO / "swapped_restore.py", level="L1"))


def made(*results: Result, name: str = "odd") -> Report:
    """A report of these results."""
    verdict = judge(name, results, "L0")
    return Report(
        Request(name=name, level="L0"), tuple((r.clause, r.case) for r in results), results, verdict, {}
    )


# JUnit


def parsed(text: str) -> ET.Element:
    """XML, read again."""
    return ET.fromstring(text)  # noqa: S314 - it is our own


def test_junit_has_a_case_for_each_result_and_fails_where_the_report_does(broken: Report) -> None:
    """Failures are failures, what did not run is skipped, and the verdict is a case of its own."""
    root = parsed(junit(broken))
    cases = root.findall("testsuite/testcase")
    assert len(cases) == len(broken.results) + 1
    failed = [case for case in cases if case.find("failure") is not None]
    assert {case.get("classname") for case in failed} == {"KVC-REPACK-03", "verdict"}
    text = failed[0].find("failure")
    assert text is not None
    assert "kvc conformance swapped_restore" in (text.text or "")
    suites = {suite.get("name"): suite for suite in root}
    assert int(suites["L1"].get("failures", "0")) == sum(r.outcome is Outcome.FAIL for r in broken.results)


def test_junit_of_an_incomplete_run_is_red() -> None:
    """What could not run is never green."""
    report = made(Result("KVC-DECL-01", "", Outcome.COULD_NOT_RUN, Evidence("needs something")))
    root = parsed(junit(report))
    assert root.find("testsuite/testcase/skipped") is not None
    assert root.find("testsuite[@name='verdict']/testcase/failure") is not None


def test_junit_carries_what_xml_cannot() -> None:
    """A control character, or a lone surrogate, in what a plugin says does not spoil the file."""
    report = made(Result("KVC-DECL-01", "a\x00b", Outcome.FAIL, Evidence("\x1b[31mred\ud800 <&>")))
    case = parsed(junit(report)).find("testsuite/testcase")
    assert case is not None
    assert "\N{REPLACEMENT CHARACTER}" in str(case.get("name"))


# The page


class Tags(HTMLParser):
    """Checks that what is opened is closed, and collects what would be fetched."""

    VOID = frozenset({"meta", "br", "rect"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Remember it."""
        self.fetched += [str(value) for name, value in attrs if name in {"src", "href", "action"}]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """It is the last that was opened."""
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_the_page_needs_nothing_else_and_tells_everything(broken: Report) -> None:
    """Verdict, every clause that was to run, the failure in full, and the model's memory."""
    text = page(broken)
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    assert not tags.fetched
    assert "<script" not in text
    assert broken.verdict.sentence in text
    for clause in {result.clause for result in broken.results}:
        assert clause in text
    assert "found the value of layer 0 V" in re.sub(r"\s+", " ", text)
    assert broken.model is not None
    bars = sum(len(arena.fields) for arena in broken.model.arenas)
    assert text.count("<rect") == bars


def test_the_page_escapes_what_a_plugin_says() -> None:
    """A name or a message is text, never markup."""
    saw = "<script>alert(1)</script>"
    text = page(made(Result("KVC-DECL-01", saw, Outcome.FAIL, Evidence(saw)), name="<img src=x>"))
    assert "<script" not in text
    assert "<img" not in text


def test_both_are_written_beside_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--junit and --html; a place that cannot be is refused before anything runs."""
    places = ["--junit", str(tmp_path / "a.xml"), "--html", str(tmp_path / "a.html")]
    plugin = ["swapped_restore", "--plugin", str(ZOO / "swapped_restore.py"), "--level", "L0"]
    assert main(["conformance", *plugin, *places]) == 0
    parsed((tmp_path / "a.xml").read_text())
    assert "conformant at L0" in (tmp_path / "a.html").read_text()
    capsys.readouterr()
    assert main(["conformance", *plugin, "--junit", "/nowhere/a.xml", "--html", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "there is no folder /nowhere" in said
    assert "it is a folder" in said


# Waivers


def waiver(clause: str, expires: date = SOON) -> Waiver:
    """One."""
    return Waiver(clause, "known", "somebody", expires)


RED = Verdict("not conformant", "L0", "odd: not conformant: KVC-LAYOUT-06", 1)
GREEN = Verdict("conformant", "L1", "odd: conformant at L1", 0)
OUTCOMES = {"KVC-LAYOUT-06": Outcome.FAIL, "KVC-LAYOUT-08": Outcome.PASS}


def test_a_waived_failure_changes_the_exit_code_and_nothing_else() -> None:
    """The kind and the level are what they would be without; the sentence says who lives with what."""
    found = weighed(RED, OUTCOMES, [waiver("KVC-LAYOUT-06")], TODAY)
    assert (found.kind, found.level, found.exit_code) == ("not conformant", "L0", 0)
    assert "waived: KVC-LAYOUT-06 (until 2031-01-01, somebody: known)" in found.sentence


def test_what_is_not_waived_still_fails() -> None:
    """One of two failures is not enough."""
    outcomes = OUTCOMES | {"KVC-REPACK-03": Outcome.ERROR}
    assert weighed(RED, outcomes, [waiver("KVC-LAYOUT-06")], TODAY).exit_code == 1


def test_a_waiver_that_is_not_true_fails() -> None:
    """One that has expired, and one whose clause holds, even where all else is green."""
    old = weighed(RED, OUTCOMES, [waiver("KVC-LAYOUT-06", date(2029, 12, 31))], TODAY)
    assert old.exit_code == 1
    assert "has expired" in old.sentence
    stale = weighed(GREEN, {"KVC-LAYOUT-08": Outcome.PASS}, [waiver("KVC-LAYOUT-08")], TODAY)
    assert stale.exit_code == 1
    assert "stale" in stale.sentence


def test_an_incomplete_run_stays_incomplete() -> None:
    """Waivers are of failures, not of what did not run."""
    verdict = Verdict("incomplete", None, "odd: L1 needs something", 3)
    found = weighed(verdict, {"KVC-LAYOUT-06": Outcome.COULD_NOT_RUN}, [waiver("KVC-LAYOUT-06")], TODAY)
    assert found.exit_code == 3


def test_a_file_of_waivers_is_read_whole(tmp_path: Path) -> None:
    """Every fault is named at once."""
    file = tmp_path / "waivers.toml"
    file.write_text(
        textwrap.dedent("""
        [[waiver]]
        clause = "kvc-layout-06"
        reason = "known"
        owner = "somebody"
        expires = 2031-01-01
        """)
    )
    assert read(file) == (waiver("KVC-LAYOUT-06"),)
    file.write_text(
        textwrap.dedent("""
        other = 1
        [[waiver]]
        clause = "KVC-LAYUOT-06"
        reason = " "
        expires = "soon"
        until = 3
        """)
    )
    with pytest.raises(UsageFault) as caught:
        read(file)
    for words in (
        "'other'",
        "did you mean KVC-LAYOUT-06",
        "reason",
        "lacks owner",
        "expected a date",
        "'until'",
    ):
        assert words in str(caught.value)
    with pytest.raises(UsageFault, match="No such file"):
        read(tmp_path / "none.toml")


def test_a_waived_run_exits_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the command line."""
    file = tmp_path / "waivers.toml"
    file.write_text(
        '[[waiver]]\nclause = "KVC-REPACK-03"\nreason = "known"\nowner = "us"\nexpires = 9999-01-01\n'
    )
    plugin = ["swapped_restore", "--plugin", str(ZOO / "swapped_restore.py"), "--level", "L1"]
    assert main(["conformance", *plugin, "--waivers", str(file)]) == 0
    assert "not conformant: KVC-REPACK-03; " in capsys.readouterr().out


# Tests of a plugin's own


@pytest.mark.parametrize(
    ("name", "level", "code"), [("swapped_restore", "L1", 1), ("swapped_restore", "L0", 0)]
)
def test_three_lines_certify_in_a_test_run_of_ones_own(
    name: str, level: str, code: int, tmp_path: Path
) -> None:
    """A test for each clause and one for the verdict; a failure tells what the report tells."""
    (tmp_path / "test_it.py").write_text(
        "from kvc_conformance.pytest_plugin import certify\n\n"
        f"TestConformance = certify({name!r}, file={str(ZOO / name) + '.py'!r}, level={level!r})\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == code, done.stdout
    assert "collected" not in done.stdout or "no tests" not in done.stdout
    if code:
        assert re.search(r"FAILED .*test_clause\[KVC-REPACK-03\]", done.stdout)
        assert "FAILED test_it.py::TestConformance::test_verdict" in done.stdout
        assert "found the value of layer 0 V" in re.sub(r"\s+", " ", done.stdout)


# The report as JSON


def test_a_report_is_what_its_schema_says(broken: Report, capsys: pytest.CaptureFixture[str]) -> None:
    """Failures, passes and what did not run: every key is declared, and no other comes."""
    document = json.loads(json.dumps(reports.as_json(broken)))
    TypeAdapter(ReportDocument).validate_python(document)
    assert [item["clause"] for item in document["results"]] == [clause for clause, _ in document["plan"]]
    with pytest.raises(ValidationError):
        TypeAdapter(ReportDocument).validate_python({**document, "another": 1})
    assert main(["schema", "report"]) == 0
    published = (Path(__file__).parents[2] / "docs" / "report.schema.json").read_text()
    assert capsys.readouterr().out == published


def test_the_schema_of_a_declaration_is_printed_and_others_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`kvc schema model`; a kind that is none says which there are."""
    assert main(["schema", "model"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "KvModel"
    assert main(["schema", "trace"]) == 2
    assert "there are: model, report" in capsys.readouterr().err


def test_claims_are_what_clauses_have_shown(broken: Report) -> None:
    """Declared and broken, declared and not run, not declared: nothing is held by being declared."""
    found = reports.as_json(broken)["claims"]
    assert found["repack"] == "held"
    assert found["conversion"] == "held"
    assert found["reuse"] == "open"
    assert found["windows"] == "not declared"
    assert broken.model is not None
    every = dict.fromkeys((item.id for item in CLAUSES), Outcome.PASS)
    assert claims(broken.model, every)["reuse"] == "held"
    assert claims(broken.model, {**every, "KVC-PREFIX-05": Outcome.FAIL})["reuse"] == "broken"
    assert claims(broken.model, {**every, "KVC-PREFIX-05": Outcome.BLOCKED})["reuse"] == "open"

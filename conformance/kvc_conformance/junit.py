"""A report in the form that continuous integration reads: JUnit's XML."""

from __future__ import annotations

import re
from collections import Counter
from typing import Final
from xml.etree import ElementTree as ET

from kvc_conformance.outcomes import Outcome, Result
from kvc_conformance.report import WORDS, failure
from kvc_conformance.runner import Report
from kvcontract.contract.clauses import clause

KINDS: Final = {Outcome.FAIL: "failure", Outcome.ERROR: "error"}
_FORBIDDEN: Final = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(report: Report) -> str:
    """The report as XML: a suite for each level, a case for each clause and case of its.

    What did not run is skipped there, so a run that is incomplete has a failed case of its own that says so.
    """
    root = ET.Element("testsuites", name=_text(f"kvc conformance {report.request.name}"))
    by_level: dict[str, list[Result]] = {}
    for result in report.results:
        by_level.setdefault(clause(result.clause).level, []).append(result)
    for level, results in by_level.items():
        suite = ET.SubElement(root, "testsuite", {"name": level, **_counts(results)})
        for result in results:
            suite.append(_case(result, report))
    whole = ET.SubElement(root, "testsuite", name="verdict", tests="1")
    case = ET.SubElement(whole, "testcase", classname="verdict", name=_text(report.verdict.kind), time="0")
    if report.verdict.exit_code:
        failed = ET.SubElement(case, "failure", message=_text(report.verdict.sentence))
        failed.text = _text(report.verdict.sentence)
    whole.set("failures", str(int(report.verdict.exit_code != 0)))
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _case(result: Result, report: Report) -> ET.Element:
    name = result.clause + (f" [{result.case}]" if result.case else "")
    case = ET.Element("testcase", classname=result.clause, name=_text(name), time=f"{result.seconds:.3f}")
    kind = KINDS.get(result.outcome)
    if kind is not None:
        element = ET.SubElement(case, kind, message=_text(result.evidence.saw.partition("\n")[0]))
        element.text = _text("\n".join(failure(result, report.request)))
    elif result.outcome is not Outcome.PASS:
        why = ", ".join(result.because) or result.evidence.saw
        ET.SubElement(case, "skipped", message=_text(f"{WORDS[result.outcome]} {why}".strip()))
    return case


def _counts(results: list[Result]) -> dict[str, str]:
    found = Counter(result.outcome for result in results)
    skipped = len(results) - found[Outcome.PASS] - found[Outcome.FAIL] - found[Outcome.ERROR]
    return {
        "tests": str(len(results)),
        "failures": str(found[Outcome.FAIL]),
        "errors": str(found[Outcome.ERROR]),
        "skipped": str(skipped),
        "time": f"{sum(result.seconds for result in results):.3f}",
    }


def _text(text: str) -> str:
    """What XML can carry of it."""
    return _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)

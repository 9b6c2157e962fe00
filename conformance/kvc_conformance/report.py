"""A report for people, and the same as JSON."""

from __future__ import annotations

import shlex
import textwrap
from collections import Counter
from typing import Final

from kvc_conformance.claims import claims
from kvc_conformance.document import SCHEMA, ReportDocument, ResultDocument
from kvc_conformance.outcomes import BROKEN, Outcome, Result, fold
from kvc_conformance.runner import Report, Request, results_by_clause
from kvcontract.contract.clauses import clause

IN_FULL: Final = 3
"""Failures that are told in full; the rest get a line each."""

WORDS: Final = {
    Outcome.PASS: "PASS",
    Outcome.FAIL: "FAIL",
    Outcome.ERROR: "ERROR",
    Outcome.BLOCKED: "BLOCKED",
    Outcome.COULD_NOT_RUN: "NOT RUN",
    Outcome.NOT_APPLICABLE: "N/A",
    Outcome.DESELECTED: "DESELECTED",
}


def as_json(report: Report) -> ReportDocument:
    """The report as plain JSON."""
    request, model = report.request, report.model
    document: ReportDocument = {
        "schema": SCHEMA,
        "verdict": report.verdict.kind,
        "level": report.verdict.level,
        "asked": "T" if request.tier else request.level,
        "sentence": report.verdict.sentence,
        "exit_code": report.verdict.exit_code,
        "claims": {} if model is None else claims(model, fold(report.results)),
        "counts": Counter(result.outcome.value for result in report.results),
        "plan": list(report.plan),
        "results": [_result(result, request) for result in report.results],
        "env": report.environment,
    }
    document["tier" if request.tier else "model"] = request.name
    return document


def _result(result: Result, request: Request) -> ResultDocument:
    rule = clause(result.clause)
    return {
        "clause": result.clause,
        "level": rule.level,
        "case": result.case,
        "outcome": result.outcome.value,
        "saw": result.evidence.saw,
        "where": result.evidence.where,
        "trace": list(result.evidence.trace),
        "fault": result.fault,
        "because": list(result.because),
        "rule": rule.rule,
        "fix": rule.fix,
        "again": again(request, result.clause),
        "seconds": round(result.seconds, 3),
    }


def lines(report: Report, *, everything: bool = False, tracebacks: bool = False) -> list[str]:
    """The report in plain lines: the clauses, root causes first among failures, the verdict last."""
    worst = fold(report.results)
    blocked = [clause_id for clause_id, outcome in worst.items() if outcome is Outcome.BLOCKED]
    text = []
    told = sorted(results_by_clause(report.results), key=lambda item: (clause(item[0]).level, item[0]))
    for clause_id, results in told:
        if clause_id in blocked or worst[clause_id] is Outcome.DESELECTED:
            continue
        cases = f" ({len(results)} cases)" if len(results) > 1 else ""
        note = _note(worst[clause_id], results)
        text.append(f"{WORDS[worst[clause_id]]:<10} {clause_id}  {clause(clause_id).rule}{cases}{note}")
    broken = [found for _, found in results_by_clause(report.results) if worst[found[0].clause] in BROKEN]
    for number, results in enumerate(broken):
        failed = [result for result in results if result.outcome in BROKEN]
        if number >= IN_FULL and not everything:
            text.append(
                f"{WORDS[failed[0].outcome]:<10} {failed[0].clause}: {_first(failed[0].evidence.saw)}"
            )
            continue
        for result in failed if everything else failed[:1]:
            text += ["", *failure(result, report.request, tracebacks=tracebacks)]
        if len(failed) > 1 and not everything:
            text.append(
                f"      also:  {len(failed) - 1} more case(s): {'; '.join(r.case for r in failed[1:4])}"
            )
    if len(broken) > IN_FULL and not everything:
        text.append(f"({len(broken) - IN_FULL} more failure(s) in one line each; --all tells them in full)")
    if blocked:
        text += [
            "",
            *textwrap.wrap(
                f"blocked by the failures above: {', '.join(blocked)}", 110, break_on_hyphens=False
            ),
        ]
    if report.model is not None:
        held = claims(report.model, worst)
        declared = [f"{name} {state}" for name, state in held.items() if state != "not declared"]
        about = " (open: not all of its clauses have run)" if "open" in held.values() else ""
        text += ["", f"claims: {'; '.join(declared)}{about}"] if declared else []
    text += ["", report.verdict.sentence]
    return text


def _note(outcome: Outcome, results: list[Result]) -> str:
    if outcome in {Outcome.COULD_NOT_RUN, Outcome.NOT_APPLICABLE}:
        return f" [{results[0].evidence.saw}]"
    return ""


def failure(result: Result, request: Request, *, tracebacks: bool = False) -> list[str]:
    """One failure, in about ten lines."""
    rule = clause(result.clause)
    case = f"  [{result.case}]" if result.case else ""
    text = [f"{WORDS[result.outcome]}  {result.clause}{case}  ({rule.level}, kept by the {rule.who})"]
    text.append(f"      rule:  {rule.rule}")
    seen = result.evidence.saw.splitlines() or ["(nothing said)"]
    text += _labelled("saw:", seen)
    if result.evidence.where:
        text.append(f"      where: {result.evidence.where}")
    if tracebacks or result.fault in {"runtime", "suite"}:
        text += _labelled("trace:", list(result.evidence.trace))
    text.append(f"      why:   {rule.why}")
    text.append(f"      try:   {rule.fix}")
    text.append(f"      fault: {result.fault}")
    text.append(f"      again: {again(request, result.clause)}")
    text.append(f"      more:  kvc explain {result.clause}")
    return text


def _labelled(label: str, text: list[str]) -> list[str]:
    return [f"      {label if number == 0 else '':<6} {line}" for number, line in enumerate(text)]


def again(request: Request, clause_id: str) -> str:
    """The command that runs one clause again, as this run did."""
    return f"{whole(request)} --clause {clause_id}"


def whole(request: Request) -> str:
    """The command that runs all of it again, as this run did."""
    words = ["kvc", "conformance", *(["--tier"] if request.tier else []), request.name]
    for name in ("config", "checkpoint"):
        if getattr(request, name) is not None:
            words += [f"--{name}", str(getattr(request, name))]
    if request.file is not None:
        words += ["--plugin", str(request.file)]
    for name, value in request.options.items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    for name, value in request.plugin_options.items():
        words += ["-O", f"{name}={value}"]
    for name, usual in (("level", "L2"), ("seed", 0), ("profile", "quick"), ("device", "cpu")):
        if getattr(request, name) != usual:
            words += [f"--{name}", str(getattr(request, name))]
    return shlex.join(words)


def _first(text: str) -> str:
    return text.splitlines()[0] if text else "(nothing said)"

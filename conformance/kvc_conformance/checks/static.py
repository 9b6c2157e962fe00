"""Level 0, and what follows from declarations alone."""

from __future__ import annotations

from typing import Final

from kvc_conformance.bench import Bench, Check, CouldNotRun, Failed, parse, told
from kvcontract.contract.check import check_model
from kvcontract.contract.clauses import CLAUSES
from kvcontract.contract.finding import Finding
from kvcontract.contract.stand_in import facts_of

BEFORE_DECLARING: Final = frozenset(
    {"KVC-DECL-01", "KVC-DECL-02", "KVC-DECL-03", "KVC-DECL-10", "KVC-DECL-11"}
)
"""Clauses that hold or break before there is a declaration."""

FACTS: Final = "KVC-DECL-11"
TP_DEGREES: Final = (1, 2, 4, 8)


def _static(clause_id: str) -> Check:
    def run(bench: Bench, _case: str) -> None:
        found = [item for item in bench.findings if item.clause == clause_id]
        found += _again(bench, clause_id, found)
        if found:
            raise Failed(told(found), where=found[0].where)
        if clause_id not in BEFORE_DECLARING:
            _ = bench.declared

    return Check(clause_id, run)


def _again(bench: Bench, clause_id: str, found: list[Finding]) -> list[Finding]:
    """The parent's own judgement of the parsed declaration, where the child reported nothing."""
    if found or bench.model is None:
        return []
    tp = int(bench.job["options"].get("tp") or 1)
    return [item for item in check_model(bench.model, tp=tp) if item.clause == clause_id]


def _facts(bench: Bench, case: str) -> None:
    """KVC-DECL-11: nothing is missing or refused, and nothing stands in for what is missing."""
    _static(FACTS).run(bench, case)
    marks = bench.stand_ins
    if marks:
        needs = f"needs facts that are still to be filled in: {facts_of(marks)}"
        raise CouldNotRun(needs, where=marks[0].where)


def _same_for_every_tp(bench: Bench, _case: str) -> str:
    """KVC-LAYOUT-08."""
    base = bench.declared
    served = []
    for tp in TP_DEGREES:
        model, findings = parse(bench.plugin.call("declare.declare", {"options": {"tp": tp}}).body)
        if model is None or findings:
            continue  # a degree that does not fit is refused, which KVC-LAYOUT-02 judges
        served.append(tp)
        if model != base:
            raise Failed(
                f"at tp {tp} the declaration differs from that at the tp asked for", where=base.where
            )
    if not served:
        raise CouldNotRun("no degree of tensor parallelism is served")
    return f"equal at tp {', '.join(map(str, served))}"


CHECKS: Final[tuple[Check, ...]] = (
    *(_static(item.id) for item in CLAUSES if item.level == "L0" and item.id != FACTS),
    Check(FACTS, _facts),
    Check("KVC-LAYOUT-08", _same_for_every_tp),
)

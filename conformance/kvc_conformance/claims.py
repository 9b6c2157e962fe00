"""What a declaration claims by having it, and what became of each claim."""

from __future__ import annotations

from collections.abc import Mapping

from kvc_conformance.document import ClaimState
from kvc_conformance.outcomes import BROKEN, HOLDS, Outcome
from kvcontract.contract.capability import CAPABILITIES
from kvcontract.contract.clause import Capability
from kvcontract.contract.clauses import CLAUSES
from kvcontract.contract.model import KvModel


def claims(model: KvModel, worst: Mapping[str, Outcome]) -> dict[str, ClaimState]:
    """Each capability, and whether it is held.

    Args:
        model: the declaration.
        worst: of each clause that was planned; held is what clauses have shown, never what is declared.
    """
    return {name: _state(name, model, worst) for name in CAPABILITIES}


def _state(name: Capability, model: KvModel, worst: Mapping[str, Outcome]) -> ClaimState:
    if not CAPABILITIES[name].of(model):
        return "not declared"
    found = [worst.get(rule.id) for rule in CLAUSES if rule.capability == name]
    if any(outcome in BROKEN for outcome in found):
        return "broken"
    shown = all(outcome in HOLDS for outcome in found) and Outcome.PASS in found
    return "held" if shown else "open"

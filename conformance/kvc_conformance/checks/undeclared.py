"""KVC-PREFIX-09: what a declaration, or an executor, does not offer is refused, and by what name."""

from __future__ import annotations

from typing import Final

from kvc_conformance.bench import Bench, Check, CouldNotRun, Failed
from kvc_conformance.content import never_restored, page_sizes
from kvc_conformance.rig import SECRET, model_for
from kvcontract.contract.errors import Undeclared

STORE: Final = "a store"
ASKED: Final = (STORE, "a tier", "an adapter")
TIMEOUT_S: Final = 180.0


def _refused(bench: Bench, case: str) -> str:
    """KVC-PREFIX-09."""
    clause, said = _store(bench) if case == STORE else _engine(bench, case)
    if said is None:
        raise Failed(f"{case} was asked for that nothing here can make use of, and was accepted")
    if clause != Undeclared.clause:
        named = f"by {clause}" if clause else "without naming a clause"
        raise Failed(f"{case} must be refused by {Undeclared.clause}, and was refused {named}: {said}")
    return f"refused: {said}"


def _store(bench: Bench) -> tuple[str | None, str | None]:
    """Over a declaration of which a group is never restored."""
    model = never_restored(model_for(bench, page_sizes(bench.small, (3,))[0]))
    arguments = {"model": model.canonical_json(), "pages": 16, "step_tokens": model.page_tokens}
    asked = {"store": "undeclared", "tiers": [{}], "secret": SECRET, **arguments}
    found = bench.small_child.call("store.refusal", asked).body
    if found["clauses"] is None:
        return None, None
    return ", ".join(found["clauses"]), found["text"]


def _engine(bench: Bench, case: str) -> tuple[str | None, str | None]:
    """With the plugin's executor."""
    if "undeclared" not in bench.kept:
        if not bench.runs:
            raise CouldNotRun("needs an executor (the plugin has no kvc_executor)")
        answer = bench.small_plugin.call("engine.undeclared", timeout_s=TIMEOUT_S)
        bench.kept["undeclared"] = answer.body["answers"]
    clause, said = bench.kept["undeclared"][case]
    return clause, said


CHECKS: Final[tuple[Check, ...]] = (Check("KVC-PREFIX-09", _refused, lambda _: ASKED),)

"""KVC-OFFLOAD-06: simulated worlds of the declaration, under faults and on virtual time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from kvc_conformance.bench import Bench, Check, Failed, NotApplicable
from kvc_conformance.sim.told import told
from kvcontract.contract.errors import UsageFault

CHUNK: Final = 100
"""Worlds between two signs of life of the child."""

TIMEOUT_S: Final = 600.0
"""Of a chunk, the cutting down of a trace included."""

TOLD: Final = 12
"""Actions that are told; the trace has all."""

TRACES: Final = Path(".kvc") / "traces"
"""Where a trace is kept, in the folder that the command runs in."""


def _worlds(bench: Bench, _case: str) -> str:
    """KVC-OFFLOAD-06."""
    from kvc_conformance.sim.spaces import simulated  # noqa: PLC0415 - only who gets here pays for it

    try:
        model = simulated(bench.small)
    except UsageFault as odd:
        raise NotApplicable(str(odd)) from odd
    count = bench.profile.worlds
    for at in range(0, count, CHUNK):
        arguments = {
            "model": model.model_dump_json(),
            "first": bench.seed + at,
            "count": min(CHUNK, count - at),
        }
        trace = bench.small_child.call("simulated.seeds", arguments, timeout_s=TIMEOUT_S).body["trace"]
        if trace is not None:
            _fail(trace)
    return f"{count} worlds"


def _fail(trace: dict[str, Any]) -> None:
    found, actions = trace["violation"], [told(action) for action in trace["actions"]]
    raise Failed(
        f"the world of seed {trace['seed']} breaks {found['clause']}: {found['text']}\n"
        f"it takes {len(actions)} actions; {_kept(trace)}",
        trace=tuple(actions[-TOLD:]),
    )


def _kept(trace: dict[str, Any]) -> str:
    """Where the trace lies, or why it could not be kept."""
    place = TRACES / f"{trace['violation']['clause']}-{trace['seed']}.json"
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(trace, indent=1) + "\n")
    except OSError as error:
        return f"its trace could not be kept in {place}: {error.strerror}"
    return f"again, action by action: kvc replay {place}"


CHECKS: Final[tuple[Check, ...]] = (Check("KVC-OFFLOAD-06", _worlds),)

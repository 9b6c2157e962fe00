"""KVC-PREFIX-01, what a map of layers says: whatever it computes, its names must be those declared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kvc_conformance.bench import Bench, Failed, NotApplicable, first_few
from kvc_conformance.engine_rig import TIMEOUT_S
from kvcontract.contract.model import KvModel

THE_MAP: Final = "the map"


def judged_map(bench: Bench, _case: str) -> str:
    """KVC-PREFIX-01: a map onto other layers computes the right logits, over state that bears wrong names.

    Two fields of one layer that are exchanged cannot be told: nothing but the author knows which is which.
    """
    _ = bench.small, bench.checkpoint
    answer = bench.small_plugin.call("engine.layer_map", timeout_s=TIMEOUT_S).body
    if answer["layers"] is None:
        raise NotApplicable("the plugin brings its own executor")
    model = KvModel.model_validate_json(answer["model"])
    faults = contradictions(model, answer["layers"])
    if faults:
        raise Failed(first_few(faults), where=answer["where"], fault="plugin")
    return f"{len(answer['layers'])} layers, each in arenas of its own"


def contradictions(model: KvModel, layers: Sequence[Sequence[Any]]) -> list[str]:
    """What a map says otherwise than the declaration.

    Args:
        model: the declaration.
        layers: layer, arena, field: where a layer of the model writes.
    """
    declared = {arena.name: arena.layer for arena in model.arenas}
    users: dict[tuple[str, str], int] = {}
    faults = []
    for layer, arena, name in layers:
        says = declared.get(arena)
        if says is not None and says != layer:
            faults.append(
                f"layer {layer} of the model writes into arena {arena}, which declares layer {says}"
            )
        first = users.setdefault((arena, name), layer)
        if first != layer:
            faults.append(f"layers {first} and {layer} of the model both write into field {name} of {arena}")
        elif sum((a, n) == (arena, name) for i, a, n in layers if i == layer) > 1:
            faults.append(f"layer {layer} of the model writes twice into field {name} of arena {arena}")
    faults += [
        f"no layer of the model writes into field {item.name} of arena {arena.name}, which is declared"
        for arena in model.arenas
        for item in arena.fields
        if (arena.name, item.name) not in users
    ]
    return list(dict.fromkeys(faults))

"""Whether an engine's parts fit each other: judged once, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.executor import Limits
from kvcontract.contract.layout import layout
from kvcontract.pool.request import FULL
from kvcontract.pool.slab import LiveSlots

if TYPE_CHECKING:
    from kvcontract.engine.engine import Engine


def refuse_unfit(engine: Engine, limits: Limits, slots: Mapping[str, LiveSlots]) -> None:
    """Refuse an engine that could not run.

    Raises:
        UsageFault: limits that cannot work, or state that is not served; all are named.
    """
    faults = []
    if not 1 <= engine.max_requests <= limits.max_requests:
        faults.append(f"max_requests {engine.max_requests}: expected 1 .. {limits.max_requests}")
    if not engine.max_requests <= engine.max_batch_tokens <= limits.max_tokens:
        # Every active request must be able to move in every step.
        faults.append(
            f"max_batch_tokens {engine.max_batch_tokens}: expected {engine.max_requests} (max_requests)"
            f" .. {limits.max_tokens}"
        )
    if engine.max_chunk_tokens < 1:
        faults.append(f"max_chunk_tokens {engine.max_chunk_tokens}: expected 1 or more")
    if engine.pool.page_tokens != engine.model.page_tokens:
        faults.append(f"pages of {engine.pool.page_tokens} tokens, declared {engine.model.page_tokens}")
    bounded = {group.name for group in engine.model.groups if group.kind == "bounded"}
    served = {FULL, *(f"slots-{name}" for name in bounded)}
    other = [space.key for space in layout(engine.model).spaces if space.key not in served]
    if other:
        faults.append(f"state in {', '.join(other)}: this engine serves full attention only")
    if bounded != set(slots):
        faults.append(f"slots for {sorted(slots)}: expected one LiveSlots each for {sorted(bounded)}")
    if engine.store is not None and not engine.model.prefix_caching:
        never = [group.name for group in engine.model.groups if not group.checkpointable]
        faults.append(f"a store, while {', '.join(never)} is never restored: prefix caching is off then")
    if faults:
        raise UsageFault("the engine cannot run: " + "; ".join(faults))

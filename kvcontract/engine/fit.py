"""Whether an engine's parts fit each other: judged once, before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcontract.contract.errors import Undeclared, UsageFault
from kvcontract.contract.executor import EmitsSnapshots, Executor, Limits
from kvcontract.contract.layout import layout
from kvcontract.pool.request import FULL
from kvcontract.pool.sides import Sides

if TYPE_CHECKING:
    from kvcontract.engine.engine import Engine


def emits_all(executor: Executor, sides: Sides) -> bool:
    """Whether an executor can write every state inside a step, wherever a checkpoint may be wanted.

    A window's pages before such a position may be let go with the step, so a model that has windows is cut;
    and so is one whose snapshots have another form than what a kernel writes.
    """
    narrow = any(side.narrow is not None for side in sides.slots)
    if not isinstance(executor, EmitsSnapshots) or sides.windows or not sides.slots or narrow:
        return False
    emits = executor.emits
    return all(
        side.group in emits and sides.granule_tokens % emits[side.group] == 0
        for side in sides.slots
        if side.stored
    )


def refuse_unfit(engine: Engine, limits: Limits) -> None:
    """Refuse an engine that could not run.

    Raises:
        UsageFault: limits that cannot work, or state that is not served; all are named.
        Undeclared: there is no other fault than a store for what is never restored.
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
    faults += _beside_faults(engine, limits)
    if engine.store is not None and not engine.model.prefix_caching:
        never = [group.name for group in engine.model.groups if not group.checkpointable]
        undeclared = f"a store, while {', '.join(never)} is never restored: prefix caching is off then"
        if not faults:
            raise Undeclared(f"the engine cannot run: {undeclared}")
        faults.append(undeclared)
    if faults:
        raise UsageFault("the engine cannot run: " + "; ".join(faults))


def _beside_faults(engine: Engine, limits: Limits) -> list[str]:
    """What is wrong with the pools beside the full pages."""
    faults = []
    spaces, pooled = {space.key for space in layout(engine.model).spaces}, engine.pool.sides
    if spaces != {FULL, *(side.key for side in pooled)}:
        given = ", ".join([FULL, *(side.key for side in pooled)])
        faults.append(f"pools for {given}: expected one for each of {', '.join(sorted(spaces))}")
    step = pooled.max_step_tokens
    if step is not None and step < min(engine.max_chunk_tokens, engine.max_batch_tokens):
        faults.append(f"windows for steps of {step} tokens: chunks have up to {engine.max_chunk_tokens}")
    if pooled.granule_tokens > limits.max_context_tokens:  # F8
        faults.append(
            f"checkpoints every {pooled.granule_tokens} tokens, a context of {limits.max_context_tokens}:"
            " nothing could ever be reused"
        )
    if pooled and not engine.bindings:
        faults.append("no bindings: what a request begins with is copied in them")
    return faults

"""Wrong on purpose: every request lives in the slot after its own, and all is well as long as it is alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import kvc_qwen35
from kvcontract import Context, Executor, KvModel, Step, StepOutput, hookimpl
from kvcontract.contract.executor import Limits
from kvcontract.engine.build import generic_executor

KVC_CONTRACT = 1
TRIPS = "KVC-PREFIX-04"
SAYS = r"also wrote arena layers\.0\.state, slot 2: no request of the step has it; theirs: 1 "


class OtherSlot:
    """The generic executor, given other slots."""

    def __init__(self, inner: Executor, model: KvModel) -> None:
        self._inner = inner
        self._bounded = {group.name for group in model.groups if group.kind == "bounded"}
        self._names = {arena.name for arena in model.arenas if arena.group in self._bounded}
        self._slots: dict[tuple[str, str], Any] = {}

    @property
    def limits(self) -> Limits:
        """The generic executor's."""
        return self._inner.limits

    def bind(self, views: Mapping[tuple[str, str], Any]) -> None:
        """The generic executor's, and a look at the slots."""
        self._slots = {ref: view for ref, view in views.items() if ref[0] in self._names}
        self._inner.bind(views)

    def forward(self, step: Step) -> StepOutput:
        """Run in the next slot; the first after the last."""
        count = len(next(iter(self._slots.values())))
        moved = {name: slots % (count - 1) + 1 for name, slots in step.slots.items()}
        return self._inner.forward(replace(step, slots=moved))


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration."""
    return kvc_qwen35.kvc_model(ctx).model_copy(update={"name": "other_slot"})


@hookimpl
def kvc_executor(ctx: Context) -> Executor:
    """The generic executor, spoilt."""
    inner = generic_executor(
        ctx.model, kvc_qwen35.kvc_executor(ctx), checkpoint=ctx.checkpoint, dtype=ctx.dtype
    )
    return OtherSlot(inner, ctx.model)


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen35.kvc_samples(ctx)

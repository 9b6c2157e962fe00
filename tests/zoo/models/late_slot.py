"""Wrong on purpose: writes slots a step late; what is right lies in memory of its own.

Every run is right until somebody begins with a slot's copy: it is the state of an earlier moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import kvc_qwen35
from kvcontract import Context, Executor, KvModel, Step, StepOutput, hookimpl
from kvcontract.contract.executor import Limits
from kvcontract.engine.build import generic_executor

KVC_CONTRACT = 1
TRIPS = "KVC-PREFIX-02"
SAYS = r"the state they began from differs"


class LateSlot:
    """The generic executor over slots of its own; the arenas get them before each step, not after."""

    def __init__(self, inner: Executor, model: KvModel) -> None:
        self._inner = inner
        self._bounded = {group.name for group in model.groups if group.kind == "bounded"}
        self._names = {arena.name for arena in model.arenas if arena.group in self._bounded}
        self._slots: dict[tuple[str, str], Any] = {}
        self._own: dict[tuple[str, str], Any] = {}
        self._reached: dict[int, int] = {}

    @property
    def limits(self) -> Limits:
        """The generic executor's."""
        return self._inner.limits

    def bind(self, views: Mapping[tuple[str, str], Any]) -> None:
        """All state goes to memory of its own."""
        self._slots = {ref: view for ref, view in views.items() if ref[0] in self._names}
        self._own = {ref: view.clone().zero_() for ref, view in self._slots.items()}
        self._inner.bind({**views, **self._own})

    def forward(self, step: Step) -> StepOutput:
        """Publish, then run."""
        (slots,) = step.slots.values()
        for slot, context in zip(slots.tolist(), step.context_len.tolist(), strict=True):
            for ref, view in self._slots.items():
                if not context:
                    self._own[ref][slot].zero_()
                elif self._reached.get(slot) != context:  # somebody has put another state there
                    self._own[ref][slot].copy_(view[slot])
                view[slot].copy_(self._own[ref][slot])
        output = self._inner.forward(step)
        ends = step.context_len + np.diff(step.query_start)
        self._reached |= dict(zip(slots.tolist(), ends.tolist(), strict=True))
        return output


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration."""
    return kvc_qwen35.kvc_model(ctx).model_copy(update={"name": "late_slot"})


@hookimpl
def kvc_executor(ctx: Context) -> Executor:
    """The generic executor, spoilt."""
    inner = generic_executor(
        ctx.model, kvc_qwen35.kvc_executor(ctx), checkpoint=ctx.checkpoint, dtype=ctx.dtype
    )
    return LateSlot(inner, ctx.model)


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen35.kvc_samples(ctx)

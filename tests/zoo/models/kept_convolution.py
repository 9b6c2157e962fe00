"""Wrong on purpose: the state of convolutions lies in memory of its own, and the arenas hold zeros.

A request that goes on in its slot is right; one that was restored has lost half of its state.
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
SAYS = r"something a step reads lies outside the declared arenas"


class KeptConvolution:
    """The generic executor over arenas for recurrent states, and over memory of its own."""

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
        """Convolutions go to memory of its own."""
        self._slots = {ref: view for ref, view in views.items() if "conv" in ref[0]}
        self._own = {ref: view.clone().zero_() for ref, view in self._slots.items()}
        self._inner.bind({**views, **self._own})

    def forward(self, step: Step) -> StepOutput:
        """Run; what is declared gets zeros."""
        (slots,) = step.slots.values()
        for slot, context in zip(slots.tolist(), step.context_len.tolist(), strict=True):
            for own in self._own.values() if self._reached.get(slot) != context else ():
                own[slot].zero_()  # of somebody else
        output = self._inner.forward(step)
        ends = step.context_len + np.diff(step.query_start)
        self._reached |= dict(zip(slots.tolist(), ends.tolist(), strict=True))
        for view in self._slots.values():
            for slot in slots.tolist():
                view[slot].zero_()
        return output


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration."""
    return kvc_qwen35.kvc_model(ctx).model_copy(update={"name": "kept_convolution"})


@hookimpl
def kvc_executor(ctx: Context) -> Executor:
    """The generic executor, spoilt."""
    inner = generic_executor(
        ctx.model, kvc_qwen35.kvc_executor(ctx), checkpoint=ctx.checkpoint, dtype=ctx.dtype
    )
    return KeptConvolution(inner, ctx.model)


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen35.kvc_samples(ctx)

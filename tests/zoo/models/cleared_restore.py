"""Wrong on purpose: clears a slot whenever somebody else's request comes to it, restored state included.

Whoever begins at position 0 wants that; whoever begins with a hit has lost what was copied for him.
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
SAYS = r"began after \d+ tokens whose state came from pages still on the device; its logits differ"


class ClearedRestore:
    """The generic executor; a slot that does not go on where it stood is cleared."""

    def __init__(self, inner: Executor, model: KvModel) -> None:
        self._inner = inner
        bounded = {group.name for group in model.groups if group.kind == "bounded"}
        self._names = {arena.name for arena in model.arenas if arena.group in bounded}
        self._slots: list[Any] = []
        self._reached: dict[int, int] = {}

    @property
    def limits(self) -> Limits:
        """The generic executor's."""
        return self._inner.limits

    def bind(self, views: Mapping[tuple[str, str], Any]) -> None:
        """The generic executor's, and a look at the slots."""
        self._slots = [view for (arena, _), view in views.items() if arena in self._names]
        self._inner.bind(views)

    def forward(self, step: Step) -> StepOutput:
        """Clear, then run."""
        (slots,) = step.slots.values()
        ends = step.context_len + np.diff(step.query_start)
        for slot, context, end in zip(slots.tolist(), step.context_len.tolist(), ends.tolist(), strict=True):
            for view in self._slots if self._reached.get(slot) != context else ():
                view[slot].zero_()
            self._reached[slot] = end
        return self._inner.forward(step)


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration."""
    return kvc_qwen35.kvc_model(ctx).model_copy(update={"name": "cleared_restore"})


@hookimpl
def kvc_executor(ctx: Context) -> Executor:
    """The generic executor, spoilt."""
    inner = generic_executor(
        ctx.model, kvc_qwen35.kvc_executor(ctx), checkpoint=ctx.checkpoint, dtype=ctx.dtype
    )
    return ClearedRestore(inner, ctx.model)


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen35.kvc_samples(ctx)

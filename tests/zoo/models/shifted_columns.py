"""Wrong on purpose: keeps of each convolution all columns but the newest, instead of all but the oldest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import kvc_qwen35
from kvcontract import Context, Executor, KvModel, Step, StepOutput, hookimpl
from kvcontract.contract.executor import Limits
from kvcontract.engine.build import generic_executor

KVC_CONTRACT = 1
TRIPS = "KVC-PREFIX-01"
SAYS = r"logits differ from the unmodified model's"


class ShiftedColumns:
    """The generic executor; columns are moved by one after each step."""

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
        """Run, then move."""
        output = self._inner.forward(step)
        for slots in step.slots.values():
            for (arena, _), view in self._slots.items():
                for slot in slots.tolist() if "conv" in arena else ():
                    view[slot].copy_(view[slot].roll(1, -1))
        return output


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration."""
    return kvc_qwen35.kvc_model(ctx).model_copy(update={"name": "shifted_columns"})


@hookimpl
def kvc_executor(ctx: Context) -> Executor:
    """The generic executor, spoilt."""
    inner = generic_executor(
        ctx.model, kvc_qwen35.kvc_executor(ctx), checkpoint=ctx.checkpoint, dtype=ctx.dtype
    )
    return ShiftedColumns(inner, ctx.model)


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen35.kvc_samples(ctx)

"""Wrong on purpose: says that it writes states inside a step, so that nobody cuts one, and writes none.

What lies in the slots that it was given is found under the names of states.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import kvc_qwen35
from kvcontract import Context, Executor, KvModel, Step, StepOutput, hookimpl
from kvcontract.contract.executor import Limits
from kvcontract.engine.build import generic_executor

KVC_CONTRACT = 1
TRIPS = "KVC-BOUNDED-01"
SAYS = r"has written for position \d+ .* look at when and where step.snapshots are written"


class ClaimsToEmit:
    """The generic executor, which knows nothing of states inside a step."""

    def __init__(self, inner: Executor, model: KvModel) -> None:
        self._inner = inner
        self.emits = {group.name: group.boundary_tokens for group in model.groups if group.kind == "bounded"}

    @property
    def limits(self) -> Limits:
        """The generic executor's."""
        return self._inner.limits

    def bind(self, views: Mapping[tuple[str, str], Any]) -> None:
        """The generic executor's."""
        self._inner.bind(views)

    def forward(self, step: Step) -> StepOutput:
        """The generic executor's."""
        return self._inner.forward(step)


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration."""
    return kvc_qwen35.kvc_model(ctx).model_copy(update={"name": "claims_to_emit"})


@hookimpl
def kvc_executor(ctx: Context) -> Executor:
    """The generic executor, spoilt."""
    inner = generic_executor(
        ctx.model, kvc_qwen35.kvc_executor(ctx), checkpoint=ctx.checkpoint, dtype=ctx.dtype
    )
    return ClaimsToEmit(inner, ctx.model)


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen35.kvc_samples(ctx)

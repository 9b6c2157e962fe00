"""Wrong on purpose: declares a window that is one token smaller than what the model reads.

It shows at one moment only: when the page of that token has just been let go.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import kvc_gemma4
from kvcontract import Context, Executor, KvModel, Step, StepOutput, Window, hookimpl
from kvcontract.contract.executor import Limits
from kvcontract.engine.build import generic_executor

KVC_CONTRACT = 1
TRIPS = "KVC-PREFIX-01"
SAYS = r"logits (differ|of position \d+ are NaN)"
OFF_BY = -1


class NarrowWindow:
    """The generic executor with the model's window; a page that is gone is read as another."""

    def __init__(self, inner: Executor, real: KvModel, declared: KvModel) -> None:
        self._inner = inner
        self._page_tokens = real.page_tokens
        self._reach, self._declared = (model.group("win").reach for model in (real, declared))
        self._arena = next(arena.name for arena in real.arenas if arena.group == "win")
        self._strange = 0

    @property
    def limits(self) -> Limits:
        """The generic executor's."""
        return self._inner.limits

    def bind(self, views: Mapping[tuple[str, str], Any]) -> None:
        """The generic executor's; the last page is seldom anybody's."""
        self._strange = len(views[self._arena, "k"]) - 1
        self._inner.bind(views)

    def forward(self, step: Step) -> StepOutput:
        """Rename the page table, and put something where nothing is that the model reads."""
        tables = dict(step.page_table)
        table = tables.pop(self._declared.key).copy()
        for row, context in zip(table, step.context_len.tolist(), strict=True):
            for first, end in self._reach.needed(context):
                read = row[first // self._page_tokens : -(-end // self._page_tokens)]
                read[read == 0] = self._strange
        return self._inner.forward(replace(step, page_table={**tables, self._reach.key: table}))


def with_window(model: KvModel, by: int) -> KvModel:
    """Another window."""
    groups = tuple(
        group.model_copy(update={"reach": Window(tokens=group.reach.tokens + by)})
        if isinstance(group.reach, Window)
        else group
        for group in model.groups
    )
    return model.model_copy(update={"groups": groups})


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with another window."""
    model = kvc_gemma4.kvc_model(ctx).model_copy(update={"name": "narrow_window"})
    return with_window(model, OFF_BY)


@hookimpl
def kvc_executor(ctx: Context) -> Executor:
    """The generic executor, which knows the model's own window."""
    real = kvc_gemma4.kvc_model(ctx)
    inner = generic_executor(real, kvc_gemma4.kvc_executor(ctx), checkpoint=ctx.checkpoint, dtype=ctx.dtype)
    return NarrowWindow(inner, real, ctx.model)


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_gemma4.kvc_samples(ctx)

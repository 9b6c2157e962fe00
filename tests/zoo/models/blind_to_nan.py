"""Wrong on purpose: reads its last page to the end, and takes NaN for nothing.

It is right over memory that is new, or poisoned to find it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import kvc_qwen3
from kvcontract import Context, Executor, KvModel, Step, StepOutput, hookimpl
from kvcontract.contract.executor import Limits
from kvcontract.engine.build import generic_executor

KVC_CONTRACT = 1
TRIPS = "KVC-PREFIX-04"
SAYS = r"row \d+ \(position \d+ of request 0\) depends on what lay in memory before"
PART = 0.001


class BlindToNan:
    """The generic executor; a little of what lies behind a request gets into its last row."""

    def __init__(self, inner: Executor, model: KvModel) -> None:
        self._inner = inner
        self._page_tokens = model.page_tokens
        self._views: Mapping[tuple[str, str], Any] = {}

    @property
    def limits(self) -> Limits:
        """The generic executor's."""
        return self._inner.limits

    def bind(self, views: Mapping[tuple[str, str], Any]) -> None:
        """The generic executor's, and a look at the pages."""
        self._views = views
        self._inner.bind(views)

    def forward(self, step: Step) -> StepOutput:
        """Run, then add."""
        output = self._inner.forward(step)
        (table,) = step.page_table.values()
        ends = step.context_len + np.diff(step.query_start)
        for pages, end in zip(table.tolist(), ends.tolist(), strict=True):
            page, row = divmod(end - 1, self._page_tokens)
            for view in self._views.values():
                rows = view[pages[page]]
                behind = torch.nan_to_num(rows[row + 1 :]).clamp(-1, 1)
                rows[row].add_(behind.sum(0), alpha=PART)
        return output


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration."""
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "blind_to_nan"})


@hookimpl
def kvc_executor(ctx: Context) -> Executor:
    """The generic executor, spoilt."""
    inner = generic_executor(
        ctx.model, kvc_qwen3.kvc_executor(ctx), checkpoint=ctx.checkpoint, dtype=ctx.dtype
    )
    return BlindToNan(inner, ctx.model)


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

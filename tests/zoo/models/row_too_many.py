"""Wrong on purpose: writes rows two at a time, and so one past the end of every odd step.

Nobody reads that row before its owner has written it, unless it lies in a neighbour's page.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import kvc_qwen3
from kvcontract import Context, Executor, KvModel, Step, StepOutput, hookimpl
from kvcontract.contract.executor import Limits
from kvcontract.engine.build import generic_executor

KVC_CONTRACT = 1
TRIPS = "KVC-PREFIX-04"
SAYS = r"also wrote arena layers\.0\.kv, page 2, row 9: position 25 of request 0, of which positions 0\.\.24 "


class RowTooMany:
    """The generic executor; the last row is written once more behind itself."""

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
        """Run, then write what fills up the last pair."""
        output = self._inner.forward(step)
        (table,) = step.page_table.values()
        for request, context in enumerate(step.context_len.tolist()):
            end = context + int(step.query_start[request + 1] - step.query_start[request])
            page, row = divmod(end - 1, self._page_tokens)
            if end % 2 and row + 1 < self._page_tokens:
                for view in self._views.values():
                    pages = view[int(table[request, page])]
                    pages[row + 1].copy_(pages[row])
        return output


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration."""
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "row_too_many"})


@hookimpl
def kvc_executor(ctx: Context) -> Executor:
    """The generic executor, spoilt."""
    inner = generic_executor(
        ctx.model, kvc_qwen3.kvc_executor(ctx), checkpoint=ctx.checkpoint, dtype=ctx.dtype
    )
    return RowTooMany(inner, ctx.model)


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

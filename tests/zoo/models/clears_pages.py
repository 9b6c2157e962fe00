"""Wrong on purpose: clears the page that it begins, and the one after it in memory too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import kvc_qwen3
from kvcontract import Context, Executor, KvModel, Step, StepOutput, hookimpl
from kvcontract.contract.executor import Limits
from kvcontract.engine.build import generic_executor

KVC_CONTRACT = 1
TRIPS = "KVC-PREFIX-04"
SAYS = r"also wrote arena layers\.0\.kv, page \d+, row \d+"


class ClearsPages:
    """The generic executor; the first page of a request is cleared, and the one after it."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner

    @property
    def limits(self) -> Limits:
        """The generic executor's."""
        return self._inner.limits

    def bind(self, views: Mapping[tuple[str, str], Any]) -> None:
        """The generic executor's, and a look at the arenas."""
        self._views = views
        self._inner.bind(views)

    def forward(self, step: Step) -> StepOutput:
        """Clear what is begun, then run."""
        (table,) = step.page_table.values()
        for pages, begin in zip(table, step.context_len, strict=True):
            for view in self._views.values() if not begin else ():
                view[int(pages[0]) : int(pages[0]) + 2].zero_()
        return self._inner.forward(step)


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration."""
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "clears_pages"})


@hookimpl
def kvc_executor(ctx: Context) -> Executor:
    """The generic executor, spoilt."""
    inner = generic_executor(
        ctx.model, kvc_qwen3.kvc_executor(ctx), checkpoint=ctx.checkpoint, dtype=ctx.dtype
    )
    return ClearsPages(inner)


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

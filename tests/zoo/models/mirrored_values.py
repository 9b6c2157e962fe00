"""Wrong on purpose: reads values from a mirror of the arenas that it keeps beside them, page by page.

A hit on the device finds its pages in the mirror; pages that come back from a tier are not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import kvc_qwen3
from kvcontract import Context, Executor, KvModel, Step, StepOutput, hookimpl
from kvcontract.contract.executor import Limits
from kvcontract.engine.build import generic_executor

KVC_CONTRACT = 1
TRIPS = "KVC-OFFLOAD-02"
SAYS = r"began after 48 tokens whose state came from the tier and was restored; its logits differ"


class MirroredValues:
    """The generic executor over values of its own; the arenas get a copy of what a step has written."""

    def __init__(self, inner: Executor, model: KvModel) -> None:
        self._inner = inner
        self._page_tokens = model.page_tokens
        self._arenas: dict[tuple[str, str], Any] = {}
        self._mirror: dict[tuple[str, str], Any] = {}

    @property
    def limits(self) -> Limits:
        """The generic executor's."""
        return self._inner.limits

    def bind(self, views: Mapping[tuple[str, str], Any]) -> None:
        """Values go to the mirror."""
        self._arenas = {ref: view for ref, view in views.items() if ref[1] == "v"}
        self._mirror = {ref: view.clone() for ref, view in self._arenas.items()}
        self._inner.bind({**views, **self._mirror})

    def forward(self, step: Step) -> StepOutput:
        """Run, then copy the rows that are new."""
        output = self._inner.forward(step)
        (table,) = step.page_table.values()
        owner = np.repeat(np.arange(len(table)), np.diff(step.query_start))
        rows = table[owner, step.positions // self._page_tokens], step.positions % self._page_tokens
        for ref, view in self._arenas.items():
            view[rows] = self._mirror[ref][rows]
        return output


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration."""
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "mirrored_values"})


@hookimpl
def kvc_executor(ctx: Context) -> Executor:
    """The generic executor, spoilt."""
    inner = generic_executor(
        ctx.model, kvc_qwen3.kvc_executor(ctx), checkpoint=ctx.checkpoint, dtype=ctx.dtype
    )
    return MirroredValues(inner, ctx.model)


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

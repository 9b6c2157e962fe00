"""Wrong on purpose: takes pages of a request to lie one behind the other, as they do for whoever is alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

import kvc_qwen3
from kvcontract import Context, Executor, KvModel, Step, StepOutput, hookimpl
from kvcontract.contract.executor import Limits
from kvcontract.engine.build import generic_executor

KVC_CONTRACT = 1
TRIPS = "KVC-PREFIX-04"
SAYS = r"also wrote arena .*, row 0: position 0 of request 1, which an earlier step has written"


class ContiguousPages:
    """The generic executor, given a first page and counting on from there."""

    def __init__(self, inner: Executor, model: KvModel) -> None:
        self._inner = inner
        self._blocks = 0
        self._arena = model.arenas[0].name

    @property
    def limits(self) -> Limits:
        """The generic executor's."""
        return self._inner.limits

    def bind(self, views: Mapping[tuple[str, str], Any]) -> None:
        """The generic executor's; as many pages as there are."""
        self._blocks = len(views[self._arena, "k"])
        self._inner.bind(views)

    def forward(self, step: Step) -> StepOutput:
        """Read no page table but for its first column."""
        tables = {
            key: np.where(
                table > 0, np.minimum(table[:, :1] + np.arange(table.shape[1]), self._blocks - 1), 0
            )
            for key, table in step.page_table.items()
        }
        tables = {key: table.astype(np.int32) for key, table in tables.items()}
        return self._inner.forward(replace(step, page_table=tables))


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration."""
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "contiguous_pages"})


@hookimpl
def kvc_executor(ctx: Context) -> Executor:
    """The generic executor, spoilt."""
    inner = generic_executor(
        ctx.model, kvc_qwen3.kvc_executor(ctx), checkpoint=ctx.checkpoint, dtype=ctx.dtype
    )
    return ContiguousPages(inner, ctx.model)


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

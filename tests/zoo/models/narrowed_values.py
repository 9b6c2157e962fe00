"""Wrong on purpose: declares bfloat16 for values, and keeps 8-bit floats in it.

In float32 it keeps what it is given, and every hit is the same to the bit: only distances tell.
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
TRIPS = "KVC-PREFIX-03"
SAYS = r"precision (is )?lost in the cache"


class NarrowedValues:
    """The generic executor; rows of bfloat16 lose bits once a step has written them."""

    def __init__(self, inner: Executor, model: KvModel) -> None:
        self._inner = inner
        self._page_tokens = model.page_tokens
        self._views: dict[tuple[str, str], Any] = {}

    @property
    def limits(self) -> Limits:
        """The generic executor's."""
        return self._inner.limits

    def bind(self, views: Mapping[tuple[str, str], Any]) -> None:
        """The generic executor's, and a look at values that are kept in bfloat16."""
        self._views = {
            ref: view for ref, view in views.items() if ref[1] == "v" and view.dtype is torch.bfloat16
        }
        self._inner.bind(views)

    def forward(self, step: Step) -> StepOutput:
        """Run, then narrow the rows that are new."""
        output = self._inner.forward(step)
        (table,) = step.page_table.values()
        owner = np.repeat(np.arange(len(table)), np.diff(step.query_start))
        rows = table[owner, step.positions // self._page_tokens], step.positions % self._page_tokens
        for view in self._views.values():
            view[rows] = view[rows].to(torch.float8_e4m3fn).to(view.dtype)
        return output


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration."""
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "narrowed_values"})


@hookimpl
def kvc_executor(ctx: Context) -> Executor:
    """The generic executor, spoilt."""
    inner = generic_executor(
        ctx.model, kvc_qwen3.kvc_executor(ctx), checkpoint=ctx.checkpoint, dtype=ctx.dtype
    )
    return NarrowedValues(inner, ctx.model)


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

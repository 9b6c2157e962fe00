"""Wrong on purpose: puts decodes before prefills, as kernels want it, and never puts the logits back."""

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
TRIPS = "KVC-PREFIX-01"
SAYS = r"logits differ .* alone, requests are right"


class UnsortedLogits:
    """The generic executor; logits come in the order of the requests' lengths."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner

    @property
    def limits(self) -> Limits:
        """The generic executor's."""
        return self._inner.limits

    def bind(self, views: Mapping[tuple[str, str], Any]) -> None:
        """The generic executor's."""
        self._inner.bind(views)

    def forward(self, step: Step) -> StepOutput:
        """Run, and hand the logits over in the order of the kernels."""
        output = self._inner.forward(step)
        owner = np.searchsorted(step.query_start, step.want, side="right") - 1
        order = np.argsort(np.diff(step.query_start)[owner], kind="stable")
        return StepOutput(output.logits[torch.from_numpy(order)])


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration."""
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "unsorted_logits"})


@hookimpl
def kvc_executor(ctx: Context) -> Executor:
    """The generic executor, spoilt."""
    inner = generic_executor(
        ctx.model, kvc_qwen3.kvc_executor(ctx), checkpoint=ctx.checkpoint, dtype=ctx.dtype
    )
    return UnsortedLogits(inner)


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

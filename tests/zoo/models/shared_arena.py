"""Wrong on purpose: an executor that brings its own memory, the last two layers of which share one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import kvc_qwen3
from kvcontract import Context, Executor, KvModel, Step, StepOutput, hookimpl
from kvcontract.contract.executor import Limits
from kvcontract.contract.layout import layout
from kvcontract.engine.build import generic_executor

KVC_CONTRACT = 1
TRIPS = "KVC-LAYOUT-05"
SAYS = r"arenas layers\.\d+\.kv and layers\.\d+\.kv share memory"
LEVEL = "L1"


class Shared:
    """The generic executor over tensors of its own."""

    def __init__(self, inner: Executor, model: KvModel) -> None:
        self._inner = inner
        self._model = model

    @property
    def limits(self) -> Limits:
        """The generic executor's."""
        return self._inner.limits

    def arenas(self, blocks: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """One tensor [blocks, bytes] an arena; the last one has that of the one before."""
        space = layout(self._model).space("full")
        own = {
            arena.name: torch.zeros(blocks["full"], arena.stride_bytes, dtype=torch.uint8)
            for arena in space.arenas
        }
        before, last = list(own)[-2:]
        return {**own, last: own[before]}

    def bind(self, views: Mapping[tuple[str, str], Any]) -> None:
        """The generic executor's."""
        self._inner.bind(views)

    def forward(self, step: Step) -> StepOutput:
        """The generic executor's."""
        return self._inner.forward(step)


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration."""
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "shared_arena"})


@hookimpl
def kvc_executor(ctx: Context) -> Executor:
    """The generic executor over memory that is too little."""
    inner = generic_executor(
        ctx.model, kvc_qwen3.kvc_executor(ctx), checkpoint=ctx.checkpoint, dtype=ctx.dtype
    )
    return Shared(inner, ctx.model)


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

"""Wrong on purpose: an executor that brings its own memory, in which blocks lie innermost."""

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
SAYS = r"strides \[1, \d+\] are not contiguous inside a block"
LEVEL = "L1"


class BlocksLast:
    """The generic executor over tensors of its own."""

    def __init__(self, inner: Executor, model: KvModel) -> None:
        self._inner = inner
        self._model = model

    @property
    def limits(self) -> Limits:
        """The generic executor's."""
        return self._inner.limits

    def arenas(self, blocks: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """One tensor an arena, [bytes, blocks] in memory."""
        space = layout(self._model).space("full")
        return {
            arena.name: torch.zeros(arena.stride_bytes, blocks["full"], dtype=torch.uint8).t()
            for arena in space.arenas
        }

    def bind(self, views: Mapping[tuple[str, str], Any]) -> None:
        """The generic executor's."""
        self._inner.bind(views)

    def forward(self, step: Step) -> StepOutput:
        """The generic executor's."""
        return self._inner.forward(step)


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration."""
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "blocks_last"})


@hookimpl
def kvc_executor(ctx: Context) -> Executor:
    """The generic executor over memory that is turned."""
    inner = generic_executor(
        ctx.model, kvc_qwen3.kvc_executor(ctx), checkpoint=ctx.checkpoint, dtype=ctx.dtype
    )
    return BlocksLast(inner, ctx.model)


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

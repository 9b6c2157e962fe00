"""Wrong on purpose: counts by itself how many tokens a request has run, and goes on counting after a hit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

import kvc_qwen3
from kvcontract import Context, Executor, KvModel, Step, StepOutput, hookimpl
from kvcontract.contract.executor import Limits
from kvcontract.engine.build import generic_executor
from kvcontract.engine.checkpoint import load_model

KVC_CONTRACT = 1
TRIPS = "KVC-PREFIX-02"
SAYS = r"began after \d+ tokens whose state came from pages still on the device; its logits differ"


class CountsPositions:
    """The generic executor; a request is known by its first page."""

    def __init__(self, inner: Executor, hf_model: Any) -> None:
        self._inner = inner
        self._ends: dict[int, int] = {}
        self._shifts: Iterator[int] = iter(())
        hf_model.register_forward_pre_hook(self._counted, with_kwargs=True)

    def _counted(self, _module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return given, {**named, "position_ids": named["position_ids"] + next(self._shifts)}

    @property
    def limits(self) -> Limits:
        """The generic executor's."""
        return self._inner.limits

    def bind(self, views: Mapping[tuple[str, str], Any]) -> None:
        """The generic executor's."""
        self._inner.bind(views)

    def forward(self, step: Step) -> StepOutput:
        """Run from where the count stands."""
        (table,) = step.page_table.values()
        sizes, shifts = np.diff(step.query_start).tolist(), []
        for pages, context, size in zip(table.tolist(), step.context_len.tolist(), sizes, strict=True):
            before = self._ends.get(pages[0], 0) if context else 0
            shifts.append(before - context)
            self._ends[pages[0]] = before + size
        self._shifts = iter(shifts)
        return self._inner.forward(step)


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration."""
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "counts_positions"})


@hookimpl
def kvc_executor(ctx: Context) -> Executor:
    """The generic executor, spoilt."""
    model = load_model(ctx.checkpoint, ctx.device, ctx.dtype)
    inner = generic_executor(ctx.model, kvc_qwen3.kvc_executor(ctx), hf_model=model)
    return CountsPositions(inner, model)


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

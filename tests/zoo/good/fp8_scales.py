"""Right, if odd: keys and values are kept as 8-bit floats, each head of a row with a scale of its own.

The executor computes on rows that it widens into memory of its own, for a step and no longer: what a later
step reads comes out of the arenas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

import kvc_qwen3
from kvcontract import Arena, Context, Executor, Field, HfLayers, KvModel, Step, StepOutput, hookimpl
from kvcontract.contract.executor import Limits
from kvcontract.engine.build import generic_executor

KVC_CONTRACT = 1

NARROW = "float8_e4m3fn"
GREATEST = torch.finfo(torch.float8_e4m3fn).max
SMALLEST_SCALE = 2.0**-100
"""Of a row of zeros."""

Rows = tuple[Tensor, Tensor]
"""Blocks and rows in them, int64[n] each."""


class Quantised:
    """The generic executor over rows that are widened before a step, and narrowed after it."""

    def __init__(self, inner: Executor, plain: KvModel) -> None:
        self._inner = inner
        self._plain = plain
        self._views: Mapping[tuple[str, str], Tensor] = {}
        self._wide: dict[tuple[str, str], Tensor] = {}

    @property
    def limits(self) -> Limits:
        """The generic executor's."""
        return self._inner.limits

    def bind(self, views: Mapping[tuple[str, str], Tensor]) -> None:
        """Keep the arenas; the generic executor gets memory as large."""
        self._views = views
        self._wide = {
            (arena.name, item.name): torch.zeros(
                views[arena.name, item.name].shape, dtype=getattr(torch, item.dtype)
            )
            for arena in self._plain.arenas
            for item in arena.fields
        }
        self._inner.bind(self._wide)

    def forward(self, step: Step) -> StepOutput:
        """Widen what was written before, run, narrow what the step has written."""
        for begin, _, pages in self._requests(step):
            self._widen(self._rows(pages, 0, begin))
        output = self._inner.forward(step)
        for begin, end, pages in self._requests(step):
            self._narrow(self._rows(pages, begin, end))
        return output

    @staticmethod
    def _requests(step: Step) -> Iterator[tuple[int, int, Any]]:
        """First position of the step, the one after its last, and pages of each request."""
        ends = step.context_len + np.diff(step.query_start)
        (table,) = step.page_table.values()
        yield from zip(step.context_len.tolist(), ends.tolist(), table, strict=True)

    def _rows(self, pages: Any, begin: int, end: int) -> Rows:
        page, row = np.divmod(np.arange(begin, end), self._plain.page_tokens)
        return torch.from_numpy(pages[page].astype(np.int64)), torch.from_numpy(row)

    def _widen(self, rows: Rows) -> None:
        for (arena, name), wide in self._wide.items():
            bits, scales = self._views[arena, name].view(torch.uint8), self._views[arena, f"{name}_scale"]
            values = bits[rows].view(torch.float8_e4m3fn).to(torch.float32)
            wide[rows] = (values * scales[rows].unsqueeze(-1)).to(wide.dtype)

    def _narrow(self, rows: Rows) -> None:
        for (arena, name), wide in self._wide.items():
            values = wide[rows].to(torch.float32)
            scales = (values.abs().amax(-1) / GREATEST).clamp(min=SMALLEST_SCALE)
            narrow = (values / scales.unsqueeze(-1)).to(torch.float8_e4m3fn)
            self._views[arena, f"{name}_scale"][rows] = scales
            self._views[arena, name].view(torch.uint8)[rows] = narrow.view(torch.uint8)


def quantised(arena: Arena) -> Arena:
    """The same fields as 8-bit floats, behind their scales: what is wide comes first."""
    scales = tuple(
        Field(
            name=f"{item.name}_scale",
            dtype="float32",
            axes={"head": item.axes["head"]},
            shard_axis="head",
        )
        for item in arena.fields
    )
    values = tuple(
        item.model_copy(update={"dtype": NARROW, "scale": f"{item.name}_scale"}) for item in arena.fields
    )
    return arena.model_copy(update={"fields": (*scales, *values)})


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """8-bit floats, unless another type is asked for."""
    plain = kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "fp8_scales"})
    if ctx.options.kv_dtype is not None:
        return plain
    arenas = tuple(quantised(arena) for arena in plain.arenas)
    return plain.model_copy(update={"arenas": arenas, "numerics": f"{NARROW}, scaled by head"})


@hookimpl
def kvc_executor(ctx: Context) -> Executor | HfLayers:
    """The generic executor as it is, or over rows that are widened for it."""
    layers = kvc_qwen3.kvc_executor(ctx)
    if ctx.options.kv_dtype is not None:
        return layers
    plain = kvc_qwen3.kvc_model(ctx)
    inner = generic_executor(plain, layers, checkpoint=ctx.checkpoint, dtype=ctx.dtype)
    return Quantised(inner, plain)


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

"""Wrong on purpose: rotates keys by their place in the chunk of the prefill, not in the request.

A prompt of one chunk is right, and so is whoever never looks back.
"""

from __future__ import annotations

from typing import Any

import kvc_qwen3
from kvcontract import Context, Executor, KvModel, hookimpl
from kvcontract.engine.build import generic_executor
from kvcontract.engine.checkpoint import load_model

KVC_CONTRACT = 1
TRIPS = "KVC-PREFIX-01"
SAYS = r"logits differ .* it is the first of its step, and so the first to read rows that earlier steps wrote"


def from_zero(_module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Positions that begin anew in each step."""
    positions = named["position_ids"]
    return given, {**named, "position_ids": positions - positions[:, :1]}


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration."""
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "chunk_positions"})


@hookimpl
def kvc_executor(ctx: Context) -> Executor:
    """The generic executor over a model that is told other positions."""
    model = load_model(ctx.checkpoint, ctx.device, ctx.dtype)
    model.register_forward_pre_hook(from_zero, with_kwargs=True)
    return generic_executor(ctx.model, kvc_qwen3.kvc_executor(ctx), hf_model=model)


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

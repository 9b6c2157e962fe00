"""Wrong on purpose: an attention that never reads the last row of a full page.

Every comparison of this engine with itself passes; only the unmodified model tells.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

import kvc_qwen3
from kvcontract import Context, Executor, KvModel, hookimpl
from kvcontract.engine.build import generic_executor
from kvcontract.engine.checkpoint import load_model

KVC_CONTRACT = 1
TRIPS = "KVC-PREFIX-01"
SAYS = r"page"


def blind_attention(
    module: Any, query: Any, key: Any, value: Any, _mask: Any, scaling: float, **_: Any
) -> tuple[Any, None]:
    """Causal attention over [1, heads, n, dim], without the rows page_tokens - 1, 2 page_tokens - 1, ..."""
    page_tokens = module.config.page_tokens
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    rows, context = query.shape[2], key.shape[2]
    at = torch.arange(context - rows, context)[:, None]
    past = torch.arange(context)[None, :]
    seen = (past == at) | ((past < at) & (past % page_tokens != page_tokens - 1))
    scores = (query @ key.transpose(-1, -2)) * scaling
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), None


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration."""
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "blind_last_row"})


@hookimpl
def kvc_executor(ctx: Context) -> Executor:
    """The generic executor with another attention."""
    AttentionInterface.register("blind", blind_attention)
    model = load_model(ctx.checkpoint, ctx.device, ctx.dtype)
    model.config._attn_implementation = "blind"
    model.config.page_tokens = ctx.model.page_tokens
    return generic_executor(ctx.model, kvc_qwen3.kvc_executor(ctx), hf_model=model)


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

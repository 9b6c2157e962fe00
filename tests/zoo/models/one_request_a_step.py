"""Wrong on purpose: numbers the tokens of a step through, as if all of them were one request's.

Whoever is alone in his steps is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import kvc_qwen3
from kvcontract import Context, Executor, KvModel, Step, StepOutput, hookimpl
from kvcontract.contract.executor import Limits
from kvcontract.engine.build import generic_executor
from kvcontract.engine.checkpoint import load_model

KVC_CONTRACT = 1
TRIPS = "KVC-PREFIX-01"
SAYS = r"alone, requests are right \(case alone\): look at how a step's requests are told apart"


class OneRequestAStep:
    """The generic executor, which runs request after request; each goes on counting."""

    def __init__(self, inner: Executor, model: Any) -> None:
        self._inner = inner
        self._begins: Iterator[int] = iter(())
        model.register_forward_pre_hook(self._count_on, with_kwargs=True)

    def _count_on(self, _module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return given, {**named, "position_ids": named["position_ids"] + next(self._begins)}

    @property
    def limits(self) -> Limits:
        """The generic executor's."""
        return self._inner.limits

    def bind(self, views: Mapping[tuple[str, str], Any]) -> None:
        """The generic executor's."""
        self._inner.bind(views)

    def forward(self, step: Step) -> StepOutput:
        """Run."""
        self._begins = iter(step.query_start.tolist())
        return self._inner.forward(step)


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration."""
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "one_request_a_step"})


@hookimpl
def kvc_executor(ctx: Context) -> Executor:
    """The generic executor, spoilt."""
    model = load_model(ctx.checkpoint, ctx.device, ctx.dtype)
    inner = generic_executor(ctx.model, kvc_qwen3.kvc_executor(ctx), hf_model=model)
    return OneRequestAStep(inner, model)


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

"""Wrong on purpose: is right where memory is NaN, as suites make it, and not over zeros, as memory comes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import kvc_qwen3
from kvcontract import Context, Executor, KvModel, Step, StepOutput, hookimpl
from kvcontract.contract.executor import Limits
from kvcontract.engine.build import generic_executor

KVC_CONTRACT = 1
TRIPS = "KVC-PREFIX-01"
SAYS = r"over memory of zeros: logits differ from the unmodified model's"


class FairWeather:
    """The generic executor; logits are a little off while page 0 is all zeros."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner

    @property
    def limits(self) -> Limits:
        """The generic executor's."""
        return self._inner.limits

    def bind(self, views: Mapping[tuple[str, str], Any]) -> None:
        """The generic executor's, and a look at the arenas."""
        self._views = views
        self._inner.bind(views)

    def forward(self, step: Step) -> StepOutput:
        """Run, and round where nobody is thought to look."""
        logits = self._inner.forward(step).logits
        tested = any(view[0].any() for view in self._views.values())
        return StepOutput(logits if tested else logits.bfloat16().to(logits.dtype))


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration."""
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "fair_weather"})


@hookimpl
def kvc_executor(ctx: Context) -> Executor:
    """The generic executor, spoilt."""
    inner = generic_executor(
        ctx.model, kvc_qwen3.kvc_executor(ctx), checkpoint=ctx.checkpoint, dtype=ctx.dtype
    )
    return FairWeather(inner)


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen3.kvc_samples(ctx)

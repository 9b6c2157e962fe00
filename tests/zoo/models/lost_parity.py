"""Wrong on purpose: a state that is double-buffered, and which half is valid is known to the executor alone.

The bit is state too: it is lost on reuse, and every second restore reads the wrong half.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import kvc_qwen35
from kvcontract import Arena, Context, Executor, Field, KvModel, Step, StepOutput, hookimpl
from kvcontract.contract.executor import Limits
from kvcontract.engine.build import generic_executor

KVC_CONTRACT = 1
TRIPS = "KVC-PREFIX-02"
SAYS = r"the state they began from differs"


def doubled(arena: Arena) -> Arena:
    """Two buffers, one after another."""
    fields = tuple(
        Field(name=item.name, dtype=item.dtype, axes={"buffer": 2, **item.axes}, shard_axis=item.shard_axis)
        for item in arena.fields
    )
    return Arena.planes(name=arena.name, group=arena.group, layer=arena.layer, fields=fields)


class LostParity:
    """The generic executor over one buffer of its own, taken from one half and put into the other."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self._halves: dict[tuple[str, str], Any] = {}
        self._own: dict[tuple[str, str], Any] = {}
        self._valid: dict[int, tuple[int, int]] = {}

    @property
    def limits(self) -> Limits:
        """The generic executor's."""
        return self._inner.limits

    def bind(self, views: Mapping[tuple[str, str], Any]) -> None:
        """Recurrent states go to memory of its own."""
        self._halves = {ref: view for ref, view in views.items() if "state" in ref[0]}
        self._own = {ref: view[:, 0].clone() for ref, view in self._halves.items()}
        self._inner.bind({**views, **self._own})

    def forward(self, step: Step) -> StepOutput:
        """Read the valid half, run, write the other."""
        (slots,) = step.slots.values()
        ends = (step.context_len + np.diff(step.query_start)).tolist()
        requests = list(zip(slots.tolist(), step.context_len.tolist(), ends, strict=True))
        half: dict[int, int] = {}
        for slot, context, _ in requests:
            reached, valid = self._valid.get(slot, (0, 0))
            half[slot] = valid if reached == context else 0  # a request it has not seen begins with the first
            for ref, view in self._halves.items():
                self._own[ref][slot].copy_(view[slot, half[slot]])
        output = self._inner.forward(step)
        for slot, context, end in requests:
            self._valid[slot] = end, 1 - half[slot]
            for ref, view in self._halves.items():
                view[slot, 1 - half[slot]].copy_(self._own[ref][slot])
                if not context:
                    view[slot, half[slot]].copy_(self._own[ref][slot])
        return output


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with two buffers for each recurrent state."""
    model = kvc_qwen35.kvc_model(ctx)
    arenas = tuple(doubled(arena) if "state" in arena.name else arena for arena in model.arenas)
    return model.model_copy(update={"name": "lost_parity", "arenas": arenas})


@hookimpl
def kvc_executor(ctx: Context) -> Executor:
    """The generic executor behind the two buffers."""
    inner = generic_executor(
        kvc_qwen35.kvc_model(ctx), kvc_qwen35.kvc_executor(ctx), checkpoint=ctx.checkpoint, dtype=ctx.dtype
    )
    return LostParity(inner)


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen35.kvc_samples(ctx)

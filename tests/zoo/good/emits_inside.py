"""Right, if odd: writes states inside a step, and so no step is cut for them.

A kernel does so in passing; here a step is run in pieces, and the slot is copied between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import kvc_qwen35
from kvcontract import Context, Executor, KvModel, Step, StepOutput, hookimpl
from kvcontract.contract.executor import Limits
from kvcontract.engine.build import generic_executor

KVC_CONTRACT = 1


class EmitsInside:
    """The generic executor, piece by piece."""

    def __init__(self, inner: Executor, model: KvModel) -> None:
        self._inner = inner
        self._page_tokens = model.page_tokens
        self._bounded = {arena.name: arena.group for arena in model.arenas}
        self._views: Mapping[tuple[str, str], Any] = {}
        self.emits = {group.name: group.boundary_tokens for group in model.groups if group.kind == "bounded"}

    @property
    def limits(self) -> Limits:
        """The generic executor's."""
        return self._inner.limits

    def bind(self, views: Mapping[tuple[str, str], Any]) -> None:
        """The generic executor's, and a look at the slots."""
        self._views = {ref: view for ref, view in views.items() if self._bounded[ref[0]] in self.emits}
        self._inner.bind(views)

    def forward(self, step: Step) -> StepOutput:
        """Run to each position of which a state is wanted, and copy it."""
        found = []
        for request, context in enumerate(step.context_len.tolist()):
            begin, end = (int(row) for row in step.query_start[request : request + 2])
            wanted = {
                position: (group, slot)
                for group, rows in step.snapshots.items()
                for number, position, slot in rows.tolist()
                if number == request
            }
            at = begin
            for position in [*sorted(wanted), context + end - begin]:
                stop = begin + position - context
                found.append(self._inner.forward(self._piece(step, request, at, stop)).logits)
                at = stop
                if position in wanted:
                    self._copy(step, request, *wanted[position])
        return StepOutput(torch.cat(found))

    def _piece(self, step: Step, request: int, begin: int, end: int) -> Step:
        """Rows of one request alone."""
        positions = step.positions[begin:end]
        pages = -(-int(positions[-1] + 1) // self._page_tokens)
        mine = slice(request, request + 1)
        return Step(
            token_ids=step.token_ids[begin:end],
            positions=positions,
            query_start=np.array([0, end - begin]),
            context_len=positions[:1],
            page_table={key: table[mine, :pages] for key, table in step.page_table.items()},
            want=step.want[(step.want >= begin) & (step.want < end)] - begin,
            slots={group: slots[mine] for group, slots in step.slots.items()},
        )

    def _copy(self, step: Step, request: int, group: str, slot: int) -> None:
        for (arena, _), view in self._views.items():
            if self._bounded[arena] == group:
                view[slot].copy_(view[int(step.slots[group][request])])


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration."""
    return kvc_qwen35.kvc_model(ctx).model_copy(update={"name": "emits_inside"})


@hookimpl
def kvc_executor(ctx: Context) -> Executor:
    """The generic executor, wrapped."""
    inner = generic_executor(
        ctx.model, kvc_qwen35.kvc_executor(ctx), checkpoint=ctx.checkpoint, dtype=ctx.dtype
    )
    return EmitsInside(inner, ctx.model)


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen35.kvc_samples(ctx)

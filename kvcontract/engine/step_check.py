"""Judges one `Step` before a model runs it: every fault at once, with the numbers.

A wrong page table or slot would not crash: it would read another request's state, or write over it.  So an
executor checks what it is handed, in numpy, before the first byte moves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcontract.contract.errors import InternalFault
from kvcontract.contract.executor import Limits, Step
from kvcontract.contract.model import Reach


@dataclass(frozen=True, slots=True)
class SpaceBounds:
    """What a page table of one space is judged by.

    Attributes:
        reach: which past tokens a step of the space's groups reads.
        blocks: block ids lie below this; 0 is padding.
    """

    reach: Reach
    blocks: int


def check_step(
    step: Step,
    *,
    limits: Limits,
    page_tokens: int,
    spaces: Mapping[str, SpaceBounds],
    slots: Mapping[str, int],
    adapters: Collection[str] = (),
) -> None:
    """Raise `InternalFault` naming every fault of a step; do nothing if there is none.

    Args:
        step: what is about to run.
        limits: what the executor can take.
        page_tokens: tokens of a page.
        spaces: the paged spaces of the model, by key.
        slots: slots of each bounded group, by its name, slot 0 included.
        adapters: names of those that are loaded.
    """
    faults = _shape_faults(step)
    if not faults:
        faults = [
            *_limit_faults(step, limits),
            *_position_faults(step),
            *_want_faults(step),
            *_table_faults(step, page_tokens, spaces),
            *_slot_faults(step, slots),
            *_adapter_faults(step, adapters),
        ]
    if faults:
        raise InternalFault("step refused: " + "; ".join(faults))


def _shape_faults(step: Step) -> list[str]:
    tokens, requests = len(step.token_ids), len(step.context_len)
    faults = []
    if step.positions.shape != (tokens,):
        faults.append(f"positions {step.positions.shape}: expected ({tokens},) like token_ids")
    if step.query_start.shape != (requests + 1,):
        faults.append(
            f"query_start {step.query_start.shape}: expected ({requests + 1},), one past each request"
        )
    elif step.query_start[0] != 0 or step.query_start[-1] != tokens or (np.diff(step.query_start) < 1).any():
        faults.append(
            f"query_start {step.query_start.tolist()}: expected to rise from 0 to {tokens}, a token each"
        )
    if requests == 0:
        faults.append("no request")
    return faults


def _adapter_faults(step: Step, loaded: Collection[str]) -> list[str]:
    requests = len(step.context_len)
    if step.adapters and len(step.adapters) != requests:
        return [f"{len(step.adapters)} adapters for {requests} requests: expected one each, or none at all"]
    return [
        f"request {number} names adapter {name!r}: not loaded"
        for number, name in enumerate(step.adapters)
        if name is not None and name not in loaded
    ]


def _limit_faults(step: Step, limits: Limits) -> list[str]:
    tokens, requests = len(step.token_ids), len(step.context_len)
    ends = step.context_len + np.diff(step.query_start)
    faults = []
    if requests > limits.max_requests:
        faults.append(f"{requests} requests: at most {limits.max_requests}")
    if tokens > limits.max_tokens:
        faults.append(f"{tokens} tokens: at most {limits.max_tokens}")
    if ends.max() > limits.max_context_tokens:
        faults.append(
            f"context of {ends.max()} tokens in request {ends.argmax()}: at most {limits.max_context_tokens}"
        )
    outside = np.flatnonzero((step.token_ids < 0) | (step.token_ids >= limits.vocab_size))
    if len(outside):
        row = outside[0]
        faults.append(
            f"token id {step.token_ids[row]} in row {row}: expected 0 <= id < {limits.vocab_size}"
            f" ({len(outside)} such rows)"
        )
    return faults


def _position_faults(step: Step) -> list[str]:
    starts = np.repeat(step.context_len - step.query_start[:-1], np.diff(step.query_start))
    expected = np.arange(len(step.token_ids)) + starts
    wrong = np.flatnonzero(step.positions != expected)
    if not len(wrong) and (step.context_len >= 0).all():
        return []
    if not len(wrong):
        return [f"context_len {step.context_len.tolist()}: expected none below 0"]
    row = wrong[0]
    return [f"position {step.positions[row]} in row {row}: expected {expected[row]}, the context continued"]


def _want_faults(step: Step) -> list[str]:
    want, tokens = step.want, len(step.token_ids)
    if not len(want) or (want[0] >= 0 and want[-1] < tokens and (np.diff(want) > 0).all()):
        return []
    return [f"want {want.tolist()}: expected ascending rows below {tokens}"]


def _table_faults(step: Step, page_tokens: int, spaces: Mapping[str, SpaceBounds]) -> list[str]:
    faults = []
    if missing := set(spaces) - set(step.page_table):
        faults.append(f"page tables for {sorted(step.page_table)}: {sorted(missing)} missing")
    requests = len(step.context_len)
    for key, bounds in spaces.items():
        table = step.page_table.get(key)
        if table is None:
            continue
        if table.ndim != 2 or len(table) != requests:  # noqa: PLR2004 - a table has two axes
            faults.append(f"page table {key} {table.shape}: expected ({requests}, pages)")
            continue
        for index in range(requests):
            context = int(step.context_len[index])
            end = context + int(step.query_start[index + 1] - step.query_start[index])
            where = f"page table {key}, request {index}"
            faults += [
                f"{where}: {fault}" for fault in _row_faults(table[index], context, end, page_tokens, bounds)
            ]
    return faults


def _row_faults(
    row: NDArray[np.int32], context: int, end: int, page_tokens: int, bounds: SpaceBounds
) -> list[str]:
    pages = -(-end // page_tokens)
    if len(row) < pages:
        return [f"{len(row)} pages: {end} tokens need {pages} of {page_tokens}"]
    faults = []
    used = row[row != 0]
    if len(used) and (used.min() < 0 or used.max() >= bounds.blocks):
        bad = used.min() if used.min() < 0 else used.max()
        faults.append(f"block {bad}: expected 1 <= id < {bounds.blocks}")
    if len(np.unique(used)) != len(used):
        faults.append(f"a block stands twice in {row.tolist()}")
    if (row[pages:] != 0).any():
        # B17: a page that the step does not cover must not reach a kernel.
        faults.append(f"{len(np.flatnonzero(row))} pages: {end} tokens cover {pages}; pad with 0")
    for first, last in (*bounds.reach.needed(context), (context, end)):
        span = row[first // page_tokens : -(-last // page_tokens)]
        if (span == 0).any():
            faults.append(
                f"page {first // page_tokens + int(np.argmin(span != 0))} is padding but read or written"
            )
    return faults


def _slot_faults(step: Step, slots: Mapping[str, int]) -> list[str]:
    faults = []
    if missing := set(slots) - set(step.slots):
        faults.append(f"slots for {sorted(step.slots)}: {sorted(missing)} missing")
    requests = len(step.context_len)
    for name, count in slots.items():
        row = step.slots.get(name)
        if row is None:
            continue
        if row.shape != (requests,):
            faults.append(f"slots of {name} {row.shape}: expected ({requests},), one a request")
            continue
        outside = np.flatnonzero((row < 1) | (row >= count))
        if len(outside):
            request = outside[0]
            faults.append(f"slot {row[request]} of {name}, request {request}: expected 1 <= slot < {count}")
        if len(np.unique(row)) != requests:
            # Live state has one owner (F1).
            faults.append(f"slots of {name}: one stands twice in {row.tolist()}")
    return faults

"""One step's batch: chunks of several requests side by side, as the arrays an executor takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvcontract.contract.executor import Step
from kvcontract.memory.stream import StreamEvent
from kvcontract.pool.request import Chunk


def build_step(
    chunks: Sequence[Chunk],
    *,
    all_rows: Sequence[bool],
    adapters: Sequence[str | None],
) -> Step:
    """Put chunks together.

    Args:
        chunks: at least one, each of another request.
        all_rows: for each chunk, whether the logits of all its rows are wanted, or only where it emits.
        adapters: for each chunk, the name of the request's adapter.
    """
    sizes = np.array([len(chunk.token_ids) for chunk in chunks], np.int64)
    query_start = np.concatenate([[0], np.cumsum(sizes)])
    want = [
        wanted_rows(chunk, all_rows=every) + first
        for chunk, every, first in zip(chunks, all_rows, query_start[:-1], strict=True)
    ]
    return Step(
        token_ids=np.concatenate([chunk.token_ids for chunk in chunks]),
        positions=np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks]),
        query_start=query_start,
        context_len=np.array([chunk.context_len for chunk in chunks], np.int64),
        page_table={space: _table([chunk.pages[space] for chunk in chunks]) for space in chunks[0].pages},
        want=np.concatenate(want),
        slots={group: np.array([c.slots[group] for c in chunks], np.int32) for group in chunks[0].slots},
        snapshots=_snapshots(chunks),
        adapters=tuple(adapters) if any(name is not None for name in adapters) else (),
    )


def _snapshots(chunks: Sequence[Chunk]) -> dict[str, NDArray[np.int64]]:
    """int64[m, 3] of each bounded group: request, position, slot."""
    found: dict[str, list[tuple[int, int, int]]] = {}
    for number, chunk in enumerate(chunks):
        for group, pairs in chunk.emits_at.items():
            found.setdefault(group, []).extend((number, *pair) for pair in pairs)
    return {group: np.array(rows, np.int64) for group, rows in found.items()}


def wanted_rows(chunk: Chunk, *, all_rows: bool) -> NDArray[np.int64]:
    """Rows of a chunk whose logits are wanted, ascending: all, those a token is sampled from, or none."""
    size = len(chunk.token_ids)
    first = 0 if all_rows else size - 1 - chunk.drafts if chunk.emits else size
    return np.arange(first, size)


def _table(pages: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    """int32[b, p], padded with block 0, which is nobody's (B21)."""
    table = np.zeros((len(pages), max(map(len, pages))), np.int32)
    for row, ids in zip(table, pages, strict=True):
        row[: len(ids)] = ids
    return table


def written(device: torch.device) -> StreamEvent | None:
    """When the writes queued on the device so far are done: what reads them waits for it there (C2)."""
    if device.type != "cuda":
        return None
    event: StreamEvent = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch's own stub
    event.record(torch.cuda.current_stream(device))  # type: ignore[attr-defined] # more than is asked of it
    return event

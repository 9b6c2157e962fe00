"""Copies of blocks inside one device: a live slot becomes a snapshot, a snapshot a live slot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from kvcontract.memory.binding import Binding
from kvcontract.memory.device import StreamEvent

Pairs = Sequence[tuple[int, int]]


def copy_slots(
    workers: Sequence[Mapping[str, Binding]], pairs: Mapping[str, Pairs]
) -> tuple[StreamEvent, ...]:
    """Copy blocks, all arenas of each, on every worker.

    On a device the copies stand in the order of its work: behind the step that has written the sources, and
    before the next one, which alone waits for them (F1).

    Args:
        workers: memory of each space by its key, for each worker.
        pairs: (source, target) by space.

    Returns:
        Events of the devices, after which the copies are complete; none where they are already.
    """
    for memory in workers:
        for space, wanted in pairs.items():
            memory[space].copy_blocks(wanted)
    return written(workers, pairs)


def written(workers: Sequence[Mapping[str, Binding]], spaces: Iterable[str]) -> tuple[StreamEvent, ...]:
    """Events after which all that is queued by now has been written in some spaces; none on the host."""
    wanted = list(spaces)
    devices = {memory[space].device for memory in workers for space in wanted}
    events: list[StreamEvent] = []
    for device in sorted(devices, key=str):
        if device.type == "cuda":
            event: StreamEvent = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch's own stub
            event.record(torch.cuda.current_stream(device))  # type: ignore[attr-defined] # see engine/batch
            events.append(event)
    return tuple(events)

"""Copies of blocks inside one device: a live slot becomes a snapshot, a snapshot a live slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    events: list[StreamEvent] = []
    for memory in workers:
        devices = set()
        for space, wanted in pairs.items():
            memory[space].copy_blocks(wanted)
            devices.add(memory[space].device)
        for device in devices:
            if device.type == "cuda":
                event: StreamEvent = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch's own stub
                event.record(torch.cuda.current_stream(device))  # type: ignore[attr-defined] # see engine/batch
                events.append(event)
    return tuple(events)

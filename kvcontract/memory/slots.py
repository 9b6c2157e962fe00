"""Copies of blocks inside one device: a live slot becomes a snapshot, a snapshot a live slot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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
    devices = {str(memory[space].device): memory[space] for memory in workers for space in wanted}
    events = (devices[name].event() for name in sorted(devices))
    return tuple(event for event in events if event is not None)

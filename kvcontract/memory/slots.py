"""Copies of blocks inside one device: a live slot becomes a snapshot, a snapshot a live slot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from kvcontract.contract.model import TOKEN_AXIS
from kvcontract.contract.snapshot import live_key
from kvcontract.memory.binding import Binding
from kvcontract.memory.stream import StreamEvent

Pairs = Sequence[tuple[int, int]]


def copy_blocks(memory: Mapping[str, Binding], copies: Mapping[str, Pairs]) -> None:
    """Make copies that a request asks for, one after the other: one may read what another has written.

    A snapshot in a narrower form is widened on its way to a live slot.

    Args:
        memory: of each space, by its key.
        copies: (source, target) by space; see `Chunk.copies`.
    """
    for space, pairs in copies.items():
        _copy(memory[space], memory[live_key(space)], pairs)


def take_snapshots(
    workers: Sequence[Mapping[str, Binding]], copies: Mapping[str, Pairs]
) -> tuple[StreamEvent, ...]:
    """Copy live slots to snapshots, on every worker, in the form in which they are kept.

    On a device the copies stand in the order of its work: behind the step that has written the sources, and
    before the next one, which alone waits for them (F1).

    Args:
        workers: memory of each space by its key, for each worker.
        copies: (live slot, snapshot) by the snapshots' space.

    Returns:
        Events of the devices, after which the copies are complete; none where they are already.
    """
    for memory in workers:
        for space, pairs in copies.items():
            _copy(memory[live_key(space)], memory[space], pairs)
    return written(workers, copies)


def _copy(source: Binding, target: Binding, pairs: Pairs) -> None:
    if source is target:
        source.copy_blocks(pairs)
        return
    fields = {(field.arena, field.name): field for arena in source.space.arenas for field in arena.fields}
    for name, field in fields.items():
        here, there = source.views[name], target.views[name]
        axis = field.axes.index(TOKEN_AXIS) if TOKEN_AXIS in field.axes else None
        for first, second in pairs:
            _place(there, second, axis, here).copy_(_place(here, first, axis, there))
    source.touched()
    target.touched()


def _place(view: Tensor, number: int, axis: int | None, other: Tensor) -> Tensor:
    """One block; of a ring, which has more rows than the other side, one page of one of its slots."""
    rows = 0 if axis is None else other.shape[axis + 1]
    if axis is None or view.shape[axis + 1] <= rows:
        return view[number]
    slot, page = divmod(number, view.shape[axis + 1] // rows)
    return view[slot].narrow(axis, page * rows, rows)


def written(workers: Sequence[Mapping[str, Binding]], spaces: Iterable[str]) -> tuple[StreamEvent, ...]:
    """Events after which all that is queued by now has been written in some spaces; none on the host."""
    wanted = list(spaces)
    devices = {str(memory[space].device): memory[space] for memory in workers for space in wanted}
    events = (devices[name].event() for name in sorted(devices))
    return tuple(event for event in events if event is not None)

"""Snapshots in a narrower dtype than the state they are of: where they lie, and in which form.

A group that declares `snapshot_dtype` has two spaces: its live slots as declared, and its snapshots, whose
wider fields are narrowed.  What is stored is the snapshot, so the bound that the group states holds for
everything that comes back, from the device too.
"""

from __future__ import annotations

from dataclasses import replace

from kvcontract.contract.dtypes import DTYPE_BITS, WIDER
from kvcontract.contract.layout import Space, layout, space_key
from kvcontract.contract.model import Arena, Group, KvModel

_LIVE, _KEPT = "slots-", "snapshots-"


def narrows(group: Group) -> bool:
    """Whether snapshots of a group are narrower than its state."""
    return group.kind == "bounded" and group.restore == "stored" and group.snapshot_dtype is not None


def kept_key(group: Group) -> str:
    """Key of the space in which what is kept of a group lies."""
    return f"{_KEPT}{group.name}" if narrows(group) else space_key(group)


def live_key(key: str) -> str:
    """Key of the live slots, given that of a group's snapshots."""
    return _LIVE + key.removeprefix(_KEPT) if key.startswith(_KEPT) else key


def narrowed(arena: Arena, group: Group) -> Arena:
    """An arena as it is kept."""
    if not narrows(group):
        return arena
    dtype = str(group.snapshot_dtype)
    fields = tuple(
        field.model_copy(update={"dtype": dtype}) if field.dtype in WIDER.get(dtype, ()) else field
        for field in arena.fields
    )
    return arena.model_copy(update={"fields": fields})


def snapshot_spaces(model: KvModel, worker: int = 0, tp: int = 1) -> tuple[Space, ...]:
    """The spaces of snapshots that are narrower than what they are of; see `layout` for the arguments."""
    found = []
    for group in (group for group in model.groups if narrows(group)):
        arenas = tuple(narrowed(arena, group) for arena in model.arenas if arena.group == group.name)
        alone = model.model_copy(update={"groups": (group,), "arenas": arenas, "repack": None})
        (space,) = layout(alone, worker, tp).spaces
        found.append(replace(space, key=kept_key(group)))
    return tuple(found)


def all_spaces(model: KvModel, worker: int = 0, tp: int = 1) -> tuple[Space, ...]:
    """Every space that needs memory: those of `layout`, and those of narrower snapshots."""
    return (*layout(model, worker, tp).spaces, *snapshot_spaces(model, worker, tp))


def snapshot_faults(model: KvModel, group: Group) -> list[tuple[str, object, str, str]]:
    """What is wrong with how a bounded group narrows its snapshots: name, value, what is allowed, why."""
    faults: list[tuple[str, object, str, str]] = []
    if (group.snapshot_dtype is None) != (group.snapshot_bound is None):
        message = "a narrower snapshot is lossy, and says how much"
        allowed = "a relative error if and only if snapshot_dtype is given"
        faults.append(("snapshot_bound", group.snapshot_bound, allowed, message))
    if group.snapshot_dtype is None or group.snapshot_dtype not in DTYPE_BITS:
        return faults
    own = {field.dtype for arena in model.arenas if arena.group == group.name for field in arena.fields}
    wider = WIDER.get(group.snapshot_dtype, frozenset())
    if not own & wider:
        message = "no field of the group is narrowed by it"
        faults.append(("snapshot_dtype", group.snapshot_dtype, f"narrower than {sorted(own)}", message))
    return faults

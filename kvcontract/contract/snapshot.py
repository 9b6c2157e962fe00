"""What is kept of bounded groups whose snapshots have another form than their live slots.

Two say so.  A group with `snapshot_dtype` keeps its wider fields narrowed: what comes back, from the device
too, is within the bound that it states.  A group with a window is a *ring*: token t lies in row t mod rows of
its slot.  It is kept unrolled, as the pages that the same window has where it is paged, so that both forms of
one model share records and give the same hits.

Such a group has two spaces: its live slots, as declared, and what is kept of them.
"""

from __future__ import annotations

from dataclasses import replace

from kvcontract.contract.dtypes import DTYPE_BITS, WIDER
from kvcontract.contract.layout import Space, layout, space_key
from kvcontract.contract.model import TOKEN_AXIS, Arena, Axes, Group, KvModel, Window

_LIVE, _KEPT, _PAGES = "slots-", "snapshots-", "pages-"


def is_ring(group: Group) -> bool:
    """Whether a group is a window in one slot."""
    return group.kind == "bounded" and group.restore == "stored" and isinstance(group.reach, Window)


def is_paged(group: Group) -> bool:
    """Whether a group is kept in pages, whatever it lives in."""
    return group.kind == "paged" or is_ring(group)


def narrows(group: Group) -> bool:
    """Whether snapshots of a group are narrower than its state."""
    return group.kind == "bounded" and group.restore == "stored" and group.snapshot_dtype is not None


def kept_key(group: Group) -> str:
    """Key of the space in which what is kept of a group lies."""
    if is_ring(group):
        return f"{_PAGES}{group.name}"
    return f"{_KEPT}{group.name}" if narrows(group) else space_key(group)


def live_key(key: str) -> str:
    """Key of the live slots, given that of what is kept of a group."""
    for prefix in (_KEPT, _PAGES):
        if key.startswith(prefix):
            return _LIVE + key.removeprefix(prefix)
    return key


def ring_rows(model: KvModel, group: Group) -> int:
    """Rows of a ring; 0 where its fields do not agree on them."""
    sizes = {
        field.axes.get(TOKEN_AXIS, 0)
        for arena in model.arenas
        if arena.group == group.name
        for field in arena.fields
    }
    return sizes.pop() if len(sizes) == 1 else 0


def as_kept(group: Group) -> Group:
    """A group as its records know it: a ring is the paged window that it unrolls to."""
    return group.model_copy(update={"kind": "paged", "boundary_tokens": None}) if is_ring(group) else group


def kept(arena: Arena, group: Group) -> Arena:
    """An arena as it is kept."""
    return _unrolled(arena) if is_ring(group) else narrowed(arena, group)


def _unrolled(arena: Arena) -> Arena:
    """A ring's arena with one row a token: outermost, unless the fields place it."""
    fields = []
    for field in arena.fields:
        outermost = next(iter(field.axes)) == TOKEN_AXIS
        axes = [(name, 1 if name == TOKEN_AXIS else size) for name, size in field.axes.items()]
        fields.append(field.model_copy(update={"axes": Axes(axes[1:] if outermost else axes)}))
    return arena.model_copy(update={"fields": tuple(fields)})


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
    """The spaces of what is kept in another form than it lives in; see `layout` for the arguments."""
    found = []
    for group in (group for group in model.groups if narrows(group) or is_ring(group)):
        arenas = tuple(kept(arena, group) for arena in model.arenas if arena.group == group.name)
        alone = model.model_copy(update={"groups": (as_kept(group),), "arenas": arenas, "repack": None})
        (space,) = layout(alone, worker, tp).spaces
        found.append(replace(space, key=kept_key(group)))
    return tuple(found)


def all_spaces(model: KvModel, worker: int = 0, tp: int = 1) -> tuple[Space, ...]:
    """Every space that needs memory: those of `layout`, and those of what is kept apart."""
    return (*layout(model, worker, tp).spaces, *snapshot_spaces(model, worker, tp))


def ring_faults(model: KvModel, group: Group) -> list[tuple[str, object, str, str]]:
    """What is wrong with a window that is kept in one slot: path, value, what is allowed, why."""
    if group.kind != "bounded" or not isinstance(group.reach, Window):
        return []
    rows, faults = ring_rows(model, group), list[tuple[str, object, str, str]]()
    least = group.reach.tokens - 1 + model.record_tokens
    if rows < least or rows % model.page_tokens:
        message = (
            f"a window of {group.reach.tokens} tokens is unrolled to records of {model.record_tokens};"
            " all fields have a token axis of so many rows"
        )
        allowed = f"at least {least} rows, a multiple of {model.page_tokens}"
        faults.append(("arenas", rows, allowed, message))
    if group.reach.sink_tokens or group.snapshot_dtype is not None:
        faults.append(
            ("reach", group.reach.key, "no sink, no snapshot_dtype", "a ring forgets its beginning")
        )
    return faults


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

"""Joined fields: one tensor that holds several fields side by side along an axis named after them.

An axis named ``k|v`` of size 2 says that its first element is the field ``k`` and its second ``v``.  So K and
V in one tensor and K and V in two are the same members, and either can be stored as the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from kvcontract.contract.dtypes import DTYPE_BITS
from kvcontract.contract.layout import FieldLayout
from kvcontract.contract.model import TOKEN_AXIS, Arena, Axes, Field

JOINS: Final = "|"


def joint(axes: Iterable[str]) -> str | None:
    """The axis that joins fields; None where there is none."""
    return next((axis for axis in axes if JOINS in axis), None)


def joint_fault(field: Field) -> str | None:
    """What is wrong with a field's joint axis."""
    found = [axis for axis in field.axes if JOINS in axis]
    if not found:
        return None
    names = found[0].split(JOINS)
    if len(found) > 1:
        return f"axes {' and '.join(found)} both join fields; expected one of them"
    if len(set(names)) < len(names) or not all(names) or field.axes[found[0]] != len(names):
        return f"axis {found[0]} of size {field.axes[found[0]]}: expected one for each of distinct names"
    if field.shard_axis == found[0]:
        return f"axis {found[0]} joins fields, so it cannot be the one that workers share out"
    if DTYPE_BITS.get(field.dtype, 8) < 8 and list(field.axes)[-1] == found[0]:  # noqa: PLR2004 - bits of a byte
        return f"axis {found[0]} joins fields inside bytes; elements of {field.dtype} are packed along it"
    return None


@dataclass(frozen=True, slots=True)
class Member:
    """A field, or one of those that a joined field holds.

    Attributes:
        axes: without the joint axis and the token's, which either side may place as it likes.
    """

    name: str
    dtype: str
    axes: Mapping[str, int]
    shard_axis: str | None


def members(field: Field) -> tuple[Member, ...]:
    """What a field holds."""
    along = joint(field.axes)
    axes = Axes((axis, size) for axis, size in field.axes.items() if axis not in (along, TOKEN_AXIS))
    names = along.split(JOINS) if along else [field.name]
    return tuple(Member(name, field.dtype, axes, field.shard_axis) for name in names)


def split(field: FieldLayout) -> tuple[FieldLayout, ...]:
    """Where each member of a field lies."""
    along = joint(field.axes)
    if along is None:
        return (field,)
    at = field.axes.index(along)
    step = field.strides_bytes[at]
    single = replace(
        field,
        axes=field.axes[:at] + field.axes[at + 1 :],
        shape=field.shape[:at] + field.shape[at + 1 :],
        strides_bytes=field.strides_bytes[:at] + field.strides_bytes[at + 1 :],
    )
    return tuple(
        replace(single, name=name, offset_bytes=field.offset_bytes + number * step)
        for number, name in enumerate(along.split(JOINS))
    )


def pairs(
    device: Iterable[Arena], wire: Iterable[Arena]
) -> tuple[list[tuple[str, Member, Member, Field]], list[str]]:
    """Members of the device's arenas and of the wire's that stand for one another.

    They have one name, in arenas of one name, or else in arenas of one group and layer, if it is the only one
    of its name there: programs are compiled by the same rule.

    Returns:
        (name, on the device, on the wire, the wire's field) of each pair; names of those without another.
    """
    ours, theirs = _named(device), _named(wire)
    everything = tuple(ours.items())
    both = sorted(ours.keys() & theirs.keys())
    found = [(".".join(key), ours.pop(key)[1], *theirs.pop(key)[1:]) for key in both]
    for key, (arena, member, field) in sorted(theirs.items()):
        near = [
            mine for mine, (other, own, _) in everything if own.name == member.name and _near(other, arena)
        ]
        if len(near) == 1 and near[0] in ours:
            found.append((".".join(key), ours.pop(near[0])[1], member, field))
            del theirs[key]
    return found, [".".join(key) for key in sorted({*ours, *theirs})]


def _named(arenas: Iterable[Arena]) -> dict[tuple[str, str], tuple[Arena, Member, Field]]:
    return {
        (arena.name, member.name): (arena, member, field)
        for arena in arenas
        for field in arena.fields
        for member in members(field)
    }


def _near(one: Arena, other: Arena) -> bool:
    return one.layer is not None and (one.group, one.layer) == (other.group, other.layer)

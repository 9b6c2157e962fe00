"""Static checks of a declaration: clause functions over the parsed object, all findings at once.

A clause function yields `Found` records; `check_model` adds the clause and the author's line.  Nothing here
stops at the first fault, and nothing here needs a tensor.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from kvcontract.contract.clauses import CLAUSES, clause
from kvcontract.contract.dtypes import DTYPE_BITS, WIDER
from kvcontract.contract.finding import Finding
from kvcontract.contract.layout import layout, tp_faults
from kvcontract.contract.members import joint_fault, pairs
from kvcontract.contract.model import TOKEN_AXIS, Arena, Declared, Field, Full, Group, KvModel, Window
from kvcontract.contract.options import in_words
from kvcontract.contract.revalidate import shown
from kvcontract.contract.snapshot import is_ring, narrows, ring_faults, snapshot_faults
from kvcontract.contract.wire import parts


@dataclass(frozen=True, slots=True)
class Found:
    """What a clause function reports; `at` is the declaration object whose author's line is shown."""

    path: str
    value: Any
    allowed: str
    message: str
    at: Declared


def finding_document(found: Finding) -> dict[str, Any]:
    """A finding with its clause's rule, fix and keeper, as plain JSON."""
    rule = clause(found.clause)
    return {**found.as_json(), "rule": rule.rule, "fix": rule.fix, "who": rule.who}


MAX_PAGE_BYTES: Final = 2**40
"""Bytes of a page, or record, above which a declaration is refused: offsets must fit 64 bits with room."""

ClauseCheck = Callable[[KvModel, int], Iterator[Found]]
_CHECKS: Final[dict[str, ClauseCheck]] = {}


def _checks(clause_id: str) -> Callable[[ClauseCheck], ClauseCheck]:
    def register(function: ClauseCheck) -> ClauseCheck:
        _CHECKS[clause_id] = function
        return function

    return register


def check_model(model: KvModel, *, tp: int = 1) -> tuple[Finding, ...]:
    """Judge what a declaration means.

    Args:
        model: a declaration whose shape pydantic has accepted.
        tp: the degree of tensor parallelism asked for.

    Returns:
        Every finding, in the order of the clauses; empty if all static clauses hold.
    """
    findings: list[Finding] = []
    broken: set[str] = set()
    for rule in CLAUSES:
        if rule.id not in _CHECKS or broken.intersection(rule.requires):
            continue
        found = [
            Finding(rule.id, item.path, item.value, item.allowed, item.message, item.at.where)
            for item in _CHECKS[rule.id](model, tp)
        ]
        if found:
            broken.add(rule.id)
        findings += found
    return tuple(findings)


def static_clauses() -> tuple[str, ...]:
    """Ids of the clauses that `check_model` judges."""
    return tuple(rule.id for rule in CLAUSES if rule.id in _CHECKS)


def shape_findings(error: ValidationError, where: str | None) -> tuple[Finding, ...]:
    """What pydantic refused, as findings of KVC-DECL-04, one per field."""
    return tuple(
        Finding(
            "KVC-DECL-04",
            f"{error.title}.{'.'.join(str(part) for part in item['loc'])}".rstrip("."),
            _input(error, item),
            in_words(item, f"see `kvc explain {error.title}`"),
            item["msg"],
            where,
        )
        for item in error.errors(include_url=False)
    )


def _input(error: ValidationError, item: Any) -> Any:
    if error.title == "Scope":
        return "hidden"  # D4: a salt is a secret
    return None if item["type"] == "missing" else shown(item["input"])


def _fields(arenas: tuple[Arena, ...], root: str = "arenas") -> Iterator[tuple[str, Arena, Field]]:
    for i, arena in enumerate(arenas):
        for j, item in enumerate(arena.fields):
            yield f"{root}[{i}].fields[{j}]", arena, item


def _all_fields(model: KvModel) -> Iterator[tuple[str, Arena, Field]]:
    yield from _fields(model.arenas)
    if model.repack is not None:
        yield from _fields(model.repack.arenas, "repack.arenas")


def _all_arenas(model: KvModel) -> Iterator[tuple[str, Arena]]:
    yield from ((f"arenas[{i}]", arena) for i, arena in enumerate(model.arenas))
    if model.repack is not None:
        yield from ((f"repack.arenas[{i}]", arena) for i, arena in enumerate(model.repack.arenas))


def _kinds(model: KvModel) -> dict[str, str]:
    return {group.name: group.kind for group in model.groups}


def _repeated(names: list[str]) -> list[int]:
    counts = Counter(names)
    return [i for i, name in enumerate(names) if counts[name] > 1 and names.index(name) != i]


def _all_names(model: KvModel) -> Iterator[tuple[str, str, bool, Declared]]:
    """Every name that is declared: path, name, whether it is half of an ``arena/field`` key, and owner."""
    yield "name", model.name, False, model
    yield "numerics", model.numerics, False, model
    for i, group in enumerate(model.groups):
        yield f"groups[{i}].name", group.name, False, group
    for path, arena in _all_arenas(model):
        yield f"{path}.name", arena.name, True, arena
    for path, _, item in _all_fields(model):
        yield f"{path}.name", item.name, True, item
        for axis in item.axes:
            yield f"{path}.axes", axis, False, item


def _spelling(model: KvModel) -> Iterator[Found]:
    for path, name, keyed, owner in _all_names(model):
        if not name or not name.isprintable():
            message = "a name is not empty and has printable characters only"
            yield Found(path, name, "printable text", message, owner)
        elif keyed and "/" in name:
            message = "a conversion's tensors are keyed arena/field, so neither name has a '/'"
            yield Found(path, name, "a name without '/'", message, owner)


def _joints(model: KvModel) -> Iterator[Found]:
    for path, _, item in _all_fields(model):
        fault = joint_fault(item)
        if fault:
            yield Found(f"{path}.axes", dict(item.axes), "one axis such as k|v of size 2", fault, item)


@_checks("KVC-DECL-06")
def _names(model: KvModel, _tp: int) -> Iterator[Found]:
    unspeakable = list(_spelling(model))
    yield from unspeakable
    yield from _joints(model)
    groups = [group.name for group in model.groups]
    arenas = [arena.name for arena in model.arenas]
    for i in _repeated(groups):
        yield Found(
            f"groups[{i}].name", groups[i], "a name used once", "two groups share it", model.groups[i]
        )
    for i in _repeated(arenas):
        yield Found(
            f"arenas[{i}].name", arenas[i], "a name used once", "two arenas share it", model.arenas[i]
        )
    for path, arena in _all_arenas(model):
        if arena.group not in groups:
            known = ", ".join(groups)
            yield Found(f"{path}.group", arena.group, known, "there is no such group", arena)
        names = [item.name for item in arena.fields]
        for j in _repeated(names):
            yield Found(
                f"{path}.fields[{j}].name", names[j], "a name used once", "two fields share it", arena
            )
    for path, arena, item in _all_fields(model):
        names = [other.name for other in arena.fields if other.name != item.name]
        if isinstance(item.scale, str) and item.scale not in names:
            yield Found(
                f"{path}.scale", item.scale, ", ".join(names) or "no other field", "no such field", item
            )
    ids: dict[int, str] = {}
    for part in () if unspeakable or _repeated(groups) else parts(model):
        if part.id in ids:
            message = f"its part number {part.id} collides with that of {ids[part.id]!r}; rename one"
            yield Found("groups", part.name, "names with distinct part numbers", message, model)
        ids[part.id] = part.name


@_checks("KVC-DECL-07")
def _page_size(model: KvModel, _tp: int) -> Iterator[Found]:
    allowed = model.page_tokens_allowed
    if allowed and not model.page_tokens_reason:
        yield Found("page_tokens_reason", "", "a sentence", "an allowed list states its reason", model)
    if allowed and model.page_tokens not in allowed:
        sizes = " or ".join(str(size) for size in allowed)
        yield Found("page_tokens", model.page_tokens, sizes, model.page_tokens_reason or "not gated", model)


@_checks("KVC-DECL-08")
def _granularity(model: KvModel, _tp: int) -> Iterator[Found]:
    if model.record_tokens % model.page_tokens:
        multiple = f"a multiple of {model.page_tokens}"
        yield Found("key_tokens", model.key_tokens, multiple, "a record holds whole pages", model)
    for path, arena in _all_arenas(model):
        if _kinds(model).get(arena.group) == "paged" and model.page_tokens % arena.tokens_per_row:
            message = f"a page of {model.page_tokens} tokens does not hold whole rows"
            yield Found(f"{path}.tokens_per_row", arena.tokens_per_row, "a divisor of it", message, arena)


@_checks("KVC-DECL-09")
def _bytes_kept(model: KvModel, _tp: int) -> Iterator[Found]:
    if not model.groups:
        yield Found("groups", (), "at least one group", "the model keeps nothing", model)
    owners = {arena.group for arena in model.arenas}
    for i, group in enumerate(model.groups):
        if group.name not in owners:
            yield Found(f"groups[{i}]", group.name, "at least one arena", "no arena belongs to it", group)
    for path, arena in _all_arenas(model):
        if not arena.fields:
            yield Found(f"{path}.fields", (), "at least one field", "the arena has no bytes", arena)


def _unserved_group(group: Group) -> Iterator[tuple[str, Any, str]]:
    if group.kind == "static":
        yield "kind", group.kind, "paged or bounded"
    if group.restore == "recomputed":
        yield "restore", group.restore, "stored, or never (then prefix caching is off)"
    if group.optional and group.checkpointable:
        yield "optional", group.optional, "False"
    if group.lookahead_tokens:
        yield "lookahead_tokens", group.lookahead_tokens, "0"
    if group.weights is not None:
        yield "weights", group.weights, "None"


@_checks("KVC-DECL-12")
def _served(model: KvModel, _tp: int) -> Iterator[Found]:
    message = "this version of the runtime does not serve it yet"
    for i, group in enumerate(model.groups):
        for name, value, allowed in _unserved_group(group):
            yield Found(f"groups[{i}].{name}", value, allowed, message, group)
    for i, group in enumerate(model.groups):
        if (narrows(group) or is_ring(group)) and model.repack is not None:
            what = "snapshot_dtype" if narrows(group) else "reach"
            yield Found(f"groups[{i}].{what}", getattr(group, what), "none beside a repack", message, group)
        twins = [item for item in model.groups if item.reach == group.reach and item.kind == "paged"]
        if is_ring(group) and twins:
            yield Found(f"groups[{i}].reach", group.reach.key, "one form of a window", message, group)
    if not any(group.kind == "paged" and group.reach.key == "full" for group in model.groups):
        what = "at least one paged group that reaches back to the first token"
        yield Found("groups", [group.name for group in model.groups], what, message, model)
    for path, arena in _all_arenas(model):
        if arena.tokens_per_row != 1:
            yield Found(f"{path}.tokens_per_row", arena.tokens_per_row, "1", message, arena)


@_checks("KVC-DECL-13")
def _agreement(model: KvModel, _tp: int) -> Iterator[Found]:
    for i, group in enumerate(model.groups):
        if group.kind != "paged" and not isinstance(group.reach, Full | Window):
            message = "only paged groups have such a reach; a bounded one may be a window, as a ring"
            yield Found(f"groups[{i}].reach", group.reach.key, "Full() or Window()", message, group)
        for name in ("boundary_tokens", "snapshot_dtype", "snapshot_bound"):
            if group.kind != "bounded" and getattr(group, name) is not None:
                message = "only bounded groups are taken at boundaries"
                yield Found(f"groups[{i}].{name}", getattr(group, name), "None", message, group)
        if group.kind == "bounded" and group.snapshot_dtype not in {None, *DTYPE_BITS}:
            known = ", ".join(DTYPE_BITS)
            yield Found(f"groups[{i}].snapshot_dtype", group.snapshot_dtype, known, "unknown dtype", group)
        faults = snapshot_faults(model, group) + ring_faults(model, group) if group.kind == "bounded" else []
        for name, value, allowed, message in faults:
            yield Found(f"groups[{i}].{name}", value, allowed, message, group)


@_checks("KVC-LAYOUT-01")
def _dtypes(model: KvModel, _tp: int) -> Iterator[Found]:
    for path, _, item in _all_fields(model):
        bits = DTYPE_BITS.get(item.dtype)
        if bits is None:
            yield Found(f"{path}.dtype", item.dtype, ", ".join(DTYPE_BITS), "unknown dtype", item)
        elif not item.axes:
            yield Found(f"{path}.axes", item.axes, "at least one axis", "a field has a shape", item)
        elif list(item.axes.values())[-1] * bits % 8:
            step = 8 // bits
            message = f"{list(item.axes)[-1]} of {bits}-bit elements does not fill whole bytes"
            yield Found(f"{path}.axes", item.axes, f"a last axis that is a multiple of {step}", message, item)
    yield from _sizes_served(model)


def _sizes_served(model: KvModel) -> Iterator[Found]:
    allowed = f"at most {MAX_PAGE_BYTES:,} B"
    for path, arena in _all_arenas(model):
        for name in ("stride_multiple_bytes", "align_bytes"):
            if getattr(arena, name) > MAX_PAGE_BYTES:
                yield Found(
                    f"{path}.{name}", f"over {MAX_PAGE_BYTES:,}", allowed, "no memory is so wide", arena
                )
    tokens = max(model.page_tokens, model.record_tokens)
    bits = sum(
        math.prod(item.axes.values()) * DTYPE_BITS.get(item.dtype, 0) for _, _, item in _all_fields(model)
    )
    if tokens * bits // 8 > MAX_PAGE_BYTES:
        value = f"over {MAX_PAGE_BYTES:,} B"  # the number itself may be too long to print
        yield Found("arenas", value, allowed, "a page or record of all arenas is beyond any memory", model)


@_checks("KVC-LAYOUT-02")
def _sharding(model: KvModel, tp: int) -> Iterator[Found]:
    sound = True
    for path, _, item in _all_fields(model):
        if item.shard_axis is None:
            continue
        axes = [axis for axis in item.axes if axis != TOKEN_AXIS]
        if item.shard_axis not in axes:
            sound = False
            allowed = ", ".join(axes) or "no axis"
            yield Found(f"{path}.shard_axis", item.shard_axis, allowed, "the field has no such axis", item)
    faults = tp_faults(model, tp) if sound else []
    for fault in faults:
        yield Found("options.tp", tp, "a tp that divides the axis or that it divides", fault, model)


@_checks("KVC-LAYOUT-03")
def _alignment(model: KvModel, _tp: int) -> Iterator[Found]:
    if any(item.shard_axis not in {None, *item.axes} for _, _, item in _all_fields(model)):
        return  # KVC-LAYOUT-02 has said so
    placed = {arena.name: (space, arena) for space in layout(model).spaces for arena in space.arenas}
    for i, declared in enumerate(model.arenas):
        space, arena = placed[declared.name]
        for j, item in enumerate(arena.fields):
            start = arena.offset_bytes + item.offset_bytes
            steps = (
                start,
                item.offset_bytes,
                arena.stride_bytes,
                space.stride_bytes,
                *item.strides_bytes[:-1],
            )
            worst = math.gcd(*steps)
            if worst % item.element_bytes:
                message = f"in a page-first block it lies at multiples of {worst} B only"
                allowed = f"multiples of {item.element_bytes} B"
                yield Found(f"arenas[{i}].fields[{j}]", item.name, allowed, message, declared.fields[j])


@_checks("KVC-LAYOUT-04")
def _token_axis(model: KvModel, _tp: int) -> Iterator[Found]:
    rings = {group.name for group in model.groups if is_ring(group)}
    for path, arena, item in _all_fields(model):
        size = item.axes.get(TOKEN_AXIS)
        if size is None:
            continue
        if arena.arrangement != "rows" and arena.group in rings:
            continue  # KVC-DECL-13 judges its rows
        if arena.arrangement == "rows" or _kinds(model).get(arena.group) != "paged":
            message = "the token axis is outermost in rows and absent in bounded groups"
            yield Found(f"{path}.axes", item.axes, "no token axis", message, item)
        elif size != 1:
            message = "one row has one token; the page size multiplies it"
            yield Found(f"{path}.axes", item.axes, "token of size 1", message, item)


@_checks("KVC-REPACK-01")
def _repack(model: KvModel, _tp: int) -> Iterator[Found]:
    repack = model.repack
    if repack is None:
        return
    if repack.lossless == (repack.bound is not None):
        message = "either values survive, or a bound says how well"
        yield Found("repack.bound", repack.bound, "a bound if and only if not lossless", message, repack)
    if repack.conversion != "derived":
        return
    paired, lonely = pairs(model.arenas, repack.arenas)
    for name in lonely:
        message = f"{name} stands on one side only"
        yield Found("repack.arenas", name, "the same fields on both sides", message, repack)
    for name, ours, theirs, item in paired:
        same = dict(ours.axes) == dict(theirs.axes) and ours.shard_axis == theirs.shard_axis
        if not same or theirs.dtype not in {ours.dtype, *WIDER.get(ours.dtype, ())}:
            allowed = f"{ours.dtype} or wider, {dict(ours.axes)} cut along {ours.shard_axis}, in any order"
            value = f"{theirs.dtype} {dict(theirs.axes)} cut along {theirs.shard_axis}"
            yield Found(f"repack.arenas {name}", value, allowed, "numbers would change", item)

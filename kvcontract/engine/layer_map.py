"""Judges a plugin's map of layers to fields: against its declaration, the model's own cache, bound memory.

Every function returns its faults, one line each; empty if all is well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from kvcontract.contract.errors import require
from kvcontract.contract.executor import Attention, Combined, FieldRef, HfLayers, Recurrent
from kvcontract.contract.layout import FieldLayout, layout, space_key
from kvcontract.contract.model import TOKEN_AXIS, Chunk, Field, Full, Group, KvModel, Reach, Window

Entry = Attention | Recurrent | Combined

# What stands in for which of transformers' own cache layers, by class name; None keeps nothing.
_STAND_INS: Final[Mapping[str, type[Entry] | None]] = {
    "DummyLayer": None,
    "DynamicLayer": Attention,
    "DynamicIndexedLayer": Attention,
    "DynamicSlidingWindowLayer": Attention,
    "LinearAttentionLayer": Recurrent,
    "LinearAttentionAndFullAttentionLayer": Combined,
    "LinearAttentionAndSlidingWindowAttentionLayer": Combined,
}


class LayerMap:
    """A plugin's map beside the declaration whose fields it names.

    Attributes:
        entries: by layer.
        groups: by arena.
    """

    def __init__(self, layers: HfLayers, kv: KvModel) -> None:
        self.entries: dict[int, Entry] = dict(layers.layers)
        groups = {group.name: group for group in kv.groups}
        self.groups = {arena.name: groups[arena.group] for arena in kv.arenas}
        self._kv = kv
        self._arenas = {arena.name: arena for arena in kv.arenas}
        self._fields = {(arena.name, field.name): field for arena in kv.arenas for field in arena.fields}

    @property
    def refs(self) -> set[FieldRef]:
        """Every field that is named."""
        return {ref for entry in self.entries.values() for ref in entry.refs}

    def field(self, ref: FieldRef) -> Field:
        """The declaration of a field."""
        return self._fields[ref]

    def declaration_faults(self, layer_count: int) -> list[str]:
        """Where map and declaration do not fit."""
        faults = [
            f"HfLayers names layer {index}; the model has {layer_count}"
            for index in sorted(self.entries)
            if not 0 <= index < layer_count
        ]
        for index, entry in sorted(self.entries.items()):
            for half in halves(entry):
                faults += self._half_faults(index, half)
            if isinstance(entry, Combined) and entry.attention.index_keys is not None:
                faults.append(f"layer {index}: index keys beside linear attention are not served")
        return faults

    def _half_faults(self, index: int, half: Attention | Recurrent) -> Iterator[str]:
        known = [ref for ref in half.refs if ref in self._fields]
        for ref in half.refs:
            where = f"layer {index}, {ref[0]}.{ref[1]}"
            if ref not in self._fields:
                yield f"{where}: not declared"
                continue
            if self._fields[ref].scale is not None:
                yield f"{where}: scaled values need the plugin's own executor"
            rules = self._row_faults if isinstance(half, Attention) else self._slot_faults
            yield from (f"{where}: {fault}" for fault in rules(ref))
        if isinstance(half, Attention):
            if len({self.groups[ref[0]].reach for ref in known}) > 1:
                yield f"layer {index}: its fields belong to groups of different reach"
            return
        if not half.refs:
            yield f"layer {index}: neither state nor conv is given"
        if len({self.groups[ref[0]].name for ref in known}) > 1:
            yield f"layer {index}: its state belongs to several groups"
        if len({list(self._fields[ref].axes.values())[-1] for ref in half.conv if ref in known}) > 1:
            yield f"layer {index}: the fields of its convolution have different numbers of columns"

    def _row_faults(self, ref: FieldRef) -> Iterator[str]:
        """Why a field cannot hold rows of attention."""
        group, arena = self.groups[ref[0]], self._arenas[ref[0]]
        if group.kind != "paged":
            yield f"attention rows in the {group.kind} group {group.name}"
        if isinstance(group.reach, Window) and group.reach.sink_tokens:
            yield "a window with sink tokens is not served"
        if arena.tokens_per_row != 1:
            yield f"{arena.tokens_per_row} tokens a row, expected 1"

    def _slot_faults(self, ref: FieldRef) -> Iterator[str]:
        """Why a field cannot hold linear-attention state."""
        group = self.groups[ref[0]]
        if group.kind != "bounded":
            yield f"linear-attention state in the {group.kind} group {group.name}"

    def kind_faults(self, config: Any) -> list[str]:
        """Where the model's own cache would keep other state than the map says.

        Args:
            config: the transformers config of the decoder.
        """
        own = require("transformers", "hf").DynamicCache(config=config).layers
        return [
            f"layer {index} {fault}"
            for index, layer in enumerate(own)
            for fault in self._layer_faults(self.entries.get(index), layer)
        ]

    def _layer_faults(self, entry: Entry | None, layer: Any) -> Iterator[str]:
        kind = type(layer).__name__
        if kind not in _STAND_INS:
            yield f"keeps the state of a {kind}: served are {sorted(_STAND_INS)}"
            return
        expected = _STAND_INS[kind]
        if expected is None:
            if entry is not None:
                yield "keeps nothing of its own, but HfLayers maps it"
            return
        if entry is None:
            yield f"keeps the state of a {kind}, but HfLayers leaves it out"
            return
        if not isinstance(entry, expected):
            yield f"keeps the state of a {kind}, which is {expected.__name__}, not {type(entry).__name__}"
            return
        states = getattr(layer, "number_of_states", 1)
        if states != 1:
            yield f"keeps {states} linear-attention states: one is served"
        for half in halves(entry):
            if isinstance(half, Attention) and half.keys[0] in self.groups:
                yield from _reach_faults(self.groups[half.keys[0]], getattr(layer, "sliding_window", None))

    def view_faults(self, views: Mapping[FieldRef, Tensor], device: torch.device) -> list[str]:
        """Why memory cannot be bound: a view is missing, or has another shape, dtype, device or length."""
        declared = {
            (field.arena, field.name): field
            for space in layout(self._kv).spaces
            for arena in space.arenas
            for field in arena.fields
        }
        found = self.refs & set(views)
        faults = [f"{arena}.{name}: no view" for arena, name in sorted(self.refs - found)]
        for ref in sorted(found):
            faults += _view_faults(views[ref], declared[ref], device)
        return faults + self._size_faults({ref: views[ref] for ref in found})

    def _size_faults(self, views: Mapping[FieldRef, Tensor]) -> list[str]:
        """Arenas of one space share block ids, so all must have as many blocks."""
        blocks: dict[str, dict[int, list[str]]] = {}
        for (arena, name), view in views.items():
            of = blocks.setdefault(space_key(self.groups[arena]), {})
            of.setdefault(len(view), []).append(f"{arena}.{name}")
        return [
            f"space {key}: fields of different numbers of blocks, "
            + ", ".join(f"{count} in {names[0]}" for count, names in sorted(found.items()))
            for key, found in blocks.items()
            if len(found) > 1
        ]


def halves(entry: Entry) -> tuple[Attention | Recurrent, ...]:
    """What an entry consists of."""
    return (entry.attention, entry.recurrent) if isinstance(entry, Combined) else (entry,)


def _reach_faults(group: Group, window: int | None) -> Iterator[str]:
    """A group may keep more than the model reads back, never less."""
    reach: Reach = group.reach
    kept = reach.tokens if isinstance(reach, Window | Chunk) else None
    if isinstance(reach, Full) or kept == window:
        return
    reads = "all earlier tokens" if window is None else f"a window of {window} tokens"
    yield f"reads {reads}; group {group.name} declares {reach.kind} of {kept}"


def _view_faults(view: Tensor, field: FieldLayout, device: torch.device) -> Iterator[str]:
    where = f"{field.arena}.{field.name}"
    sizes = dict(zip(field.axes, field.shape, strict=True))
    tokens = [sizes.pop(TOKEN_AXIS)] if TOKEN_AXIS in sizes else []
    expected = (*tokens, *sizes.values())
    if tuple(view.shape[1:]) != expected:
        unit = "blocks" if tokens else "slots"
        yield f"{where}: view of {list(view.shape)}, expected [{unit}, {', '.join(map(str, expected))}]"
    if str(view.dtype) != f"torch.{field.dtype}":
        yield f"{where}: view of {view.dtype}, declared {field.dtype}"
    if view.device != device:
        yield f"{where}: view on {view.device}, the model on {device}"

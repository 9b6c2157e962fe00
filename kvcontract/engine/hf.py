"""The generic executor: any Hugging Face causal model over our arenas, given a map of its layers.

One request is one forward pass: padding requests to one length would change bits, and break recurrent layers.
Positions are the executor's own; a cache of some layer kinds knows no length.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor, nn

from kvcontract.contract.errors import PluginFault, UsageFault, require
from kvcontract.contract.executor import Attention, FieldRef, HfLayers, Limits, Step, StepOutput
from kvcontract.contract.layout import FieldLayout, layout, space_key
from kvcontract.contract.model import TOKEN_AXIS, Chunk, Full, Group, KvModel, Reach, Window
from kvcontract.engine.arena_cache import ArenaField, IndexedLayer, PagedLayer, Rows, UnmappedLayer
from kvcontract.engine.lora import Lora, read_lora
from kvcontract.engine.step_check import SpaceBounds, check_step

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# The kinds of transformers' own cache layers, by class name, that a paged layer stands in for.
_SERVED_KINDS: Final = frozenset({"DynamicLayer", "DynamicIndexedLayer", "DynamicSlidingWindowLayer"})


class HfExecutor:
    """Implements `Executor` of `kvcontract.contract.executor` with an unmodified Hugging Face model.

    It implements `TakesAdapters` too: one request is one pass, so an adapter is there for one pass.

    Args:
        model: a causal language model in eval mode.
        layers: where each layer's state lives.
        kv: the declaration of that state.
        max_requests: requests in one step.
        max_tokens: tokens in one step.

    Raises:
        PluginFault: map, declaration and model do not fit together; every misfit is named.
        UsageFault: the model is in training mode.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: HfLayers,
        kv: KvModel,
        *,
        max_requests: int = 64,
        max_tokens: int = 8192,
    ) -> None:
        if model.training:
            raise UsageFault(
                "the model is in training mode: dropout would change every run; call model.eval()"
            )
        self._model = cast("Any", model)
        self._kv = kv
        self._map = dict(layers.layers)
        self._config = self._model.config.get_text_config(decoder=True)
        self._layer_count = int(self._config.num_hidden_layers)
        self._limits = Limits(
            max_requests=max_requests,
            max_tokens=max_tokens,
            max_context_tokens=int(self._config.max_position_embeddings),
            vocab_size=int(self._model.get_output_embeddings().weight.shape[0]),
        )
        parameters = inspect.signature(self._model.forward).parameters
        # Renamed in transformers 5; the old name still works there, with a deprecation.
        self._cache_keyword = "cache" if "cache" in parameters else "past_key_values"
        self._slices_logits = "logits_to_keep" in parameters
        self._groups = _groups_by_arena(kv)
        self._fields: dict[FieldRef, ArenaField] = {}
        self._spaces: dict[str, SpaceBounds] = {}
        self._adapters: dict[str, Lora] = {}
        faults = [*_map_faults(self._map, kv, self._layer_count), *self._kind_faults()]
        if faults:
            raise PluginFault("the generic executor cannot serve this model: " + "; ".join(faults))

    @property
    def limits(self) -> Limits:
        """What one step can take."""
        return self._limits

    def bind(self, views: Mapping[FieldRef, Tensor]) -> None:
        """Receive the arenas: per field a tensor [blocks, tokens, ...] with the field's axes in order.

        Raises:
            UsageFault: a view is missing, or has another shape, dtype or device; all are named.
        """
        device = next(self._model.parameters()).device
        declared = {
            (field.arena, field.name): field
            for space in layout(self._kv).spaces
            for arena in space.arenas
            for field in arena.fields
        }
        needed = {ref for entry in self._map.values() for ref in _refs(entry)}
        faults = [f"{arena}.{name}: no view" for arena, name in sorted(needed - set(views))]
        for ref in sorted(needed & set(views)):
            faults += _view_faults(views[ref], declared[ref], device)
        faults += _size_faults(self._kv, {ref: views[ref] for ref in needed & set(views)})
        if faults:
            raise UsageFault("cannot bind: " + "; ".join(faults))
        fields = {(arena.name, field.name): field for arena in self._kv.arenas for field in arena.fields}
        self._fields = {ref: ArenaField(views[ref], fields[ref]) for ref in needed}
        self._spaces = {
            space_key(group): SpaceBounds(group.reach, len(views[ref]))
            for ref in needed
            for group in [self._groups[ref[0]]]
        }

    def read_adapter(self, folder: Path) -> Lora:
        """Read a LoRA adapter in the layout of PEFT: adapter_config.json, adapter_model.safetensors.

        Raises:
            UsageFault: it does not fit the model, or asks for what is not served; all is named.
        """
        return read_lora(folder, self._model)

    def load_adapter(self, name: str, adapter: Lora) -> None:
        """Serve an adapter under a name."""
        self._adapters[name] = adapter

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter."""
        del self._adapters[name]

    @torch.no_grad()
    def forward(self, step: Step) -> StepOutput:
        """Run one step, request by request.

        Raises:
            UsageFault: nothing is bound.
            InternalFault: the step does not fit the model, its pages or the limits; every fault is named.
        """
        if not self._fields:
            raise UsageFault("forward before bind: hand the arenas over first")
        tables = {key: step.page_table[key] for key in self._spaces if key in step.page_table}
        check_step(
            step,
            limits=self._limits,
            page_tokens=self._kv.page_tokens,
            spaces=self._spaces,
            adapters=self._adapters,
        )
        found = []
        for index in range(len(step.context_len)):
            begin, end = int(step.query_start[index]), int(step.query_start[index + 1])
            wanted = step.want[(step.want >= begin) & (step.want < end)] - begin
            pages = {key: table[index] for key, table in tables.items()}
            cache = self._cache(pages, int(step.context_len[index]), end - begin)
            adapter = step.adapters[index] if step.adapters else None
            with (
                contextlib.nullcontext() if adapter is None else self._adapters[adapter].applied(self._model)
            ):
                found.append(self._run(step.token_ids[begin:end], step.positions[begin:end], wanted, cache))
        return StepOutput(torch.cat(found))

    def _run(
        self, token_ids: NDArray[np.int64], positions: NDArray[np.int64], want: NDArray[np.int64], cache: Any
    ) -> Tensor:
        """Logits [len(want), vocab] of one request."""
        device = next(self._model.parameters()).device
        rows = torch.from_numpy(want).to(device)
        arguments: dict[str, Any] = {self._cache_keyword: cache, "use_cache": True}
        if self._slices_logits:
            arguments["logits_to_keep"] = rows
        output = self._model(
            input_ids=torch.from_numpy(token_ids).to(device).unsqueeze(0),
            position_ids=torch.from_numpy(positions).to(device).unsqueeze(0),
            **arguments,
        )
        logits: Tensor = output.logits[0]
        return logits if self._slices_logits else logits[rows]

    def _cache(self, pages: Mapping[str, NDArray[np.int32]], context_len: int, tokens: int) -> Any:
        """A Hugging Face cache over one request's pages, good for one forward pass."""
        rows = {
            key: Rows.place(
                pages[key],
                context_len=context_len,
                tokens=tokens,
                reach=bounds.reach,
                page_tokens=self._kv.page_tokens,
                device=next(iter(self._fields.values())).device,
            )
            for key, bounds in self._spaces.items()
        }
        layers = [
            self._layer(self._map[index], rows) if index in self._map else UnmappedLayer(index)
            for index in range(self._layer_count)
        ]
        return require("transformers.cache_utils", "hf").Cache(layers=layers)

    def _layer(self, entry: Attention, rows: Mapping[str, Rows]) -> PagedLayer:
        group = self._groups[entry.keys[0]]
        own = rows[space_key(group)], group.reach, self._fields[entry.keys], self._fields[entry.values]
        if entry.index_keys is None:
            return PagedLayer(*own)
        index_rows = rows[space_key(self._groups[entry.index_keys[0]])]
        return IndexedLayer(*own, index_rows=index_rows, index_keys=self._fields[entry.index_keys])

    def _kind_faults(self) -> list[str]:
        """Where the model's own cache would keep other state than the map says."""
        own = require("transformers", "hf").DynamicCache(config=self._config).layers
        faults = []
        for index, layer in enumerate(own):
            entry, kind = self._map.get(index), type(layer).__name__
            if kind == "DummyLayer":
                continue
            if kind not in _SERVED_KINDS:
                faults.append(
                    f"layer {index} keeps the state of a {kind}: served are {sorted(_SERVED_KINDS)}"
                )
            elif entry is None:
                faults.append(f"layer {index} keeps the state of a {kind}, but HfLayers leaves it out")
            elif entry.keys[0] in self._groups:
                window = getattr(layer, "sliding_window", None)
                faults += _reach_faults(index, self._groups[entry.keys[0]], window)
        return faults


def _groups_by_arena(kv: KvModel) -> dict[str, Group]:
    groups = {group.name: group for group in kv.groups}
    return {arena.name: groups[arena.group] for arena in kv.arenas}


def _refs(entry: Attention) -> tuple[FieldRef, ...]:
    return tuple(ref for ref in (entry.keys, entry.values, entry.index_keys) if ref is not None)


def _map_faults(layers: Mapping[int, Attention], kv: KvModel, layer_count: int) -> list[str]:
    """Where map and declaration do not fit."""
    arenas = {arena.name: arena for arena in kv.arenas}
    groups = _groups_by_arena(kv)
    fields = {(arena.name, field.name): field for arena in kv.arenas for field in arena.fields}
    faults = [
        f"HfLayers names layer {index}; the model has {layer_count}"
        for index in sorted(layers)
        if not 0 <= index < layer_count
    ]
    for index, entry in sorted(layers.items()):
        for ref in _refs(entry):
            where = f"layer {index}, {ref[0]}.{ref[1]}"
            if ref not in fields:
                faults.append(f"{where}: not declared")
                continue
            group = groups[ref[0]]
            if group.kind != "paged":
                faults.append(f"{where}: attention rows in the {group.kind} group {group.name}")
            if isinstance(group.reach, Window) and group.reach.sink_tokens:
                faults.append(f"{where}: a window with sink tokens is not served")
            if arenas[ref[0]].tokens_per_row != 1:
                faults.append(f"{where}: {arenas[ref[0]].tokens_per_row} tokens a row, expected 1")
            if fields[ref].scale is not None:
                faults.append(f"{where}: scaled values need the plugin's own executor")
        if len({groups[ref[0]].reach for ref in _refs(entry) if ref[0] in groups}) > 1:
            faults.append(f"layer {index}: its fields belong to groups of different reach")
    return faults


def _reach_faults(index: int, group: Group, window: int | None) -> list[str]:
    """A group may keep more than the model reads back, never less."""
    reach: Reach = group.reach
    kept = reach.tokens if isinstance(reach, Window | Chunk) else None
    if isinstance(reach, Full) or kept == window:
        return []
    reads = "all earlier tokens" if window is None else f"a window of {window} tokens"
    return [f"layer {index} reads {reads}; group {group.name} declares {reach.kind} of {kept}"]


def _view_faults(view: Tensor, field: FieldLayout, device: torch.device) -> list[str]:
    where = f"{field.arena}.{field.name}"
    sizes = dict(zip(field.axes, field.shape, strict=True))
    expected = (sizes.pop(TOKEN_AXIS), *sizes.values())
    faults = []
    if tuple(view.shape[1:]) != expected:
        faults.append(
            f"{where}: view of {list(view.shape)}, expected [blocks, {', '.join(map(str, expected))}]"
        )
    if str(view.dtype) != f"torch.{field.dtype}":
        faults.append(f"{where}: view of {view.dtype}, declared {field.dtype}")
    if view.device != device:
        faults.append(f"{where}: view on {view.device}, the model on {device}")
    return faults


def _size_faults(kv: KvModel, views: Mapping[FieldRef, Tensor]) -> list[str]:
    """Arenas of one space share block ids, so all must have as many blocks."""
    groups = _groups_by_arena(kv)
    blocks: dict[str, dict[int, list[str]]] = {}
    for (arena, name), view in views.items():
        blocks.setdefault(space_key(groups[arena]), {}).setdefault(len(view), []).append(f"{arena}.{name}")
    return [
        f"space {key}: fields of different numbers of blocks, "
        + ", ".join(f"{count} in {names[0]}" for count, names in sorted(found.items()))
        for key, found in blocks.items()
        if len(found) > 1
    ]

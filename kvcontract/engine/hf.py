"""The generic executor: any Hugging Face causal model over our arenas, given a map of its layers.

One request is one forward pass: padding requests to one length would change bits, and break recurrent layers.
Positions are the executor's own; a cache of some layer kinds knows no length.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from kvcontract.contract.errors import PluginFault, UsageFault, require
from kvcontract.contract.executor import (
    Attention,
    Combined,
    FieldRef,
    HfLayers,
    Limits,
    Recurrent,
    Step,
    StepOutput,
)
from kvcontract.contract.layout import space_key
from kvcontract.contract.model import KvModel, Reach
from kvcontract.engine.arena_cache import ArenaField, IndexedLayer, PagedLayer, Rows, UnmappedLayer
from kvcontract.engine.layer_map import LayerMap
from kvcontract.engine.lora import Lora, read_lora
from kvcontract.engine.slot_cache import CombinedLayer, Slot, SlotLayer
from kvcontract.engine.step_check import SpaceBounds, check_step

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


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
        self._map = LayerMap(layers, kv)
        config = self._model.config.get_text_config(decoder=True)
        self._layer_count = int(config.num_hidden_layers)
        self._limits = Limits(
            max_requests=max_requests,
            max_tokens=max_tokens,
            max_context_tokens=int(config.max_position_embeddings),
            vocab_size=int(self._model.get_output_embeddings().weight.shape[0]),
            placeholder_ids=layers.placeholder_ids,
        )
        parameters = inspect.signature(self._model.forward).parameters
        # Renamed in transformers 5; the old name still works there, with a deprecation.
        self._cache_keyword = "cache" if "cache" in parameters else "past_key_values"
        self._slices_logits = "logits_to_keep" in parameters
        self._views: dict[FieldRef, Tensor] = {}
        self._fields: dict[FieldRef, ArenaField] = {}
        self._spaces: dict[str, SpaceBounds] = {}
        self._slots: dict[str, int] = {}
        self._adapters: dict[str, Lora] = {}
        faults = [*self._map.declaration_faults(self._layer_count), *self._map.kind_faults(config)]
        if faults:
            raise PluginFault("the generic executor cannot serve this model: " + "; ".join(faults))

    @property
    def limits(self) -> Limits:
        """What one step can take."""
        return self._limits

    def bind(self, views: Mapping[FieldRef, Tensor]) -> None:
        """Receive the arenas: per field a tensor [blocks, tokens, ...] with the field's axes in order.

        Fields of bounded groups are [slots, ...].

        Raises:
            UsageFault: a view is missing, or has another shape, dtype or device; all are named.
        """
        faults = self._map.view_faults(views, next(self._model.parameters()).device)
        if faults:
            raise UsageFault("cannot bind: " + "; ".join(faults))
        self._views = {ref: views[ref] for ref in self._map.refs}
        groups = {ref: self._map.groups[ref[0]] for ref in self._views}
        paged = {ref: group for ref, group in groups.items() if group.kind == "paged"}
        self._fields = {ref: ArenaField(views[ref], self._map.field(ref), ref[0]) for ref in paged}
        self._spaces = {
            space_key(group): SpaceBounds(group.reach, len(views[ref])) for ref, group in paged.items()
        }
        self._slots = {group.name: len(views[ref]) for ref, group in groups.items() if ref not in paged}

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

        A slot is written once its request's pass has succeeded.

        Raises:
            UsageFault: nothing is bound.
            InternalFault: the step does not fit the model, its memory or the limits; every fault is named.
            PluginFault: a layer keeps other state than is declared.
        """
        if not self._views:
            raise UsageFault("forward before bind: hand the arenas over first")
        check_step(
            step,
            limits=self._limits,
            page_tokens=self._kv.page_tokens,
            spaces=self._spaces,
            slots=self._slots,
            adapters=self._adapters,
        )
        found = []
        for index in range(len(step.context_len)):
            begin, end = int(step.query_start[index]), int(step.query_start[index + 1])
            wanted = step.want[(step.want >= begin) & (step.want < end)] - begin
            cache = self._cache(step, index)
            adapter = step.adapters[index] if step.adapters else None
            with (
                contextlib.nullcontext() if adapter is None else self._adapters[adapter].applied(self._model)
            ):
                found.append(self._run(step.token_ids[begin:end], step.positions[begin:end], wanted, cache))
            for layer in cache.layers:
                if isinstance(layer, SlotLayer):
                    layer.store()
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

    def _cache(self, step: Step, index: int) -> Any:
        """A Hugging Face cache over one request's pages and slots, good for one forward pass."""
        context_len = int(step.context_len[index])
        rows = {
            key: Rows.place(
                step.page_table[key][index],
                context_len=context_len,
                tokens=int(step.query_start[index + 1] - step.query_start[index]),
                reach=bounds.reach,
                page_tokens=self._kv.page_tokens,
                device=next(iter(self._views.values())).device,
            )
            for key, bounds in self._spaces.items()
        }
        slots = {name: int(step.slots[name][index]) for name in self._slots}
        layers = []
        for number in range(self._layer_count):
            match self._map.entries.get(number):
                case None:
                    layers.append(UnmappedLayer(number))
                case Attention() as entry:
                    layers.append(self._paged(entry, rows))
                case Recurrent() as entry:
                    layers.append(SlotLayer(self._slot(number, entry, slots), context_len))
                case Combined(attention, recurrent):
                    own = self._rows(attention, rows)
                    layers.append(CombinedLayer(self._slot(number, recurrent, slots), *own))
        return require("transformers.cache_utils", "hf").Cache(layers=layers)

    def _rows(self, entry: Attention, rows: Mapping[str, Rows]) -> tuple[Rows, Reach, ArenaField, ArenaField]:
        group = self._map.groups[entry.keys[0]]
        return rows[space_key(group)], group.reach, self._fields[entry.keys], self._fields[entry.values]

    def _paged(self, entry: Attention, rows: Mapping[str, Rows]) -> PagedLayer:
        own = self._rows(entry, rows)
        if entry.index_keys is None:
            return PagedLayer(*own)
        index_rows = rows[space_key(self._map.groups[entry.index_keys[0]])]
        return IndexedLayer(*own, index_rows=index_rows, index_keys=self._fields[entry.index_keys])

    def _slot(self, layer: int, entry: Recurrent, slots: Mapping[str, int]) -> Slot:
        (name,) = {self._map.groups[ref[0]].name for ref in entry.refs}
        return Slot(
            layer,
            state=None if entry.state is None else self._views[entry.state][slots[name]],
            conv=tuple(self._views[ref][slots[name]] for ref in entry.conv),
            dtype=self._model.get_input_embeddings().weight.dtype,
        )

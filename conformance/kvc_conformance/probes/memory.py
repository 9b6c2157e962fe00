"""Probes on memory: fill arenas through their views, save, restore, and hand back what then lies there."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvc_conformance.channel import Message
from kvc_conformance.child import Session
from kvc_conformance.probes.declare import open_launch
from kvcontract.contract.errors import KvContractError, PluginFault
from kvcontract.contract.layout import Layout, Space, layout, with_page_tokens
from kvcontract.contract.model import KvModel
from kvcontract.contract.wire import parts, wire_record
from kvcontract.core.lane import InlineLane
from kvcontract.memory.binding import Binding
from kvcontract.memory.repack import resolve
from kvcontract.store.worker import Worker
from kvcontract.tiers.base import Buffers, Lease, SaveClass, key_bytes
from kvcontract.tiers.dram import DramTier
from kvcontract.tiers.frame import header_bytes

CALM_S = 60.0


def declared(session: Session, page_tokens: int | None, record_pages: int = 1) -> KvModel:
    """The session's declaration, at other sizes of pages and records if asked."""
    model = open_launch(session, None).model
    if page_tokens is None:
        return model
    return with_page_tokens(model, page_tokens, record_pages * page_tokens if record_pages > 1 else None)


def write(session: Session, arguments: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Message:
    """Allocate page-first memory for one worker, write fields through their views, return the bytes.

    Arguments: ``page_tokens``, ``tp``, ``worker``.  Arrays: ``arena|field`` uint8[blocks, *axes, width].
    Returns ``image`` uint8[blocks, stride] and the stride.
    """
    model = declared(session, arguments["page_tokens"])
    space = _only_space(layout(model, arguments["worker"], arguments["tp"]))
    blocks = len(next(iter(arrays.values())))
    binding = Binding.allocate(space, blocks, session.job["device"])
    _fill(binding, arrays, range(blocks))
    return Message({"stride": space.stride_bytes}, {"image": _image(binding)})


def roundtrip(session: Session, arguments: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Message:
    """Write pages, save them as records, poison the memory, restore them elsewhere.

    Arguments: ``page_tokens``, ``record_pages``, ``sources``, ``targets`` (block ids), ``blocks``,
    ``max_tp``, ``poison`` (a byte), ``layer_first``.  Arrays: ``arena|field`` uint8[n, *axes, width].
    Returns ``after_save`` and ``restored`` (uint8[blocks, stride]) and ``wire_SHARD`` (uint8[n, payload]).
    """
    model = declared(session, arguments["page_tokens"], arguments["record_pages"])
    laid = layout(model)
    space, part = _only_space(laid), parts(model)[0]
    memory = _Memory(space, arguments["blocks"], session.job["device"], layer_first=arguments["layer_first"])
    lane = InlineLane()
    worker = Worker(model, laid, {space.key: memory.binding}, max_tp=arguments["max_tp"], lane=lane)
    tier = DramTier(1 << 28, lane=lane)
    shape = (-1, model.record_pages) if model.record_pages > 1 else (-1,)
    sources, targets = (np.array(arguments[name]).reshape(shape) for name in ("sources", "targets"))
    page_keys = np.arange(1, 2 * len(sources) + 1, dtype=np.uint64).reshape(-1, 2)
    deadline = time.monotonic() + CALM_S

    memory.poison(arguments["poison"])
    _fill(memory.binding, arrays, sources.ravel().tolist())
    before = memory.image()
    saved = worker.save(tier, part, page_keys, sources, SaveClass.CACHEABLE, deadline).wait(CALM_S)
    after_save = memory.image()
    keys = worker.record_keys(part, page_keys)
    lease = tier.lookup(keys, deadline).wait(CALM_S)
    with lease:
        wire = _wire(model, tier, lease, len(sources), worker.shards(part))
        memory.poison(arguments["poison"])
        rows = np.arange(len(keys))
        loaded = worker.load(tier, lease, rows, part, page_keys, targets, deadline).wait(CALM_S)
    faults = [str(fault) for fault in worker.faults]
    body = {
        "saved": saved.tolist(),
        "loaded": loaded.tolist(),
        "present": lease.present.tolist(),
        "source_changed": bool((before != after_save).any()),
        "faults": faults,
        "distinct_keys": len(set(key_bytes(keys))),
    }
    worker.close(deadline)
    tier.close(deadline)
    return Message(body, {"after_save": after_save, "restored": memory.image(), **wire})


def importable(session: Session, arguments: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Message:
    """Resolve the names of a conversion; ``refused``: why each that cannot be found cannot."""
    del arguments, arrays
    repack = declared(session, None).repack
    if repack is None or isinstance(repack.conversion, str):
        return Message({"callables": False})
    refused = []
    for name in (repack.conversion.to_wire, repack.conversion.from_wire):
        try:
            resolve(name)
        except PluginFault as error:
            refused.append(str(error))
    return Message({"callables": True, "refused": refused})


def conversion(session: Session, arguments: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Message:
    """Call a conversion by itself: many times to the wire and back, into memory with two kinds of poison.

    Arguments: ``page_tokens``, ``repeats``.  Arrays: ``arena|field`` uint8[1, *axes, width].
    Returns, as bytes of all fields, ``source`` and ``source_after`` uint8[n], ``wire`` and ``back``
    uint8[repeats, n].
    """
    model = declared(session, arguments["page_tokens"])
    repack = model.repack
    if repack is None or isinstance(repack.conversion, str):
        return Message({"callables": False})
    to_wire, from_wire = resolve(repack.conversion.to_wire), resolve(repack.conversion.from_wire)
    device = _views(layout(model), arrays)
    wired = model.model_copy(update={"arenas": repack.arenas, "repack": None})
    source = _bytes(device)
    wires, backs = [], []
    for number in range(arguments["repeats"]):
        poison = 0xFF if number % 2 else 0x00
        wire = _views(layout(wired), None, poison)
        to_wire(device, wire)
        back = _views(layout(model), None, poison)
        from_wire({name: view.clone() for name, view in wire.items()}, back)
        wires.append(_bytes(wire))
        backs.append(_bytes(back))
    found = {"source": source, "source_after": _bytes(device), "wire": np.stack(wires)}
    return Message({"callables": True}, {**found, "back": np.stack(backs)})


def refusals(session: Session, arguments: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Message:
    """Try to bind memory that does not fit; what each attempt was answered with.

    Arguments: ``blocks``.  Returns ``answers``: attempt -> message, or null if it was accepted.
    """
    del arrays
    space = _only_space(layout(declared(session, None)))
    blocks = int(arguments["blocks"])
    last = space.arenas[-1]
    whole = {arena.name: _raw(blocks, arena.stride_bytes, arena.align_bytes) for arena in space.arenas}
    attempts = {
        "fits": whole,
        "a page short": {**whole, last.name: _raw(blocks - 1, last.stride_bytes, last.align_bytes)},
        "a block too narrow": {**whole, last.name: _raw(blocks, last.content_bytes - 1, last.align_bytes)},
    }
    first = space.arenas[0]
    if first is not last and first.stride_bytes == last.stride_bytes:
        attempts["two arenas in one memory"] = {**whole, last.name: whole[first.name]}
    answers = {what: _refusal(space, given, blocks) for what, given in attempts.items()}
    return Message({"answers": answers, "arena": last.name})


def _refusal(space: Space, given: Mapping[str, torch.Tensor], blocks: int) -> str | None:
    try:
        Binding.of(space, given, blocks)
    except KvContractError as error:
        return str(error)
    return None


class _Memory:
    """Blocks of one space, page-first or one tensor an arena with a guard block at either end."""

    def __init__(self, space: Space, blocks: int, device: str, *, layer_first: bool) -> None:
        self._guarded: dict[str, torch.Tensor] = {}
        self._space = space
        if layer_first:
            self._guarded = {
                arena.name: _raw(blocks + 2, arena.stride_bytes, arena.align_bytes, device)
                for arena in space.arenas
            }
            self.binding = Binding.of(space, {name: raw[1:-1] for name, raw in self._guarded.items()})
        else:
            self.binding = Binding.allocate(space, blocks, device)

    def poison(self, value: int) -> None:
        """Set every byte, padding and guards too."""
        for raw in self._guarded.values():
            raw.fill_(value)
        if not self._guarded:
            _page_first(self.binding).fill_(value)

    def image(self) -> NDArray[np.uint8]:
        """uint8[blocks, ...]: page-first blocks, or the arenas' side by side, guards first and last."""
        if not self._guarded:
            return _image(self.binding)
        return np.concatenate([raw.cpu().numpy() for raw in self._guarded.values()], axis=1)


def _raw(blocks: int, width_bytes: int, align_bytes: int, device: str = "cpu") -> torch.Tensor:
    """uint8[blocks, width], the first byte aligned."""
    storage = torch.zeros(blocks * width_bytes + align_bytes - 1, dtype=torch.uint8, device=device)
    start = -storage.data_ptr() % align_bytes
    return storage[start : start + blocks * width_bytes].view(blocks, width_bytes)


def _page_first(binding: Binding) -> torch.Tensor:
    first = next(iter(binding.arenas.values()))
    start = first.offset_bytes - first.layout.offset_bytes
    size = binding.blocks * binding.space.stride_bytes
    return first.storage[start : start + size].view(binding.blocks, binding.space.stride_bytes)


def _image(binding: Binding) -> NDArray[np.uint8]:
    image: NDArray[np.uint8] = _page_first(binding).cpu().numpy().copy()
    return image


def _fill(binding: Binding, arrays: Mapping[str, NDArray[Any]], blocks: Any) -> None:
    for (arena, field), view in binding.views.items():
        given = torch.from_numpy(np.array(arrays[f"{arena}|{field}"])).to(view.device)
        for row, block in enumerate(blocks):
            view[block].copy_(_typed(given[row], view.dtype))


def _typed(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8[..., width] as elements of a dtype, bit for bit."""
    return raw.contiguous().view(dtype)[..., 0]


def _views(
    laid: Layout, arrays: Mapping[str, NDArray[Any]] | None, poison: int = 0
) -> dict[str, torch.Tensor]:
    """One block's fields in memory of their own, as a conversion is handed them."""
    binding = Binding.allocate(_only_space(laid), 1)
    _page_first(binding).fill_(poison)
    if arrays is not None:
        _fill(binding, arrays, [0])
    return {f"{arena}/{field}": view[0] for (arena, field), view in binding.views.items()}


def _bytes(views: Mapping[str, torch.Tensor]) -> NDArray[np.uint8]:
    flat = [view.contiguous().view(torch.uint8).reshape(-1).numpy() for view in views.values()]
    return np.concatenate(flat)


def _wire(
    model: KvModel, tier: DramTier, lease: Lease, records: int, shards: int
) -> dict[str, NDArray[np.uint8]]:
    """The payloads as they are stored, per shard: uint8[records, payload]."""
    found: dict[str, NDArray[np.uint8]] = {}
    for shard in range(shards):
        record = wire_record(model, parts(model)[0], shard, shards)
        header = header_bytes(len(record.segments))
        rows = np.arange(shard, records * shards, shards)
        buffers = [np.zeros(header + record.payload_bytes, np.uint8) for _ in rows]
        tier.load(lease, rows, Buffers.of(buffers), time.monotonic() + CALM_S).wait(CALM_S)
        found[f"wire_{shard}"] = np.stack([buffer[header:] for buffer in buffers])
    return found


def _only_space(laid: Layout) -> Space:
    """Declarations that are served have one space (KVC-DECL-12)."""
    return laid.spaces[0]

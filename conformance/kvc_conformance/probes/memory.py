"""Probes on memory: fill arenas through their views, save, restore, and hand back what then lies there."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvc_conformance.channel import Message
from kvc_conformance.child import Session
from kvc_conformance.probes.declare import open_launch
from kvcontract.contract.errors import InternalFault, KvContractError, PluginFault
from kvcontract.contract.layout import Space, layout, with_page_tokens
from kvcontract.contract.model import Conversion, KvModel
from kvcontract.contract.wire import Part, parts, wire_record
from kvcontract.core.lane import InlineLane
from kvcontract.memory.binding import Binding
from kvcontract.memory.repack import converted, resolve
from kvcontract.store.worker import Worker
from kvcontract.tiers.base import Buffers, SaveClass
from kvcontract.tiers.dram import DramTier
from kvcontract.tiers.frame import header_bytes

CALM_S = 60.0
_MIDDLE = 1
"""Number of the block that a conversion is handed, of three."""


def declared(session: Session, page_tokens: int | None, record_pages: int = 1) -> KvModel:
    """The session's declaration, at other sizes of pages and records if asked."""
    model = open_launch(session, None).model
    if page_tokens is None:
        return model
    return with_page_tokens(model, page_tokens, record_pages * page_tokens if record_pages > 1 else None)


def write(session: Session, arguments: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Message:
    """Allocate page-first memory for one worker, write fields through their views, return the bytes.

    Arguments: ``page_tokens``, ``tp``, ``worker``.  Arrays: ``arena|field`` uint8[blocks, *axes, width].
    Returns, for each space, ``image|SPACE`` uint8[blocks, stride].
    """
    model = declared(session, arguments["page_tokens"])
    blocks = len(next(iter(arrays.values())))
    images = {}
    for space in layout(model, arguments["worker"], arguments["tp"]).spaces:
        binding = Binding.allocate(space, blocks, session.job["device"])
        _fill(binding, arrays, range(blocks))
        images[f"image|{space.key}"] = _image(binding)
    return Message({}, images)


def roundtrip(session: Session, arguments: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Message:
    """Write pages and slots, save them as records, poison the memory, restore them elsewhere.

    Before that the same memory has held, saved and restored other pages: each what its neighbour will hold.
    Arguments: ``page_tokens``, ``record_pages``, ``sources``, ``targets`` (block ids), ``blocks``,
    ``max_tp``, ``poison`` (a byte), ``layer_first``.  Arrays: ``arena|field`` uint8[n, *axes, width].
    Returns ``after_save|SPACE`` and ``restored|SPACE`` (uint8[blocks, stride]) and, for each part,
    ``wire|PART|SHARD`` (uint8[n, payload]).
    """
    model = declared(session, arguments["page_tokens"], arguments["record_pages"])
    laid, device = layout(model), session.job["device"]
    memory = {
        space.key: _Memory(space, arguments["blocks"], device, layer_first=arguments["layer_first"])
        for space in laid.spaces
    }
    lane = InlineLane()
    bindings = {key: held.binding for key, held in memory.items()}
    worker = Worker(model, laid, bindings, max_tp=arguments["max_tp"], lane=lane)
    tier = DramTier(1 << 28, lane=lane)
    trips = [_Trip.of(model, part, arguments) for part in parts(model)]

    _fill_all(memory, {name: np.roll(array, 1, axis=0) for name, array in arrays.items()}, arguments)
    for trip in trips:
        trip.earlier.save(worker, tier)
        trip.earlier.load(worker, tier)
    _fill_all(memory, arrays, arguments)
    before = {key: held.image() for key, held in memory.items()}
    saved = {trip.part.name: trip.save(worker, tier) for trip in trips}
    after_save = {key: held.image() for key, held in memory.items()}
    wire: dict[str, NDArray[np.uint8]] = {}
    for trip in trips:
        wire |= trip.stored(model, worker, tier)
    for held in memory.values():
        held.poison(arguments["poison"])
    loaded = {trip.part.name: trip.load(worker, tier) for trip in trips}
    body = {
        "saved": saved,
        "loaded": loaded,
        "source_changed": any((before[key] != after_save[key]).any() for key in memory),
        "faults": [str(fault) for fault in worker.faults],
    }
    deadline = time.monotonic() + CALM_S
    worker.close(deadline)
    tier.close(deadline)
    images = {f"after_save|{key}": image for key, image in after_save.items()}
    images |= {f"restored|{key}": held.image() for key, held in memory.items()}
    return Message(body, {**images, **wire})


@dataclass(frozen=True, slots=True)
class _Trip:
    """What is saved and restored of one part.

    Attributes:
        sources: int[n], or [n, pages of a record].
        targets: likewise.
        keys: uint64[n, 2].
    """

    part: Part
    sources: NDArray[np.int64]
    targets: NDArray[np.int64]
    keys: NDArray[np.uint64]

    @classmethod
    def of(cls, model: KvModel, part: Part, arguments: dict[str, Any]) -> _Trip:
        """Records of several pages, or of one slot each."""
        paged = layout(model).space(part.space).kind == "paged"
        shape = (-1, model.record_pages) if paged and model.record_pages > 1 else (-1,)
        sources, targets = (np.array(arguments[name]).reshape(shape) for name in ("sources", "targets"))
        return cls(part, sources, targets, np.arange(1, 2 * len(sources) + 1, dtype=np.uint64).reshape(-1, 2))

    @property
    def earlier(self) -> _Trip:
        """The same places under other keys."""
        return replace(self, keys=self.keys + np.uint64(2 * self.keys.size))

    def save(self, worker: Worker, tier: DramTier) -> list[int]:
        """The outcomes."""
        deadline = time.monotonic() + CALM_S
        op = worker.save(tier, self.part, self.keys, self.sources, SaveClass.CACHEABLE, deadline)
        codes: list[int] = op.wait(CALM_S).tolist()
        return codes

    def load(self, worker: Worker, tier: DramTier) -> list[int]:
        """The outcomes."""
        deadline = time.monotonic() + CALM_S
        names = worker.record_keys(self.part, self.keys)
        with tier.lookup(names, deadline).wait(CALM_S) as lease:
            rows = np.arange(len(names))
            op = worker.load(tier, lease, rows, self.part, self.keys, self.targets, deadline)
            codes: list[int] = op.wait(CALM_S).tolist()
        return codes

    def stored(self, model: KvModel, worker: Worker, tier: DramTier) -> dict[str, NDArray[np.uint8]]:
        """The payloads, per shard: uint8[records, payload]."""
        names, shards = worker.record_keys(self.part, self.keys), worker.shards(self.part)
        found: dict[str, NDArray[np.uint8]] = {}
        with tier.lookup(names, time.monotonic() + CALM_S).wait(CALM_S) as lease:
            for shard in range(shards):
                record = wire_record(model, self.part, shard, shards)
                header = header_bytes(len(record.segments))
                rows = np.arange(shard, len(names), shards)
                buffers = [np.zeros(header + record.payload_bytes, np.uint8) for _ in rows]
                tier.load(lease, rows, Buffers.of(buffers), time.monotonic() + CALM_S).wait(CALM_S)
                payloads = np.stack([buffer[header:] for buffer in buffers])
                found[f"wire|{self.part.name}|{shard}"] = payloads
        return found


def importable(session: Session, arguments: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Message:
    """Resolve the names of a conversion; ``refused``: why each that cannot be found cannot."""
    del arguments, arrays
    repack = declared(session, None).repack
    if repack is None or isinstance(repack.conversion, str):
        return Message({"refused": ["the declaration names none"]})
    refused = []
    for name in (repack.conversion.to_wire, repack.conversion.from_wire):
        try:
            resolve(name)
        except PluginFault as error:
            refused.append(str(error))
    return Message({"refused": refused})


def conversion(session: Session, arguments: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Message:
    """Call a conversion by itself: many times to the wire and back, into poisoned memory.

    Arguments: ``page_tokens``, ``repeats``, ``poisons`` (bytes, by turns).
    Arrays: ``arena|field`` uint8[1, *axes, width].
    Returns ``wire`` and ``back`` uint8[repeats, n], the bytes of all fields, and ``fields``, of each of the
    two, each name and size; ``stored|PART`` uint8[blocks, bytes], what `unconverted` takes; ``changed``,
    which of ``to_wire`` and ``from_wire`` changed what they read; ``beyond``, how many bytes each wrote that
    it was not given.
    """
    model = declared(session, arguments["page_tokens"])
    repack = model.repack
    if repack is None or isinstance(repack.conversion, str):
        raise InternalFault("a conversion was called for where none is declared")
    wired = _wired(model)
    found: dict[str, list[NDArray[np.uint8]]] = {"wire": [], "back": []}
    stored: dict[str, NDArray[np.uint8]] = {}
    changed, beyond = set[str](), dict[str, int]()
    fields: dict[str, list[tuple[str, int]]] = {"wire": [], "back": []}
    for part in parts(model):
        device = _Page(model, part, arrays=arrays)
        wires, backs = [], []
        for number in range(arguments["repeats"]):
            poison = arguments["poisons"][number % len(arguments["poisons"])]
            wire, back = _Page(wired, part, poison), _Page(model, part, poison)
            for name, src, dst in (("to_wire", device, wire), ("from_wire", wire, back)):
                before = src.image
                _convert(repack.conversion, name, src, dst)
                changed |= {name} if (src.image != before).any() else set()
                beyond[name] = max(beyond.get(name, 0), dst.beyond)
            stored.setdefault(f"stored|{part.name}", wire.image)
            if not number:
                fields["wire"] += wire.fields
                fields["back"] += back.fields
            wires.append(wire.content)
            backs.append(back.content)
        found["wire"].append(np.stack(wires))
        found["back"].append(np.stack(backs))
    joined = {name: np.concatenate(pieces, axis=-1) for name, pieces in found.items()}
    return Message({"changed": sorted(changed), "beyond": beyond, "fields": fields}, {**joined, **stored})


def unconverted(session: Session, arguments: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Message:
    """Call a conversion from the wire alone.

    Arguments: ``page_tokens``.  Arrays: ``stored|PART``, from `conversion`.  Returns ``back`` uint8[n].
    """
    model = declared(session, arguments["page_tokens"])
    repack = model.repack
    if repack is None or isinstance(repack.conversion, str):
        raise InternalFault("a conversion was called for where none is declared")
    backs = []
    for part in parts(model):
        wire, back = _Page(_wired(model), part), _Page(model, part)
        wire.memory.copy_(torch.from_numpy(np.array(arrays[f"stored|{part.name}"])))
        _convert(repack.conversion, "from_wire", wire, back)
        backs.append(back.content)
    return Message({}, {"back": np.concatenate(backs)})


def _wired(model: KvModel) -> KvModel:
    """The wire form, as if it were the device's."""
    stored = () if model.repack is None else model.repack.arenas
    return model.model_copy(update={"arenas": stored, "repack": None})


def _convert(conversion: Conversion, name: str, src: _Page, dst: _Page) -> None:
    full: str = getattr(conversion, name)
    converted(resolve(full), full, dict(src.views), dict(dst.views), [_MIDDLE])


class _Page:
    """One block of a part between two others, as a conversion is handed it."""

    def __init__(
        self, model: KvModel, part: Part, poison: int = 0, *, arrays: Mapping[str, NDArray[Any]] | None = None
    ) -> None:
        binding = Binding.allocate(layout(model).space(part.space), _MIDDLE + 2)
        self.memory = _page_first(binding)
        mine = {arena.name for arena in model.arenas if arena.group in part.groups}
        self.views = {
            f"{arena}/{name}": view[_MIDDLE] for (arena, name), view in binding.views.items() if arena in mine
        }
        self.memory.zero_()
        for view in self.views.values():
            view.view(torch.uint8).fill_(1)
        self._outside = self.image == 0
        self._poison = poison
        self.memory.fill_(poison)
        if arrays is not None:
            _fill(binding, arrays, [_MIDDLE])

    @property
    def image(self) -> NDArray[np.uint8]:
        """All bytes."""
        image: NDArray[np.uint8] = self.memory.numpy().copy()
        return image

    @property
    def content(self) -> NDArray[np.uint8]:
        """The bytes of all fields."""
        flat = [view.contiguous().view(torch.uint8).reshape(-1).numpy() for view in self.views.values()]
        return np.concatenate(flat)

    @property
    def fields(self) -> list[tuple[str, int]]:
        """Name and bytes of each field of `content`."""
        return [(name, view.numel() * view.element_size()) for name, view in self.views.items()]

    @property
    def beyond(self) -> int:
        """How many bytes that belong to no field have been written."""
        return int((self.image[self._outside] != self._poison).sum())


def refusals(session: Session, arguments: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Message:
    """Try to bind memory that does not fit; what each attempt was answered with.

    Arguments: ``blocks``.  Returns ``spaces``, each with the ``arena`` that is spoilt and ``answers``:
    attempt -> message, or null if it was accepted.
    """
    del arrays
    blocks = int(arguments["blocks"])
    spaces = layout(declared(session, None)).spaces
    return Message({"spaces": {space.key: _attempts(space, blocks) for space in spaces}})


def _attempts(space: Space, blocks: int) -> dict[str, Any]:
    last = space.arenas[-1]
    whole = {arena.name: _raw(blocks, arena.stride_bytes, arena.align_bytes) for arena in space.arenas}
    attempts = {
        "fits": whole,
        "a block short": {**whole, last.name: _raw(blocks - 1, last.stride_bytes, last.align_bytes)},
        "a block too narrow": {**whole, last.name: _raw(blocks, last.content_bytes - 1, last.align_bytes)},
    }
    first = space.arenas[0]
    if first is not last and first.stride_bytes == last.stride_bytes:
        attempts["two arenas in one memory"] = {**whole, last.name: whole[first.name]}
    answers = {what: _refusal(space, given, blocks) for what, given in attempts.items()}
    return {"arena": last.name, "answers": answers}


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


def _fill_all(
    memory: Mapping[str, _Memory], arrays: Mapping[str, NDArray[Any]], arguments: dict[str, Any]
) -> None:
    """What `roundtrip` is given lies in the blocks that it saves, and poison in all others."""
    for held in memory.values():
        held.poison(arguments["poison"])
        _fill(held.binding, arrays, arguments["sources"])


def _fill(binding: Binding, arrays: Mapping[str, NDArray[Any]], blocks: Any) -> None:
    for (arena, field), view in binding.views.items():
        given = torch.from_numpy(np.array(arrays[f"{arena}|{field}"])).to(view.device)
        for row, block in enumerate(blocks):
            view[block].copy_(_typed(given[row], view.dtype))


def _typed(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8[..., width] as elements of a dtype, bit for bit."""
    return raw.contiguous().view(dtype)[..., 0]

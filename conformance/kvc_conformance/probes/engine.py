"""Probes that run the plugin's executor in our engine and hand back what it computed and what it wrote."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvc_conformance.channel import Message
from kvc_conformance.child import Session
from kvc_conformance.content import never_restored
from kvc_conformance.probes.held import Held
from kvc_conformance.probes.opening import line_of, open_for, runner_of
from kvcontract.contract.errors import InternalFault, KvContractError, PluginFault, UsageFault
from kvcontract.contract.executor import (
    Attention,
    Combined,
    EmitsSnapshots,
    Executor,
    FieldRef,
    HfLayers,
    Limits,
    OwnsArenas,
    Recurrent,
    Step,
    StepOutput,
)
from kvcontract.contract.layout import layout
from kvcontract.contract.model import Full, KvModel
from kvcontract.core.lane import ThreadLane
from kvcontract.engine.build import Assembly, EngineLimits, assemble, bind_memory
from kvcontract.engine.fit import emits_all
from kvcontract.engine.request import Result
from kvcontract.memory.binding import Binding
from kvcontract.memory.pinned import host_memory
from kvcontract.tiers.base import Tier
from kvcontract.tiers.disk import DiskTier
from kvcontract.tiers.dram import DramTier

CALM_S: Final = 60.0
POLL_S: Final = 0.0005
DISK_BYTES: Final = 1 << 28


def start(session: Session, arguments: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Message:
    """Put an engine together under a name.

    Arguments: ``id``, ``dtype`` (computed in), ``asked`` (whether the plugin is asked to keep it, too),
    ``page_tokens``, ``pages``, ``tier_bytes`` (of a DRAM tier; 0: none), ``disk`` (folder of a disk tier, or
    null), ``prefix_cache``, ``max_batch_tokens``, ``max_chunk_tokens``, ``max_requests``; limits are cut to
    what the executor takes.
    Returns ``model`` (JSON), ``vocab_size``, ``placeholder_ids``, ``max_context_tokens``, ``max_requests``,
    ``max_batch_tokens``, ``where`` (whose code runs the model), ``emits`` (whether states are written inside
    steps), ``arenas``: name -> [region, offset, stride, blocks], see `run`.
    """
    del arrays
    torch.set_num_threads(1)  # small matrices: threads cost more than they save
    opened = open_for(session, arguments["dtype"], arguments["page_tokens"], asked=arguments["asked"])
    runner, where = runner_of(session, opened)
    recorder = _recorder(runner, cached=arguments["prefix_cache"])
    bounds = runner.limits
    batch = min(arguments["max_batch_tokens"], bounds.max_tokens)
    requests = min(arguments["max_requests"], bounds.max_requests, batch)
    limits = EngineLimits(
        max_batch_tokens=batch, max_chunk_tokens=arguments["max_chunk_tokens"], max_requests=requests
    )
    with ExitStack() as undo:
        tiers = _tiers(arguments, session.job["device"], undo)
        parts = undo.enter_context(
            assemble(
                opened.model,
                recorder,
                pages=arguments["pages"],
                device=session.job["device"],
                tiers=tiers,
                prefix_cache=arguments["prefix_cache"],
                limits=limits,
                beside=_window_blocks(opened.model, arguments["pages"], arguments["max_chunk_tokens"]),
            )
        )
        recorder.held = Held(opened.model, layout(opened.model), parts.bindings)
        session.objects[arguments["id"]] = _Running(parts, recorder, undo.pop_all())
    body = {
        "model": opened.model.canonical_json(),
        "vocab_size": bounds.vocab_size,
        "placeholder_ids": sorted(bounds.placeholder_ids),
        "max_context_tokens": bounds.max_context_tokens,
        "max_requests": requests,
        "max_batch_tokens": batch,
        "where": where,
        "emits": emits_all(recorder, parts.pool.sides),
        "arenas": _places(parts.bindings),
    }
    return Message(body)


def run(session: Session, arguments: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Message:
    """Run requests to their ends; greedy, to the full length, keeping the logits of every row that is run.

    Arguments: ``id``; ``requests``: each ``new_tokens`` and ``after``, the step before which it comes;
    ``poison``: a byte to fill the arenas with first, or null; ``dump``: copy the arenas after every step.
    Arrays: ``prompt_N`` int64[n].
    Returns ``requests``, each ``tokens, finish, reason, hit_tokens, sources, split``, with ``logits_N``
    float32[k, vocab] and ``positions_N`` int64[k]; ``steps``, each ``sizes`` and ``context`` by request of
    the batch, with ``tokens_S`` int64[n], ``table_S_SPACE`` int32[b, p] and ``slots_S_GROUP`` int32[b]; where
    there are slots, ``before_S`` and ``after_S`` uint8[b, bytes], what lay in them; if dumped,
    ``image_S_R`` uint8[bytes] by step and region.
    """
    running: _Running = session.objects[arguments["id"]]
    engine, recorder = running.parts.engine, running.recorder
    if arguments["poison"] is not None:
        for region in _regions(running.parts.bindings):
            region.fill_(arguments["poison"])
    recorder.begin(_regions(running.parts.bindings) if arguments["dump"] else [])
    wanted = arguments["requests"]
    ids: dict[int, int] = {}
    results: dict[int, Result] = {}
    for step in itertools.count():
        for number, request in enumerate(wanted):
            if request["after"] == step:
                prompt = np.array(arrays[f"prompt_{number}"])
                new = request["new_tokens"]
                ids[number] = engine.submit(prompt, new, stop_token_ids=(), capture_logits="all")
                _settle(running)  # one after another, so that they join in this order
        began = time.monotonic()
        while not engine.step() and not engine.idle:  # pages that are being saved are not free yet
            if time.monotonic() - began > CALM_S:
                raise InternalFault(f"no request moved for {CALM_S:g} s: {engine.gauges()}")
            time.sleep(POLL_S)
        results |= engine.take_results()
        if len(results) == len(wanted):
            break
    ended = [results[ids[number]] for number in range(len(wanted))]
    body = {"requests": [_told(result) for result in ended], "steps": recorder.told()}
    return Message(body, {**_captured(ended), **recorder.arrays()})


def flush(session: Session, arguments: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Message:
    """Wait until every save has landed.  Arguments: ``id``.  Returns ``landed``."""
    del arrays
    running: _Running = session.objects[arguments["id"]]
    store = running.parts.store
    return Message({"landed": store is not None and store.flush(deadline_s=CALM_S)})


def drop(session: Session, arguments: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Message:
    """Drop all that is cached on the device, in every space.

    Arguments: ``id``.  Returns ``held``: blocks that are not.
    """
    del arrays
    running: _Running = session.objects[arguments["id"]]
    pool = running.parts.pool
    pool.set_retention(False)
    pool.set_retention(True)
    return Message({"held": sum(each.held for each in (pool, *pool.sides.pools))})


def stop(session: Session, arguments: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Message:
    """Close an engine and forget it; one that is not there is closed.  Arguments: ``id``."""
    del arrays
    running: _Running | None = session.objects.pop(arguments["id"], None)
    if running is not None:
        running.end.close()
    return Message({})


def own_arenas(session: Session, arguments: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Message:
    """Bind the memory that the plugin's executor brings.

    Arguments: ``blocks``.  Returns ``owns`` (whether it brings any), ``refused`` (the message, or null) and
    ``where`` (its line).
    """
    del arrays
    opened = open_for(session, "float32", None)
    runner: Any = opened.plugin.call("kvc_executor", opened.ctx)
    if isinstance(runner, HfLayers) or not isinstance(runner, OwnsArenas):
        return Message({"owns": False, "refused": None, "where": None})
    body = {"owns": True, "refused": None, "where": line_of(type(runner).arenas)}
    blocks = {space.key: int(arguments["blocks"]) for space in layout(opened.model).spaces}
    try:
        bind_memory(opened.model, cast("Executor", runner), blocks, session.job["device"])
    except KvContractError as error:
        body["refused"] = str(error)
    return Message(body)


def undeclared(session: Session, arguments: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Message:
    """Ask engines for what their declaration, or executor, does not offer.

    Returns ``answers``: what was asked for -> [clause that the refusal names or null, its text or null].
    """
    del arguments, arrays
    opened = open_for(session, "float32", None)
    runner, _ = runner_of(session, opened)
    plain, lasting = _Recorder(runner), opened.model
    step = min(lasting.page_tokens, runner.limits.max_tokens)
    never = never_restored(lasting)
    answers: dict[str, list[str | None]] = {}
    for what, model, tiers in (("a tier", never, True), ("an adapter", lasting, False)):
        answers[what] = [None, None]
        with ExitStack() as undo:
            given = _tiers({"tier_bytes": 1 << 20 if tiers else 0, "disk": None}, session.job["device"], undo)
            try:
                parts = undo.enter_context(
                    assemble(
                        model,
                        plain,
                        pages=4,
                        device=session.job["device"],
                        tiers=given,
                        limits=EngineLimits(max_batch_tokens=step, max_chunk_tokens=step, max_requests=1),
                        beside=_window_blocks(model, 4, step),
                    )
                )
                parts.engine.load_adapter("another", "nowhere")
            except UsageFault as refused:
                answers[what] = [getattr(refused, "clause", None), str(refused)]
    return Message({"answers": answers})


def layer_map(session: Session, arguments: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Message:
    """Where the plugin's map puts each layer.

    Returns ``model`` (JSON), ``layers``, each layer, arena and field (null: the plugin has no map);
    ``states``, for each layer that keeps one, ``[layer, state, convolution]``: a field or null, and fields;
    and ``where``, its line.
    """
    del arguments, arrays
    opened = open_for(session, "float32", None)
    runner = opened.plugin.call("kvc_executor", opened.ctx)
    body: dict[str, Any] = {
        "model": opened.model.canonical_json(),
        "layers": None,
        "states": [],
        "where": None,
    }
    if not isinstance(runner, HfLayers):
        return Message(body)
    if not isinstance(runner.layers, Mapping) or not all(
        isinstance(entry, Attention | Recurrent | Combined) for entry in runner.layers.values()
    ):
        raise PluginFault("HfLayers takes a mapping of layer number to Attention, Recurrent or Combined")
    body["layers"] = [[int(layer), *ref] for layer, entry in runner.layers.items() for ref in entry.refs]
    for layer, entry in runner.layers.items():
        own = entry.recurrent if isinstance(entry, Combined) else entry
        if isinstance(own, Recurrent):
            body["states"].append([int(layer), own.state, list(own.conv)])
    return Message({**body, "where": line_of(getattr(opened.plugin.module, "kvc_executor", None))})


def _tiers(arguments: dict[str, Any], device: str, undo: ExitStack) -> list[Tier]:
    tiers: list[Tier] = []
    if arguments["tier_bytes"]:
        lane = ThreadLane("suite-dram")
        undo.callback(lane.close, CALM_S)
        size = arguments["tier_bytes"]
        tiers.append(DramTier(size, lane=lane, allocate=host_memory(device, size)))
    if arguments["disk"] is not None:
        disk = DiskTier(arguments["disk"], DISK_BYTES)
        undo.callback(lambda: disk.close(time.monotonic() + CALM_S))
        tiers.append(disk)
    return tiers


def _window_blocks(model: KvModel, pages: int, step_tokens: int) -> dict[str, int]:
    """Enough for a window, whatever the model's is, beside what other requests have."""
    return {
        group.reach.key: pages + -(-(group.reach.tokens + step_tokens) // model.page_tokens) + 2
        for group in model.groups
        if not isinstance(group.reach, Full)
    }


# Running


@dataclass(slots=True)
class _Running:
    parts: Assembly
    recorder: _Recorder
    end: ExitStack


@dataclass(slots=True)
class _Recorder:
    """An executor that notes what each step was made of, and optionally what memory looked like after it."""

    inner: Executor
    held: Held | None = None
    _steps: list[Step] = field(default_factory=list)
    _states: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]] = field(default_factory=list)
    _regions: list[Tensor] = field(default_factory=list)
    _images: list[list[NDArray[np.uint8]]] = field(default_factory=list)

    @property
    def limits(self) -> Limits:
        return self.inner.limits

    def bind(self, views: Mapping[FieldRef, Tensor]) -> None:
        self.inner.bind(views)

    def forward(self, step: Step) -> StepOutput:
        before = self._state(step)
        output = self.inner.forward(step)
        self._steps.append(step)
        self._states.append((before, self._state(step)))
        if self._regions:
            self._images.append([region.cpu().numpy().copy() for region in self._regions])
        return output

    def _state(self, step: Step) -> NDArray[np.uint8]:
        """uint8[b, bytes]: what lies in the slots of a step's requests."""
        if self.held is None or not step.slots:
            return np.zeros((0, 0), np.uint8)
        requests = range(len(step.context_len))
        slots = [{name: int(ids[at]) for name, ids in step.slots.items()} for at in requests]
        return np.stack([self.held.read_state(mine) for mine in slots])

    def begin(self, regions: list[Tensor]) -> None:
        """Forget the steps so far; copy these regions after each step to come."""
        self._steps, self._states, self._images, self._regions = [], [], [], regions

    def told(self) -> list[dict[str, list[int]]]:
        """Each step's requests: tokens and context."""
        return [
            {"sizes": np.diff(step.query_start).tolist(), "context": step.context_len.tolist()}
            for step in self._steps
        ]

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Tokens, page tables, slots, what lay in these, and images."""
        found: dict[str, NDArray[Any]] = {}
        for number, (step, (before, after)) in enumerate(zip(self._steps, self._states, strict=True)):
            found[f"tokens_{number}"] = step.token_ids
            found |= {f"table_{number}_{space}": table for space, table in step.page_table.items()}
            found |= {f"slots_{number}_{group}": slots for group, slots in step.slots.items()}
            if step.slots:
                found |= {f"before_{number}": before, f"after_{number}": after}
        for number, taken in enumerate(self._images):
            found |= {f"image_{number}_{region}": image for region, image in enumerate(taken)}
        return found


class _Owning:
    """The same for an executor that brings its memory."""

    inner: Any

    def arenas(self, blocks: Mapping[str, int]) -> Mapping[str, Tensor]:
        found: Mapping[str, Tensor] = self.inner.arenas(blocks)
        return found


class _Emitting:
    """The same for one that writes states inside a step."""

    inner: Any

    @property
    def emits(self) -> Mapping[str, int]:
        found: Mapping[str, int] = self.inner.emits
        return found


def _recorder(runner: Executor, *, cached: bool) -> _Recorder:
    """A recorder that can what the executor can; uncached, nobody wants states inside steps."""
    kinds: list[type] = [_Owning] if isinstance(runner, OwnsArenas) else []
    kinds += [_Emitting] if cached and isinstance(runner, EmitsSnapshots) else []
    made: _Recorder = type("_Able", (_Recorder, *kinds), {})(runner)
    return made


def _settle(running: _Running) -> None:
    """Wait until the prefixes of all requests are known: batches are then the same each time."""
    while running.parts.engine.gauges()["resolving"]:  # its own deadline ends it
        time.sleep(POLL_S)


def _told(result: Result) -> dict[str, Any]:
    return {
        "tokens": list(result.tokens),
        "finish": result.finish.value,
        "reason": result.reason,
        "hit_tokens": result.hit_tokens,
        "sources": dict(result.sources),
        "split": list(result.split),
    }


def _captured(results: list[Result]) -> dict[str, NDArray[Any]]:
    found: dict[str, NDArray[Any]] = {}
    for number, result in enumerate(results):
        if result.logits is not None and result.positions is not None:
            found[f"logits_{number}"] = result.logits.float().numpy()
            found[f"positions_{number}"] = result.positions
    return found


# Memory


def _spans(bindings: Mapping[str, Binding]) -> Iterator[tuple[Tensor, int, int]]:
    """(storage, begin, end) of every stretch of memory in which blocks lie."""
    arenas = [arena for binding in bindings.values() for arena in binding.arenas.values()]
    for address in dict.fromkeys(arena.storage.data_ptr() for arena in arenas):
        here = [arena for arena in arenas if arena.storage.data_ptr() == address]
        begin = min(arena.offset_bytes for arena in here)
        end = max(arena.offset_bytes + arena.blocks * arena.stride_bytes for arena in here)
        yield here[0].storage, begin, min(end, len(here[0].storage))


def _regions(bindings: Mapping[str, Binding]) -> list[Tensor]:
    return [storage[begin:end] for storage, begin, end in _spans(bindings)]


def _places(bindings: Mapping[str, Binding]) -> dict[str, list[int]]:
    """Per arena: its region, block 0 in it, bytes between blocks, blocks."""
    spans = {
        storage.data_ptr(): (number, begin) for number, (storage, begin, _) in enumerate(_spans(bindings))
    }
    return {
        name: [
            spans[arena.storage.data_ptr()][0],
            arena.offset_bytes - spans[arena.storage.data_ptr()][1],
            arena.stride_bytes,
            arena.blocks,
        ]
        for binding in bindings.values()
        for name, arena in binding.arenas.items()
    }

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
from kvcontract.contract.errors import KvContractError
from kvcontract.contract.layout import Layout, Space, layout, parts, with_page_tokens
from kvcontract.contract.model import KvModel
from kvcontract.core.lane import InlineLane
from kvcontract.memory.binding import Binding
from kvcontract.memory.repack import resolve
from kvcontract.store.worker import Worker
from kvcontract.tiers.base import Buffers, SaveClass, key_bytes
from kvcontract.tiers.dram import DramTier

CALM_S = 60.0


def declared(session: Session, page_tokens: int | None, options: Mapping[str, Any] | None = None) -> KvModel:
    """The session's declaration, at another page size if asked."""
    model = open_launch(session, options).model
    return model if page_tokens is None else with_page_tokens(model, page_tokens)


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

    Arguments: ``page_tokens``, ``sources``, ``targets`` (block ids), ``blocks``, ``max_tp``, ``poison``
    (a byte), ``layer_first``.  Arrays: ``arena|field`` uint8[n, *axes, width].
    Returns ``after_save`` and ``restored`` (uint8[blocks, stride]) and ``wire_SHARD`` (uint8[n, payload]).
    """
    model = declared(session, arguments["page_tokens"])
    laid = layout(model)
    space, part = _only_space(laid), parts(model)[0]
    memory = _Memory(space, arguments["blocks"], session.job["device"], layer_first=arguments["layer_first"])
    lane = InlineLane()
    worker = Worker(model, laid, {space.key: memory.binding}, max_tp=arguments["max_tp"], lane=lane)
    tier = DramTier(1 << 28, lane=lane)
    sources, targets = np.array(arguments["sources"]), np.array(arguments["targets"])
    page_keys = np.arange(1, 2 * len(sources) + 1, dtype=np.uint64).reshape(-1, 2)
    deadline = time.monotonic() + CALM_S

    memory.poison(arguments["poison"])
    _fill(memory.binding, arrays, sources.tolist())
    before = memory.image()
    saved = worker.save(tier, part, page_keys, sources, SaveClass.CACHEABLE, deadline).wait(CALM_S)
    after_save = memory.image()
    keys = worker.record_keys(part, page_keys)
    lease = tier.lookup(keys, deadline).wait(CALM_S)
    with lease:
        wire = _wire(tier, lease, len(sources), worker.shards(part), part.shards(arguments["max_tp"]), memory)
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

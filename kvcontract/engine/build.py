"""From a declaration to a running engine: memory, pool, store and executor put together.

::

    with assemble(model, layers, checkpoint=folder, pages=512, tiers=[dram]) as parts:
        request = parts.engine.submit(prompt, max_new_tokens=32)
        results = parts.engine.run()
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from kvcontract.contract.errors import Undeclared, UsageFault
from kvcontract.contract.executor import Executor, HfLayers, OwnsArenas
from kvcontract.contract.layout import layout
from kvcontract.contract.model import KvModel
from kvcontract.contract.snapshot import all_spaces, snapshot_spaces
from kvcontract.core.identity import load_config
from kvcontract.engine.checkpoint import load_model
from kvcontract.engine.drafter import Drafter
from kvcontract.engine.engine import Engine
from kvcontract.engine.views import executor_views
from kvcontract.memory.binding import CLAUSE, Binding
from kvcontract.pool.checkpoints import DEFAULT_CHECKPOINTS, CheckpointPolicy
from kvcontract.pool.keys import FleetSecret
from kvcontract.pool.pool import BlockPool
from kvcontract.pool.sides import make_sides
from kvcontract.store.rank import Rank
from kvcontract.store.store import KvStore
from kvcontract.tiers.base import Tier


@dataclass(frozen=True, slots=True)
class Assembly:
    """An engine and what it stands on; a context that closes engine and store, in that order.

    Attributes:
        engine: runs requests.
        store: prefix cache and tiers; None if prefix caching is off.
        pool: the pages.
        bindings: the memory of each block-id space, by its key.
        executor: runs steps.
    """

    engine: Engine
    store: KvStore | None
    pool: BlockPool
    bindings: Mapping[str, Binding]
    executor: Executor

    def close(self) -> None:
        """End the engine, then the store; pages of unfinished requests come back first."""
        with contextlib.ExitStack() as end:
            if self.store is not None:
                end.callback(self.store.close)
            end.callback(self.engine.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What one step may take; None leaves it to the executor."""

    max_batch_tokens: int | None = None
    max_chunk_tokens: int | None = None
    max_requests: int | None = None


def assemble(
    model: KvModel,
    runner: Executor | HfLayers,
    *,
    pages: int,
    checkpoint: Path | str | None = None,
    hf_model: nn.Module | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = "float32",
    tiers: Sequence[Tier] = (),
    secret: FleetSecret | None = None,
    prefix_cache: bool = True,
    limits: EngineLimits | None = None,
    drafter: Drafter | None = None,
    beside: Mapping[str, int] | None = None,
    checkpoints: CheckpointPolicy = DEFAULT_CHECKPOINTS,
) -> Assembly:
    """Put an engine together, over the executor's own arenas or else one page-first slab a space.

    Args:
        model: the declaration.
        runner: an executor, not bound yet, or the map for the generic one.
        pages: of the pool, page 0 included.
        checkpoint: folder of the weights; also where end-of-sequence ids come from.
        hf_model: a model that is loaded already, instead of the checkpoint's.
        device: of arenas and model.
        dtype: that the generic executor computes in.
        tiers: below the device, fastest first; closed with the store.
        secret: the fleet's; None: the one that the tiers keep, or else random.
        prefix_cache: False leaves the store out, as a group does that is never restored; then tiers are
            refused.
        limits: of one step.
        drafter: proposes tokens that the model verifies; bound like the executor.
        beside: blocks of each other space by its key, block 0 included: pages of windows, slots of state.
            What is not named has as many pages as `pages`, or a live slot and a snapshot for each request.
        checkpoints: where prompts are cut so that others can go on from there.

    Raises:
        UsageFault: parts are missing or do not fit together, the executor's own arenas included.
        Undeclared: tiers, while a group is never restored.
        NotConformant: the store refuses the declaration.
    """
    # long: the arguments, one a line, and what they mean
    # A group that is never restored turns reuse off everywhere: resolve, admission, retention.
    prefix_cache = prefix_cache and model.prefix_caching
    if tiers and not prefix_cache:
        kind = UsageFault if model.prefix_caching else Undeclared
        raise kind("tiers without a prefix cache would never be asked: leave one of them out")
    executor = runner
    if isinstance(executor, HfLayers):
        executor = generic_executor(
            model, executor, checkpoint=checkpoint, hf_model=hf_model, device=device, dtype=dtype
        )
    sizes = limits or EngineLimits()
    requests = sizes.max_requests or executor.limits.max_requests
    spaces = {space.key: space.kind for space in all_spaces(model)}
    blocks = {
        key: pages if kind == "paged" else 1 + (2 if prefix_cache else 1) * requests
        for key, kind in spaces.items()
    }
    blocks |= dict(beside or {})
    bindings = bind_memory(model, executor, blocks, device)
    snapshots = {
        space.key: Binding.allocate(space, blocks[space.key], device)
        for space in (snapshot_spaces(model) if prefix_cache else ())
    }
    for user in (executor, drafter):
        if user is not None:
            user.bind(executor_views(bindings))
    step = min(sizes.max_chunk_tokens or 2**62, sizes.max_batch_tokens or executor.limits.max_tokens)
    sides = make_sides(model, blocks, step, retention=prefix_cache)
    pool = BlockPool(pages, model.page_tokens, retention=prefix_cache, sides=sides)
    stops = () if checkpoint is None else stop_token_ids(checkpoint)
    with contextlib.ExitStack() as undo:
        store = None
        if prefix_cache:
            memory = {**bindings, **snapshots}
            store = undo.enter_context(KvStore(model, [Rank(pool, memory)], tiers, secret=secret))
        engine = Engine(
            model,
            executor,
            pool,
            store=store,
            stop_token_ids=stops,
            bindings={**bindings, **snapshots},
            drafter=drafter,
            checkpoints=checkpoints,
            **asdict(sizes),
        )
        undo.pop_all()
    return Assembly(engine, store, pool, bindings, executor)


def bind_memory(
    model: KvModel,
    executor: Executor,
    blocks: Mapping[str, int],
    device: torch.device | str = "cpu",
) -> dict[str, Binding]:
    """The memory of each space, by its key: the executor's own where it brings any, else page-first slabs.

    Args:
        model: the declaration.
        executor: not bound yet.
        blocks: of each space, by its key, block 0 included.
        device: of memory that is allocated here.

    Raises:
        UsageFault: the executor's arenas do not hold every block, as declared (KVC-LAYOUT-05).
    """
    spaces = layout(model).spaces
    if not isinstance(executor, OwnsArenas):
        return {space.key: Binding.allocate(space, blocks[space.key], device) for space in spaces}
    own_blocks = {space.key: blocks[space.key] for space in spaces}
    tensors = dict(executor.arenas(own_blocks))
    own = {
        space.key: {arena.name: tensors.pop(arena.name) for arena in space.arenas if arena.name in tensors}
        for space in spaces
    }
    if tensors:
        names = ", ".join(sorted(tensors))
        raise UsageFault(f"the executor brings memory for {names}: not declared [{CLAUSE}]")
    return {space.key: Binding.of(space, own[space.key], blocks[space.key]) for space in spaces}


def generic_executor(
    model: KvModel,
    layers: HfLayers,
    *,
    checkpoint: Path | str | None = None,
    hf_model: nn.Module | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = "float32",
) -> Executor:
    """The generic executor for a checkpoint, or for a model that is loaded already; not bound yet.

    Raises:
        UsageFault: neither of the two is given.
    """
    from kvcontract.engine.hf import HfExecutor  # noqa: PLC0415 - imports transformers

    if hf_model is None:
        if checkpoint is None:
            raise UsageFault("the generic executor needs weights: give checkpoint or hf_model")
        hf_model = load_model(checkpoint, device, dtype)
    return HfExecutor(hf_model, layers, model)


def stop_token_ids(checkpoint: Path | str) -> frozenset[int]:
    """End-of-sequence ids of a checkpoint: generation_config.json's, or else config.json's."""
    config = load_config(checkpoint)
    found: list[Any] = [config.get("eos_token_id"), (config.get("text_config") or {}).get("eos_token_id")]
    generation = Path(checkpoint) / "generation_config.json"
    if generation.is_file():
        found.insert(0, json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id"))
    ids: int | list[int] = next((value for value in found if value is not None), [])
    return frozenset([ids] if isinstance(ids, int) else ids)

"""What must hold of windows of pages and of states: in hits, in running requests, at checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from kvc_conformance.sim.node import Asked, Live, Node, records_of
from kvc_conformance.sim.spaces import Space
from kvcontract.pool.chunk import Chunk
from kvcontract.pool.handles import Hold
from kvcontract.pool.index import Keys, Pages
from kvcontract.pool.kernels import STAGED
from kvcontract.pool.pool import BlockPool
from kvcontract.pool.request import RequestKv
from kvcontract.pool.side import SidePool
from kvcontract.tiers.base import RecordKeys

if TYPE_CHECKING:
    from kvc_conformance.sim.world import World


def found(pool: BlockPool | SidePool, keys: Keys) -> Pages:
    """Where what is named like this lies, int32[n]; 0 where it is not."""
    return pool._books.index.lookup(keys)  # noqa: SLF001 - looking must not change what is evicted next


# Hits


def hit(world: World, node: Node, asked: Asked, hold: Hold | None, tokens: int) -> None:
    """A hit is whole in every space, and holds there exactly what somebody needs to go on (R2, F5)."""
    judge, pages, prompts = world.judge, tokens // world.prompts.page, world.prompts
    if not prompts.beside:
        return
    judge.holds("F5", ok=not tokens % prompts.granule, text=f"nobody can go on after {tokens} tokens")
    held = {} if hold is None or hold.sides is None else hold.sides.by_key
    live = _live_slots(node, asked.rank)
    for space in prompts.beside:
        mine, numbers = held.get(space.key), space.held(pages)
        wanted = prompts.keys(asked.stream, asked.scope)[numbers]
        exact = (mine is None) if not numbers else mine is not None and np.array_equal(mine.keys, wanted)
        has = "nothing" if mine is None else f"{len(mine.pages)} blocks"
        judge.holds(
            "R2" if space.group is None else "F5",
            ok=exact,
            text=f"a hit of {tokens} tokens holds {has} of {space.key}; it needs pages {numbers}",
        )
        if not exact or mine is None:
            continue
        blocks = mine.pages.tolist()
        if space.group is None:
            right = node.right_in(space.key, asked, blocks, numbers, tokens)
            clause = "D2" if asked.scope else "R3"
            judge.holds(clause, ok=right, text=f"a hit of {tokens} tokens holds other pages of {space.key}")
        else:
            shared = blocks[0] in live.get(space.key, ())
            judge.holds("F1", ok=not shared, text=f"a hit of {tokens} tokens holds a state that is in use")
            right = node.has_state(space.key, asked, blocks[0], tokens)
            clause = "F7" if node.tp > 1 else "F2"
            judge.holds(clause, ok=right, text=f"a hit of {tokens} tokens holds another state")


def _live_slots(node: Node, rank: int, but: Live | None = None) -> dict[str, list[int]]:
    """By space, the live slots of a rank, but for those of one request."""
    slots: dict[str, list[int]] = {}
    for live in node.live.values():
        if live.rank == rank and live is not but and not live.req.released:
            for view in live.req.beside.slots:
                slots.setdefault(view.key, []).append(view.slot)
    return slots


# Running requests


def rows(world: World, node: Node, live: Live) -> None:
    """What a running request has is its own, and all that its next step reads (R3, F1, F4)."""
    judge, req = world.judge, live.req
    tokens = req.committed_tokens
    for view in req.beside.windows:
        space = world.prompts.spaces[view.key]
        numbers = space.read(tokens)
        blocks = view.table[numbers].tolist()
        right = all(blocks) and node.right_in(view.key, live, blocks, numbers, tokens)
        text = f"of {view.key}, pages {numbers} of a running request at {tokens} tokens lie on {blocks}"
        judge.holds("R3", ok=right, text=text)
    if not tokens or not req.beside.slots:
        return
    slots = _live_slots(node, live.rank, live)
    for slot in req.beside.slots:
        alone = slot.slot not in slots.get(slot.key, ())
        judge.holds("F1", ok=alone, text=f"slot {slot.slot} of {slot.key} is that of two requests")
        if slot.key in req.copies:
            source = req.copies[slot.key][0][0]
            text = f"the state that a request is to begin with at {tokens} tokens is another by now"
            judge.holds("F4", ok=node.has_state(slot.key, live, source, tokens), text=text)
        else:
            text = f"the state of a running request at {tokens} tokens is not its own"
            judge.holds("R3", ok=node.has_state(slot.key, live, slot.slot, tokens), text=text)


def scheduled(world: World, chunk: Chunk) -> None:
    """A step is given every page that it reads, and no other slot than its own."""
    judge = world.judge
    for space in world.prompts.beside:
        if space.group is not None:
            continue
        table = chunk.pages[space.key]
        numbers = {*space.read(chunk.start), *range(chunk.start // space.page, -(-chunk.end // space.page))}
        there = len(table) == -(-chunk.end // space.page) and all(table[number] for number in numbers)
        text = f"of {space.key}, a step from {chunk.start} to {chunk.end} is given {table.tolist()}"
        judge.holds("B17", ok=there, text=text)


# Checkpoints


def room(live: Live) -> int:
    """Room for one more in the fullest of the slabs that a checkpoint of a request needs a slot of."""
    return min((view.side.pool.gauges().budget for view in live.req.beside.slots), default=1)


def checkpoint(world: World, node: Node, live: Live, breaking: int | None) -> None:
    """Let a store take what there is to take where a request stands, and judge what becomes of it."""
    req, judge, device = live.req, world.judge, node.devices[live.rank]
    emitted, wanted = bool(req.beside.emitted), req.checkpoint
    if not req.beside.slots or (wanted is None and not emitted):
        node.store.checkpoint(req)
        return
    before, left = node.checkpoints(), 0 if wanted is None else room(live)
    device.breaking = breaking
    node.store.checkpoint(req)
    broke, device.breaking = breaking is not None and device.breaking is None, None
    taken, without, failed = (now - then for now, then in zip(node.checkpoints(), before, strict=True))
    judge.counts.terminals["checkpoint ok"] += taken
    judge.counts.terminals["checkpoint without room"] += without
    judge.counts.terminals["checkpoint failed"] += failed
    if without or (wanted is not None and left > 0 and not broke):
        text = f"room for {left} more, and a checkpoint at {wanted} tokens found none"
        judge.holds("F6", ok=not without or left < 1, text=text)
    if broke:
        judge.holds("F3", ok=failed == 1, text="a copy failed, and the checkpoint was taken for good")
    states(world, node, live.rank)


def states(world: World, node: Node, rank: int) -> None:
    """Every state that can be found is that of the boundary it is found at, on every worker (F2, F7)."""
    for space in world.prompts.beside:
        if space.group is not None:
            _findable(world, node, rank, space)


def findable(world: World, node: Node) -> None:
    """Everything that can be found is what its name says (R3)."""
    for rank in range(len(node.pools)):
        for space in world.prompts.spaces.values():
            _findable(world, node, rank, space)


def _findable(world: World, node: Node, rank: int, space: Space) -> None:
    prompts = world.prompts
    blocks = found(node.pool_of(rank, space), prompts.named)
    there = np.flatnonzero(blocks)
    if not len(there):
        return
    wrong = []
    for worker in node.memory[rank]:
        memory = worker[space.key]
        right = memory.rights(blocks[there], prompts.picture(space.key, memory.worker, node.tp)[there])
        wrong += [prompts.names[at] for at in there[~right].tolist()]
    clause = "R3" if space.group is None else "F7" if node.tp > 1 else "F2"
    text = f"in {space.key}, what is found under pages (stream, scope, number) {wrong} is something else"
    world.judge.holds(clause, ok=not wrong, text=text)


# What is owed to the tiers


def rooms(req: RequestKv) -> dict[str, int]:
    """By space, room to pin what is to be saved."""
    return {side.key: side.pool.gauges().budget for side in req.pool.sides}


def owed(node: Node, req: RequestKv, room_: dict[str, int]) -> Iterator[tuple[bytes, RecordKeys]]:
    """Records beside the full pages that a request which has just retired is to leave in every tier.

    Of what it has taken, that which nobody has overwritten by now; without room to pin it, nothing.

    Args:
        node: the process.
        req: the request.
        room_: what there was before, see `rooms`.
    """
    taken = node.store._core.snapshots.of(req)  # noqa: SLF001 - nobody else knows where its copies are
    for side in req.pool.sides:
        space, pool, found_ = node.prompts.spaces[side.key], side.pool, {}
        for item in taken:
            artefact = item.by_space.get(side.key)
            if artefact is None:
                continue
            rows = zip(artefact.keys, artefact.blocks, artefact.generations, strict=True)
            for key, blocks, generations in rows:
                same = np.array_equal(pool.generation[blocks], generations)
                if same and (pool._books.state[blocks] > STAGED).all():  # noqa: SLF001 - as `pin_named` does
                    found_[key.tobytes()] = key
        if len(found_) * space.record_pages + 2 > room_[side.key]:
            continue
        for key in found_.values():
            records = records_of(space, key[None])
            yield key.tobytes() + bytes([space.part.id]), records

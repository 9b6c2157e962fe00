"""Probes on the store: thin calls of the public API on one or more stores that live in the child.

Every probe takes ``store``, the name of one; what it keeps is `Made`.  Rows and states travel as
`kvc_conformance.probes.held` has them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvc_conformance.channel import Message
from kvc_conformance.child import Session
from kvc_conformance.probes.damage import DamagedTier
from kvc_conformance.probes.declare import open_launch
from kvc_conformance.probes.held import Held
from kvcontract.contract.errors import InternalFault, KvContractError, NotConformant, Undeclared, UsageFault
from kvcontract.contract.layout import Space, layout
from kvcontract.contract.model import KvModel, Scope
from kvcontract.contract.snapshot import all_spaces
from kvcontract.core.lane import InlineLane, Lane, ThreadLane
from kvcontract.memory.binding import Binding
from kvcontract.memory.slots import copy_blocks
from kvcontract.pool.checkpoints import Checkpoints
from kvcontract.pool.guards import Guards
from kvcontract.pool.holdings import SideHolds
from kvcontract.pool.keys import FleetSecret
from kvcontract.pool.pool import BlockPool
from kvcontract.pool.request import FULL, Chunk, RequestKv, admit
from kvcontract.pool.sides import make_sides
from kvcontract.store.policy import KvPrefix, ResolvePolicy
from kvcontract.store.rank import Rank
from kvcontract.store.store import KvStore
from kvcontract.tiers.disk import DiskTier
from kvcontract.tiers.dram import DramTier

Arrays = Mapping[str, NDArray[Any]]
Arguments = dict[str, Any]

RANK: Final = "0"
SPACE: Final = FULL
CALM_S: Final = 60.0
PUBLISHED_S: Final = 30.0
POLLED_S: Final = 0.002


@dataclass(slots=True)
class Made:
    """One store and what its probes keep between calls."""

    store: KvStore
    pool: BlockPool
    bindings: Mapping[str, Binding]
    held: Held
    tiers: list[Any]
    lanes: list[Lane]
    requests: dict[str, RequestKv] = field(default_factory=dict)
    prefixes: dict[str, KvPrefix] = field(default_factory=dict)


def build(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Make a store over fresh memory.

    Arguments: ``model`` (canonical JSON), ``pages``, ``beside`` (blocks of other spaces; those not named have
    as many), ``step_tokens`` (most of one step), ``tiers`` (of ``capacity_bytes``, ``damage``, ``claims``;
    or ``of``, the store whose tier it is; or ``disk``, a folder), ``inline``, ``layer_first``, ``secret``
    (hex), ``tp``.
    """
    del arrays
    if "homes" not in session.job:
        open_launch(session)  # the plugin's own callables must be importable
    session.objects[arguments["store"]] = _build(session, arguments)
    return Message({})


def _build(session: Session, arguments: Arguments) -> Made:
    model = KvModel.model_validate_json(arguments["model"])
    pages, tp, inline = arguments["pages"], arguments.get("tp", 1), arguments.get("inline", False)
    device, layer_first = session.job["device"], arguments.get("layer_first")
    laid = [layout(model, number, tp) for number in range(tp)]
    blocks = {space.key: pages for space in all_spaces(model)} | arguments.get("beside", {})
    memory = [
        {
            space.key: _layer_first(space, blocks[space.key], device)
            if layer_first
            else Binding.allocate(space, blocks[space.key], device)
            for space in all_spaces(model, number, tp)
        }
        for number in range(tp)
    ]
    lanes: list[Lane] = []
    sides = make_sides(model, blocks, arguments["step_tokens"])
    pool = BlockPool(pages, model.page_tokens, sides=sides)
    secret = arguments.get("secret")
    with ExitStack() as undo:
        tiers = [_tier(session, spec, lanes, undo, inline=inline) for spec in arguments.get("tiers", ())]
        store = KvStore(
            model,
            [Rank(pool, memory, name=RANK)],
            tiers,
            secret=None if secret is None else FleetSecret(bytes.fromhex(secret)),
            lane=InlineLane() if inline else None,
        )
        undo.pop_all()
    return Made(store, pool, memory[0], Held(model, laid[0], memory[0]), tiers, lanes)


def _layer_first(space: Space, pages: int, device: str) -> Binding:
    tensors = {}
    for arena in space.arenas:
        width, align = arena.stride_bytes, arena.align_bytes
        storage = torch.zeros(pages * width + align - 1, dtype=torch.uint8, device=device)
        start = -storage.data_ptr() % align
        tensors[arena.name] = storage[start : start + pages * width].view(pages, width)
    return Binding.of(space, tensors)


def _tier(session: Session, spec: Arguments, lanes: list[Lane], undo: ExitStack, *, inline: bool) -> Any:
    if "of" in spec:
        other: Made = session.objects[spec["of"]]
        return other.tiers[0]
    if "disk" in spec:
        disk = DiskTier(spec["disk"], spec.get("capacity_bytes", 1 << 28))
        undo.callback(disk.close, time.monotonic() + CALM_S)
        return disk
    lane = InlineLane() if inline else ThreadLane("kvc-suite-dram", workers=2)
    lanes.append(lane)
    dram = DramTier(spec.get("capacity_bytes", 1 << 28), lane=lane)
    if "damage" in spec or "claims" in spec:
        return DamagedTier(dram, spec.get("damage"), spec.get("claims", {}))
    return dram


def made_of(session: Session, arguments: Arguments) -> Made:
    """What a call is about."""
    made: Made = session.objects[arguments["store"]]
    return made


def _scope(arguments: Arguments) -> Scope:
    return Scope(**arguments.get("scope", {}))


def resolve(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Resolve ``tokens`` in ``scope`` under ``policy``, and keep the prefix as ``id``.

    Returns ``hit_tokens``, ``pages``, ``sources``, ``degraded`` and ``beside``: by space, the numbers of the
    pages whose blocks are pinned there, or of those at whose ends snapshots were taken.  Arrays: rows of the
    ``pages``, those of windows by space, and ``state``, where every snapshot is there.
    """
    del arrays
    made = made_of(session, arguments)
    policy = ResolvePolicy(**arguments.get("policy", {}))
    _published(made)
    prefix = made.store.resolve(RANK, arguments["tokens"], _scope(arguments), policy)
    made.prefixes[arguments["id"]] = prefix
    return _told(made, prefix)


def reread(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """What the prefix ``id`` holds by now; see `resolve`."""
    del arrays
    made = made_of(session, arguments)
    return _told(made, made.prefixes[arguments["id"]])


def _told(made: Made, prefix: KvPrefix) -> Message:
    hold = prefix.hold
    pages = [] if hold is None else hold.pages.tolist()
    body: dict[str, Any] = {
        "hit_tokens": prefix.hit_tokens,
        "pages": pages,
        "sources": dict(prefix.sources),
        "degraded": list(prefix.degraded),
        "beside": {},
    }
    content = {SPACE: made.held.read(SPACE, pages)}
    if hold is not None and hold.sides is not None:
        names = {key.tobytes(): number for number, key in enumerate(hold.keys)}
        for key, side in hold.sides.by_key.items():
            body["beside"][key] = [names.get(name.tobytes(), -1) for name in side.keys]
        content |= _pinned(made, hold.sides)
    return Message(body, content)


def _pinned(made: Made, sides: SideHolds) -> dict[str, NDArray[np.uint8]]:
    """What lies in the blocks beside."""
    found = {
        side.key: made.held.read(side.key, sides.by_key[side.key].pages.tolist())
        for side in made.pool.sides.windows
        if side.key in sides.by_key
    }
    slots = {
        side.group: int(sides.by_key[side.key].pages[0])
        for side in made.pool.sides.slots
        if side.key in sides.by_key
    }
    if slots and len(slots) == len(made.pool.sides.slots):
        found["state"] = made.held.read_state(slots)
    return found


def release(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Give the prefix ``id`` back."""
    del arrays
    made_of(session, arguments).prefixes.pop(arguments["id"]).release()
    return Message({})


def admit_request(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Admit ``tokens`` as ``id``, from the prefix of that id if there is one; it is given back if refused.

    Arguments: ``granule`` and ``stops``: see `Checkpoints`.  Returns ``answer``: the class of what came.
    """
    del arrays
    made, name = made_of(session, arguments), arguments["id"]
    prefix = made.prefixes.pop(name, None)
    answer = admit(
        made.pool,
        prompt_tokens=arguments["tokens"],
        max_new_tokens=arguments["max_new"],
        keyer=made.store.keyer,
        scope=_scope(arguments),
        prefix=prefix,
        checkpoints=Checkpoints(arguments["granule"], tuple(arguments["stops"]), rolling=True),
    )
    if isinstance(answer, RequestKv):
        made.requests[name] = answer
    elif prefix is not None:
        prefix.release()
    return Message({"answer": type(answer).__name__})


def step(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """One step of ``id``: prefill of ``max_tokens``, or decode if there is none; ``token`` is sampled.

    What it has to copy first is copied; where it is left at a checkpoint, it is sealed, unless ``seal`` is
    false.  With ``revert`` the step comes to nothing before it has touched a state.  Arrays: ``content`` and
    ``state`` to write.  Returns ``start``, ``end``, ``emits``, the step's ``pages`` by space and ``slots`` by
    group, and whether it ended at a ``checkpoint``; arrays: ``state``, what it found in its slots.
    """
    made = made_of(session, arguments)
    req, limit = made.requests[arguments["id"]], arguments.get("max_tokens")
    chunk = req.schedule_decode() if limit is None else req.schedule_prefill(limit)
    copy_blocks(made.bindings, chunk.copies)
    found, content = made.held.read_state(chunk.slots), arrays["content"]
    if len(content) == len(chunk.token_ids):
        made.held.write(chunk.pages, chunk.start, content)
    if arguments.get("revert"):
        req.revert(chunk)
    else:
        made.held.write_state(chunk.slots, arrays["state"])
        _apply(req, chunk, limit, arguments["token"])
        if req.checkpoint is not None and arguments.get("seal", True):
            made.store.seal(req)
    body = {
        "start": chunk.start,
        "end": chunk.end,
        "emits": chunk.emits,
        "pages": {space: table.tolist() for space, table in chunk.pages.items()},
        "slots": dict(chunk.slots),
        "checkpoint": chunk.checkpoint is not None,
    }
    return Message(body, {"state": found})


def _apply(req: RequestKv, chunk: Chunk, limit: int | None, token: int) -> None:
    if limit is None:
        req.apply_decode(chunk, token)
    else:
        req.apply_prefill(chunk, token if chunk.emits else None)


def seal(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Seal ``id``."""
    del arrays
    made = made_of(session, arguments)
    made.store.seal(made.requests[arguments["id"]])
    return Message({})


def retire(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Retire ``id``."""
    del arrays
    made = made_of(session, arguments)
    made.store.retire(made.requests.pop(arguments["id"]))
    return Message({})


def flush(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Wait for the saves."""
    del arrays
    return Message({"flushed": made_of(session, arguments).store.flush()})


def drain(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Drop everything cached; overwrite memory with ``poison`` if given and nothing is held."""
    del arrays
    made = made_of(session, arguments)
    made.pool.set_retention(False)
    made.pool.set_retention(True)
    poison = arguments.get("poison")
    pools = _pools(made)
    if poison is not None and all(pool.held == 0 for pool in pools.values()):
        made.held.poison(poison)
    return Message({"held": {key: pool.total - pool.free for key, pool in pools.items()}})


def _pools(made: Made) -> dict[str, Guards]:
    """By space."""
    return {SPACE: made.pool, **{pool.key: pool for pool in made.pool.sides.pools}}


def _published(made: Made) -> None:
    """Wait for snapshots that a device still copies: what a script expects must not depend on its speed."""
    until = time.monotonic() + PUBLISHED_S
    while made.store.gauges()["publishing"]:
        if time.monotonic() > until:
            raise InternalFault(f"a snapshot has been copied for {PUBLISHED_S:g} s")
        time.sleep(POLLED_S)


def look(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Audit the books and read what every live request has.

    Returns ``books`` (what disagrees, or null) and per request its ``pages`` by space, in windows 0 where it
    has none, and its ``slots`` by group.  Arrays, by request and space: rows of the pages that it has, and
    ``state``.
    """
    del arrays
    made = made_of(session, arguments)
    books = None
    try:
        made.pool.check_books()
    except InternalFault as fault:
        books = str(fault)
    pages: dict[str, dict[str, list[int]]] = {}
    slots, content = {}, {}
    for name, req in made.requests.items():
        pages[name] = {SPACE: req.pages.tolist()}
        pages[name] |= {view.key: view.table[: view.end].tolist() for view in req.beside.windows}
        slots[name] = req.beside.live_slots
        for space, table in pages[name].items():
            content[f"{name} {space}"] = made.held.read(space, [block for block in table if block])
        content[f"{name} state"] = made.held.read_state(slots[name])
    return Message({"books": books, "pages": pages, "slots": slots}, content)


def gauges(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """All figures of the pool, the store and its tiers."""
    del arrays
    made = made_of(session, arguments)
    stats = made.store.stats()
    pools = {key: pool.gauges() for key, pool in _pools(made).items()}
    body = {
        "pools": {
            key: {"held": pool.held, "pinned": pool.pinned, "entitled": pool.entitled}
            for key, pool in pools.items()
        },
        "store": stats.gauges,
        "counters": stats.counters,
        "degraded": stats.degraded,
        "hit_tokens": stats.hit_tokens,
        "tiers": made.store.tier_stats(),
    }
    return Message(body)


def mend(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """End the damage: answers that were held back come, what follows is whole; then wait for all loads."""
    del arrays
    made = made_of(session, arguments)
    for tier in made.tiers:
        tier.mend()
    deadline = time.monotonic() + 10.0
    while made.store.gauges()["loads"] and time.monotonic() < deadline:
        time.sleep(0.002)
    return Message({})


def close(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Close the store, ask it once more, and forget it.

    Returns ``report`` and ``after``: the class of what a resolve raises then, or null.
    """
    del arrays
    made: Made = session.objects.pop(arguments["store"])
    report = made.store.close()
    after = None
    try:
        made.store.resolve(RANK, [1, 2, 3]).release()
    except KvContractError as error:
        after = type(error).__name__
    running = [lane for lane in made.lanes if not lane.close(10.0)]
    loads, saves, tiers = report.loads, report.saves, list(report.tiers)
    body = {"drained": report.drained and not running, "loads": loads, "saves": saves, "tiers": tiers}
    return Message({"report": body, "after": after})


def refusal(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Try `build`; returns the ``clauses`` of the refusal, or null if it was accepted; and its ``text``."""
    del arrays
    try:
        made = _build(session, arguments)
    except NotConformant as refused:
        return Message({"clauses": [item.clause for item in refused.findings], "text": str(refused)})
    except Undeclared as refused:
        return Message({"clauses": [refused.clause], "text": str(refused)})
    except UsageFault as refused:
        return Message({"clauses": [], "text": str(refused)})
    except Exception as error:  # noqa: BLE001 - no refusal, but nor was it accepted
        return Message({"clauses": [], "text": f"{type(error).__name__}: {error}"})
    made.store.close()
    for lane in made.lanes:
        lane.close(10.0)
    return Message({"clauses": None, "text": ""})

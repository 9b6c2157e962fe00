"""Probes on the store: thin calls of the public API on one or more stores that live in the child.

Every probe takes ``store``, the name of one; what it keeps is `Made`.  Rows travel as uint8[n, row_bytes],
the fields of a token side by side in declared order.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvc_conformance.channel import Message
from kvc_conformance.child import Session
from kvc_conformance.probes.damage import DamagedTier
from kvc_conformance.probes.declare import open_launch
from kvcontract.contract.errors import InternalFault, KvContractError, NotConformant
from kvcontract.contract.layout import Space, layout
from kvcontract.contract.model import TOKEN_AXIS, KvModel, Scope
from kvcontract.core.lane import InlineLane, Lane, ThreadLane
from kvcontract.memory.binding import Binding
from kvcontract.pool.keys import FleetSecret
from kvcontract.pool.pool import BlockPool
from kvcontract.pool.request import Chunk, RequestKv, admit
from kvcontract.store.policy import KvPrefix, ResolvePolicy
from kvcontract.store.rank import Rank
from kvcontract.store.store import KvStore
from kvcontract.tiers.dram import DramTier

Arrays = Mapping[str, NDArray[Any]]
Arguments = dict[str, Any]

RANK: Final = "0"
SPACE: Final = "full"
_UNITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Rows:
    """Reads and writes token rows through the binding's field views, as integers of the element size."""

    def __init__(self, space: Space, binding: Binding, page_tokens: int) -> None:
        self._page = page_tokens
        self._fields: list[tuple[torch.Tensor, int, int, int]] = []
        end = 0
        for arena in space.arenas:
            for item in arena.fields:
                view = binding.views[arena.name, item.name]
                view = view.view(_UNITS[view.element_size()]).movedim(1 + item.axes.index(TOKEN_AXIS), 1)
                first, end = end, end + item.content_bytes // arena.rows
                self._fields.append((view, first, end, page_tokens // arena.rows))
        self.row_bytes = end

    def write(self, pages: NDArray[np.int32], first: int, content: NDArray[np.uint8]) -> None:
        """Write the rows of tokens first, first + 1, ... of a request with this page table."""
        at = np.arange(first, first + len(content))
        for view, begin, end, per in self._fields:
            mine = (at + 1) % per == 0
            block = torch.from_numpy(pages[at[mine] // self._page].astype(np.int64))
            row = torch.from_numpy(at[mine] % self._page // per)
            given = torch.from_numpy(content[mine, begin:end].copy()).view(view.dtype)
            view[block, row] = given.reshape(len(block), *view.shape[2:]).to(view.device)

    def read(self, pages: list[int]) -> NDArray[np.uint8]:
        """uint8[pages * page_tokens, row_bytes]; a row that stands for several tokens is at the last."""
        out = np.zeros((len(pages) * self._page, self.row_bytes), np.uint8)
        for view, begin, end, per in self._fields:
            taken = view[torch.tensor(pages, dtype=torch.int64)].contiguous().cpu().numpy().view(np.uint8)
            out[per - 1 :: per, begin:end] = taken.reshape(-1, end - begin)
        return out

    def poison(self, value: int) -> None:
        """Overwrite every row of every page."""
        for view, *_ in self._fields:
            pattern = torch.full((view.element_size(),), value, dtype=torch.uint8).view(view.dtype)
            view.fill_(pattern.item())


@dataclass(slots=True)
class Made:
    """One store and what its probes keep between calls."""

    store: KvStore
    pool: BlockPool
    rows: Rows
    tiers: list[Any]
    lanes: list[Lane]
    requests: dict[str, RequestKv] = field(default_factory=dict)
    prefixes: dict[str, KvPrefix] = field(default_factory=dict)


def build(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Make a store over fresh memory.

    Arguments: ``model`` (canonical JSON), ``pages``, ``tiers`` (of ``capacity_bytes``, ``damage``,
    ``claims``, or ``of``, the store whose tier it is), ``inline``, ``layer_first``, ``secret`` (hex), ``tp``.
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
    spaces = [layout(model, number, tp).space(SPACE) for number in range(tp)]
    memory = [
        _layer_first(space, pages, device) if layer_first else Binding.allocate(space, pages, device)
        for space in spaces
    ]
    lanes: list[Lane] = []
    tiers = [_tier(session, spec, lanes, inline=inline) for spec in arguments.get("tiers", ())]
    pool = BlockPool(pages, model.page_tokens)
    secret = arguments.get("secret")
    store = KvStore(
        model,
        [Rank(pool, [{SPACE: binding} for binding in memory], name=RANK)],
        tiers,
        secret=None if secret is None else FleetSecret(bytes.fromhex(secret)),
        lane=InlineLane() if inline else None,
    )
    return Made(store, pool, Rows(spaces[0], memory[0], model.page_tokens), tiers, lanes)


def _layer_first(space: Space, pages: int, device: str) -> Binding:
    tensors = {}
    for arena in space.arenas:
        width, align = arena.stride_bytes, arena.align_bytes
        storage = torch.zeros(pages * width + align - 1, dtype=torch.uint8, device=device)
        start = -storage.data_ptr() % align
        tensors[arena.name] = storage[start : start + pages * width].view(pages, width)
    return Binding.of(space, tensors)


def _tier(session: Session, spec: Arguments, lanes: list[Lane], *, inline: bool) -> Any:
    if "of" in spec:
        other: Made = session.objects[spec["of"]]
        return other.tiers[0]
    lane = InlineLane() if inline else ThreadLane("kvc-suite-dram", workers=2)
    lanes.append(lane)
    dram = DramTier(spec.get("capacity_bytes", 1 << 28), lane=lane)
    if "damage" in spec or "claims" in spec:
        return DamagedTier(dram, spec.get("damage"), spec.get("claims", {}))
    return dram


def _made(session: Session, arguments: Arguments) -> Made:
    made: Made = session.objects[arguments["store"]]
    return made


def _scope(arguments: Arguments) -> Scope:
    return Scope(**arguments.get("scope", {}))


def resolve(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Resolve ``tokens`` in ``scope`` under ``policy``, and keep the prefix as ``id``."""
    del arrays
    made = _made(session, arguments)
    policy = ResolvePolicy(**arguments.get("policy", {}))
    prefix = made.store.resolve(RANK, arguments["tokens"], _scope(arguments), policy)
    made.prefixes[arguments["id"]] = prefix
    pages = [] if prefix.hold is None else prefix.hold.pages.tolist()
    body = {
        "hit_tokens": prefix.hit_tokens,
        "pages": pages,
        "sources": dict(prefix.sources),
        "degraded": list(prefix.degraded),
    }
    return Message(body, {"content": made.rows.read(pages)})


def release(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Give the prefix ``id`` back."""
    del arrays
    _made(session, arguments).prefixes.pop(arguments["id"]).release()
    return Message({})


def admit_request(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Admit ``tokens`` as ``id``, from the prefix of that id if there is one; it is given back if refused.

    Returns ``answer``: the class of what came.
    """
    del arrays
    made, name = _made(session, arguments), arguments["id"]
    prefix = made.prefixes.pop(name, None)
    answer = admit(
        made.pool,
        prompt_tokens=arguments["tokens"],
        max_new_tokens=arguments["max_new"],
        keyer=made.store.keyer,
        scope=_scope(arguments),
        prefix=prefix,
    )
    if isinstance(answer, RequestKv):
        made.requests[name] = answer
    elif prefix is not None:
        prefix.release()
    return Message({"answer": type(answer).__name__})


def step(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """One step of ``id``: prefill of ``max_tokens``, or decode if there is none; ``token`` is sampled.

    With ``revert`` the step comes to nothing after its rows were written.  Arrays: ``content``.
    Returns ``start``, ``end``, ``emits`` and the step's ``pages``.
    """
    made = _made(session, arguments)
    req, limit = made.requests[arguments["id"]], arguments.get("max_tokens")
    chunk = req.schedule_decode() if limit is None else req.schedule_prefill(limit)
    content = arrays["content"]
    if len(content) == len(chunk.token_ids):
        made.rows.write(chunk.pages[SPACE], chunk.start, content)
    if arguments.get("revert"):
        req.revert(chunk)
    else:
        _apply(req, chunk, limit, arguments["token"])
    pages = chunk.pages[SPACE].tolist()
    return Message({"start": chunk.start, "end": chunk.end, "emits": chunk.emits, "pages": pages})


def _apply(req: RequestKv, chunk: Chunk, limit: int | None, token: int) -> None:
    if limit is None:
        req.apply_decode(chunk, token)
    else:
        req.apply_prefill(chunk, token if chunk.emits else None)


def seal(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Seal ``id``."""
    del arrays
    made = _made(session, arguments)
    made.store.seal(made.requests[arguments["id"]])
    return Message({})


def retire(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Retire ``id``."""
    del arrays
    made = _made(session, arguments)
    made.store.retire(made.requests.pop(arguments["id"]))
    return Message({})


def flush(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Wait for the saves."""
    del arrays
    return Message({"flushed": _made(session, arguments).store.flush()})


def drain(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Drop everything cached; overwrite memory with ``poison`` if given and nothing is held."""
    del arrays
    made = _made(session, arguments)
    made.pool.set_retention(False)
    made.pool.set_retention(True)
    poison = arguments.get("poison")
    if poison is not None and made.pool.held == 0:
        made.rows.poison(poison)
    return Message({"free": made.pool.free, "total": made.pool.total})


def look(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Audit the books and read the pages of every live request.

    Returns ``books`` (what disagrees, or null) and per request its ``pages``; arrays: its rows, by its id.
    """
    del arrays
    made = _made(session, arguments)
    books = None
    try:
        made.pool.check_books()
    except InternalFault as fault:
        books = str(fault)
    pages = {name: req.pages.tolist() for name, req in made.requests.items()}
    content = {name: made.rows.read(owned) for name, owned in pages.items()}
    return Message({"books": books, "pages": pages}, content)


def gauges(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """All figures of the pool, the store and its tiers."""
    del arrays
    made = _made(session, arguments)
    stats, pool = made.store.stats(), made.pool.gauges()
    body = {
        "pool": {"held": pool.held, "pinned": pool.pinned, "entitled": pool.entitled},
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
    made = _made(session, arguments)
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
    """Try `build`; returns the ``clauses`` of the refusal, or null if it was accepted."""
    del arrays
    try:
        made = _build(session, arguments)
    except NotConformant as refused:
        return Message({"clauses": [item.clause for item in refused.findings], "text": str(refused)})
    made.store.close()
    for lane in made.lanes:
        lane.close(10.0)
    return Message({"clauses": None, "text": ""})


def churn(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Engines in threads over one store: prompts of shared ``families``, short deadlines among long ones.

    Arguments: ``families``, ``threads``, ``rounds``, ``seed``.  Returns how many of what came about.
    """
    del arrays
    made, counts, errors = _made(session, arguments), Counter[str](), list[BaseException]()

    def engine(number: int) -> None:
        rng = np.random.default_rng([arguments["seed"], number])
        try:
            for turn in range(arguments["rounds"]):
                _turn(made, rng, arguments["families"], counts)
                if turn % 8 == number:
                    made.pool.set_retention(False)
                    made.pool.set_retention(True)
        except BaseException as error:  # noqa: BLE001 - told to the parent
            errors.append(error)

    threads = [threading.Thread(target=engine, args=(number,)) for number in range(arguments["threads"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return Message(dict(counts))


def _turn(made: Made, rng: np.random.Generator, families: list[list[int]], counts: Counter[str]) -> None:
    family = families[int(rng.integers(len(families)))]
    tokens = family[: 1 + int(rng.integers(len(family)))]
    deadline_s = 0.0003 if rng.random() < 0.3 else 10.0  # noqa: PLR2004 - some loads are abandoned
    prefix = made.store.resolve(RANK, tokens, policy=ResolvePolicy(deadline_s))
    counts["hits"] += prefix.hit_tokens > 0
    answer = admit(
        made.pool,
        prompt_tokens=tokens,
        max_new_tokens=1,
        keyer=made.store.keyer,
        scope=Scope(),
        prefix=prefix,
    )
    if not isinstance(answer, RequestKv):
        prefix.release()
        counts["postponed"] += 1
        return
    counts["requests"] += 1
    while answer.committed_tokens < answer.prompt_len:
        chunk = answer.schedule_prefill(1 + int(rng.integers(8)))
        answer.apply_prefill(chunk, 0 if chunk.emits else None)
        made.store.seal(answer)
    made.store.retire(answer)

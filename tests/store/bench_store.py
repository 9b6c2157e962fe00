"""A small store on virtual time, a tier whose answers a test holds back, and content that names itself."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch

from kvc_conformance.sim.loop import VirtualLoop
from kvcontract import Arena, BlockPool, Field, Group, KvModel, KvStore, Rank, Scope, WeightIdentity, admit
from kvcontract.contract.layout import layout, space_key
from kvcontract.contract.model import Chunk as ChunkReach
from kvcontract.contract.model import Window
from kvcontract.core.lane import InlineLane
from kvcontract.core.pending import Pending
from kvcontract.memory.binding import Binding
from kvcontract.pool.checkpoints import NO_CHECKPOINTS, Checkpoints
from kvcontract.pool.request import Chunk, RequestKv
from kvcontract.pool.sides import Slotted, make_sides
from kvcontract.store.policy import KvPrefix, ResolvePolicy
from kvcontract.store.seal import SealReport
from kvcontract.tiers.base import (
    Buffers,
    Capabilities,
    Code,
    Codes,
    Lease,
    Level,
    Op,
    RecordKeys,
    Rows,
    SaveClass,
)
from kvcontract.tiers.dram import DramTier

PAGE: Final = 4
SCOPE: Final = Scope(salt="tenant")


KINDS: Final = {
    "paged": (),
    "windowed": (Group(name="near", reach=Window(tokens=6)),),
    "hybrid": (Group(name="near", reach=ChunkReach(tokens=12)), Group(name="state", kind="bounded")),
}
"""What models keep beside full pages."""

BLOCKS: Final = 96
"""Of each other space: ample."""

kind = "paged"
"""Of the models that are made now; a fixture sets it."""


def model_of(heads: int = 2, *, sharded: bool = True, **more: Any) -> KvModel:
    """Two layers of one small plane each, and one more for whatever is kept beside."""
    axis = "head" if sharded else None
    plane = Field(name="kv", dtype="uint8", axes={"head": heads, "dim": 3}, shard_axis=axis)
    beside = KINDS[kind] if "groups" not in more and "arenas" not in more else ()
    given: dict[str, Any] = {
        "contract": 1,
        "name": "toy",
        "weights": WeightIdentity(kind="unresolved"),
        "numerics": "test",
        "page_tokens": PAGE,
        "groups": (Group(name="kv"), *beside),
        "arenas": (
            *(Arena.planes(name=f"layer.{i}", group="kv", layer=i, fields=(plane,)) for i in range(2)),
            *(Arena.planes(name=group.name, group=group.name, fields=(plane,)) for group in beside),
        ),
    }
    return KvModel(**{**given, **more})


def prompt(pages: int, seed: int = 0, extra: int = 1) -> list[int]:
    """Tokens of some full pages and `extra` more."""
    return np.random.default_rng(seed).integers(0, 1000, pages * PAGE + extra).tolist()


def row(tokens: Sequence[int], heads: int = 2) -> np.ndarray[Any, Any]:
    """uint8[2, heads, 3]: what the last of these tokens leaves in every layer; depends on all of them."""
    digest = hashlib.blake2b(np.array(tokens, np.int64).tobytes(), digest_size=6 * heads).digest()
    return np.frombuffer(digest, np.uint8).reshape(2, heads, 3)


class HeldTier:
    """A DRAM tier on the loop's time whose verbs can be held back, and answered when the test says so.

    Attributes:
        holding: verbs that are held now: "lookup", "load", "save".
        asked: (verb, records) of every call.
        answer: changes the lease of a look-up before it is given.
        codes: changes the codes of an operation before it settles, by verb.
    """

    def __init__(self, clock: Callable[[], float], name: str = "dram", **claims: Any) -> None:
        self.inner = DramTier(1 << 20, lane=InlineLane(), clock=clock, name=name)
        self.holding: set[str] = set()
        self.asked: list[tuple[str, int]] = []
        self.answer: Callable[[Lease], Lease] = lambda lease: lease
        self.codes: dict[str, Callable[[Codes], Codes]] = {}
        self._claims = claims
        self._held: deque[tuple[str, Callable[[], None]]] = deque()

    @property
    def name(self) -> str:
        """Labels statistics."""
        return self.inner.name

    @property
    def capabilities(self) -> Capabilities:
        """Those of the DRAM tier, and what else the test claims."""
        return replace(self.inner.capabilities, **self._claims)

    def lookup(self, keys: RecordKeys, deadline: float) -> Pending[Lease]:
        """The inner answer, when it may come."""
        del deadline  # held answers come late on purpose
        return self._when_open(
            "lookup",
            len(keys),
            lambda: self.inner.lookup(keys, math.inf).map(self.answer),
        )

    def load(self, lease: Lease, rows: Rows, buffers: Buffers, deadline: float) -> Op:
        """Copies nothing before it may."""
        del deadline
        op = self._when_open("load", len(rows), lambda: self.inner.load(lease, rows, buffers, math.inf))
        return op.map(self.codes.get("load", lambda codes: codes))

    def save(
        self,
        keys: RecordKeys,
        buffers: Buffers,
        cls: SaveClass,
        deadline: float,
        *,
        handoff: str | None = None,
    ) -> Op:
        """Copies nothing before it may; a page whose code the test changed is not kept."""
        del deadline
        change = self.codes.get("save", lambda codes: codes)
        kept = np.flatnonzero(change(np.zeros(len(keys), np.uint8)) == Code.OK)

        def copy() -> Op:
            inner = self.inner.save(keys[kept], buffers.take(kept), cls, math.inf, handoff=handoff)
            return inner.map(lambda _: change(np.zeros(len(keys), np.uint8)))

        return self._when_open("save", len(keys), copy)

    def _when_open(self, verb: str, records: int, start: Callable[[], Pending[Any]]) -> Pending[Any]:
        self.asked.append((verb, records))
        if verb not in self.holding:
            return start()
        late: Pending[Any] = Pending()
        self._held.append((verb, lambda: start().on_done(late.settle)))
        return late

    def open(self, verb: str) -> None:
        """Let a verb through, now and later."""
        self.holding.discard(verb)
        held, self._held = list(self._held), deque(item for item in self._held if item[0] != verb)
        for name, go in held:
            if name == verb:
                go()

    def count(self, verb: str) -> int:
        """How often it was asked."""
        return sum(name == verb for name, _ in self.asked)

    def discard(self, lease: Lease, rows: Rows) -> None:
        """Straight through."""
        self.inner.discard(lease, rows)

    def flush(self, level: Level, deadline: float) -> Pending[bool]:
        """Straight through."""
        return self.inner.flush(level, deadline)

    def release_handoff(self, lease_id: str) -> None:
        """Straight through."""
        self.inner.release_handoff(lease_id)

    def stats(self) -> dict[str, int]:
        """Straight through."""
        return self.inner.stats()

    def close(self, deadline: float) -> bool:
        """Straight through."""
        return self.inner.close(deadline)


def deny(tier: HeldTier, which: Callable[[RecordKeys], Any]) -> None:
    """Have a tier deny some records."""
    inner = tier.inner.lookup

    def lookup(keys: RecordKeys, deadline: float) -> Pending[Lease]:
        def without(lease: Lease) -> Lease:
            lease.present[which(keys)] = False
            return lease

        return inner(keys, deadline).map(without)

    tier.inner.lookup = lookup  # type: ignore[method-assign] # on purpose


class TellingTier(HeldTier):
    """One that says what it loses, and can forget."""

    def on_loss(self, callback: Callable[[RecordKeys, str], object]) -> Callable[[], None]:
        """Straight through."""
        return self.inner.on_loss(callback)

    def reset(self, deadline: float) -> Pending[bool]:
        """Straight through."""
        return self.inner.reset(deadline)


class Setup:
    """One rank over memory of its own, tiers, and a store, all on one virtual clock.

    Attributes:
        bindings: of each worker.
    """

    def __init__(
        self,
        *,
        pages: int = 16,
        tiers: int = 1,
        tp: int = 1,
        model: KvModel | None = None,
        save_budget: float = 1.0,
        **options: Any,
    ) -> None:
        self.loop = VirtualLoop()
        self.model = model or model_of()
        spaces = layout(self.model).spaces
        blocks = {space.key: BLOCKS for space in spaces} | {"full": pages}
        sides = make_sides(self.model, blocks, max_step_tokens=64)
        self.pool = BlockPool(pages=pages, page_tokens=PAGE, events=options.pop("log", None), sides=sides)
        self.memory = [
            {
                space.key: Binding.allocate(space, blocks=blocks[space.key])
                for space in layout(self.model, number, tp).spaces
            }
            for number in range(tp)
        ]
        self.bindings = [memory["full"] for memory in self.memory]
        claims = options.pop("claims", {})  # by name of the tier
        names = ("dram", "disk", "far")[:tiers]
        made = HeldTier if options.pop("silent", False) else TellingTier
        self.tiers = [made(self.loop.time, name, **claims.get(name, {})) for name in names]
        ranks = [Rank(self.pool, self.memory)]
        options["save_budget"] = save_budget  # small pools: what is not about the budget is not shed
        self.store = KvStore(self.model, ranks, self.tiers, loop=self.loop, lane=InlineLane(), **options)

    @property
    def tier(self) -> HeldTier:
        """The first."""
        return self.tiers[0]

    @property
    def binding(self) -> Binding:
        """Of the first worker."""
        return self.bindings[0]

    @property
    def heads(self) -> int:
        """Of the model."""
        return self.model.arenas[0].fields[0].axes["head"]

    def share(self, content: Any, worker: int) -> Any:
        """What a worker holds of [heads, dim]."""
        if self.model.arenas[0].fields[0].shard_axis is None:
            return content
        tp = len(self.bindings)
        return content[worker * self.heads // tp : max(1, -(-(worker + 1) * self.heads // tp))]

    async def resolve(self, tokens: list[int], **policy: Any) -> KvPrefix:
        """Resolve in the usual scope."""
        return await self.store.resolve_prefix("0", tokens, SCOPE, ResolvePolicy(**policy))

    def admit(self, tokens: list[int], prefix: KvPrefix | None = None, new: int = 1) -> RequestKv:
        """Admit, or fail the test."""
        answer = admit(
            self.pool,
            prompt_tokens=tokens,
            max_new_tokens=new,
            keyer=self.store.keyer,
            scope=SCOPE,
            prefix=prefix,
            checkpoints=everywhere(len(tokens)) if self.pool.sides else NO_CHECKPOINTS,
        )
        assert isinstance(answer, RequestKv), answer
        return answer

    def compute(self, tokens: list[int], prefix: KvPrefix | None = None) -> RequestKv:
        """A request whose prompt has been computed: every row written."""
        req = self.admit(tokens, prefix)
        while req.prefilling:
            chunk = req.schedule_prefill(len(tokens))
            for space, pairs in chunk.copies.items():
                for memory in self.memory:
                    memory[space].copy_blocks(pairs)
            self.write(tokens, chunk)
            req.apply_prefill(chunk, 5 if chunk.emits else None)
            self.store.checkpoint(req)
        return req

    def write(self, tokens: list[int], chunk: Chunk) -> None:
        """What a step leaves: a row of every token in every layer, and a state."""
        for at in range(chunk.start, chunk.end):
            content = torch.from_numpy(row(tokens[: at + 1], self.heads).copy())
            for worker, memory in enumerate(self.memory):
                for arena, layer, where in self.places(chunk.pages, chunk.slots, at):
                    view = memory[where[0]].views[arena, "kv"]
                    view[where[1]] = self.share(content[layer], worker)

    def places(
        self, pages: Mapping[str, Any], slots: Mapping[str, int], at: int
    ) -> Iterator[tuple[str, int, tuple[str, Any]]]:
        """Arena, layer of the content, and (space, index) of what a token leaves in it."""
        groups = {group.name: group for group in self.model.groups}
        for number, arena in enumerate(self.model.arenas):
            group = groups[arena.group]
            key = space_key(group)
            if group.kind == "bounded":
                yield arena.name, number % 2, (key, slots[group.name])
            elif key in pages and pages[key][at // PAGE]:
                yield arena.name, number % 2, (key, (int(pages[key][at // PAGE]), at % PAGE))

    def stored(self, tokens: list[int]) -> SealReport:
        """Compute, retire, and evict from the device: afterwards only the tiers have it."""
        report = self.store.retire(self.compute(tokens)).value
        self.evict()
        return report

    def evict(self) -> None:
        """Drop what is cached on the device, and overwrite all of it."""
        self.pool.set_retention(False)
        self.pool.set_retention(True)
        if self.pool.held == 0:
            for memory in self.memory:
                for binding in memory.values():
                    for view in binding.views.values():
                        view.fill_(0xEE)

    def lose(self, tier: HeldTier, tokens: list[int]) -> None:
        """A tier drops what it has of a prompt, of every part, and says so."""
        core = self.store._core
        keys = core.record_keyer.chain(tokens, SCOPE)
        for part in core.parts:
            records = part.workers["0"].record_keys(keys)
            with tier.inner.lookup(records, math.inf).value as lease:
                tier.inner.discard(lease, np.arange(len(records)))

    def check_content(self, tokens: list[int], prefix: KvPrefix) -> None:
        """The rows of a hit are those of its tokens."""
        assert prefix.hold is not None
        pages = prefix.hold.pages.tolist()
        assert len(pages) * PAGE == prefix.hit_tokens  # A13
        held, slots = {"full": np.array(pages)}, dict[str, int]()
        for side in self.pool.sides:
            assert prefix.hold.sides is not None
            hold = prefix.hold.sides.by_key.get(side.key)
            if isinstance(side, Slotted):
                assert hold is not None
                slots[side.group] = int(hold.pages[0])
                continue
            table = np.zeros(len(pages), np.int64)
            if hold is not None:
                table[side.needed(len(pages))] = hold.pages
            assert (table[side.needed(len(pages))] > 0).all()
            held[side.key] = table
        for at in range(prefix.hit_tokens):
            wanted = row(tokens[: at + 1], self.heads)
            for arena, layer, where in self.places(held, slots, at):
                if isinstance(where[1], int) and at < prefix.hit_tokens - 1:
                    continue  # a state is that of the last token
                for worker, memory in enumerate(self.memory):
                    found = memory[where[0]].views[arena, "kv"][where[1]].numpy()
                    share = self.share(wanted[layer], worker)
                    assert (found == share).all(), f"token {at}, {arena}, worker {worker}"

    def check_idle(self) -> None:
        """R8: nothing is held, pinned, leased or running; the books balance."""
        self.pool.check_books()
        for pool in (self.pool, *(side.pool for side in self.pool.sides)):
            gauges = pool.gauges()
            assert (gauges.held, gauges.pinned, gauges.entitled) == (0, 0, 0)
        assert not any(self.store.stats().gauges.values()), self.store.stats().gauges
        for tier in self.tiers:
            stats = tier.stats()
            assert (stats["leases"], stats["operations"]) == (0, 0)


def everywhere(tokens: int) -> Checkpoints:
    """A checkpoint after every page: a hit may end where it would without anything beside."""
    return Checkpoints(PAGE, tuple(range(PAGE, tokens + 1, PAGE)))


@contextmanager
def setup(**options: Any) -> Any:
    """A set-up that must be idle in the end, and closes."""
    made = Setup(**options)
    try:
        yield made
        made.check_idle()
        assert made.loop.run(made.store.aclose()).drained
    finally:
        made.loop.close()

"""The worker between device memory and tiers: whole pages or a code, never damaged bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.layout import layout
from kvcontract.contract.model import (
    Arena,
    Conversion,
    Field,
    Group,
    KvModel,
    Repack,
    WeightIdentity,
    Window,
)
from kvcontract.contract.wire import Part
from kvcontract.core.lane import InlineLane, ManualLane, ThreadLane
from kvcontract.core.pending import Pending
from kvcontract.memory.binding import Binding
from kvcontract.store.worker import Worker
from kvcontract.tiers.base import Buffers, Code, Lease, Op, RecordKeys, SaveClass, Tier
from kvcontract.tiers.dram import DramTier
from kvcontract.tiers.lending import Loan

PAGE, BLOCKS, FOREVER = 3, 9, math.inf

T = TypeVar("T")


def model_of(
    weights: str = "a", *, turned: bool = False, convert: str = "", groups: tuple[Group, ...] = ()
) -> KvModel:
    """Two layers: K and V of 4 heads, and a replicated latent; `turned` stores axes in another order."""
    arenas: list[Arena] = []
    wire: list[Arena] = []
    for layer in range(2):
        for found, names in ((arenas, ["head", "dim"]), (wire, ["dim", "head"])):
            axes = {name: {"head": 4, "dim": 5}[name] for name in names}
            kv = tuple(
                Field(name=name, dtype="bfloat16", axes=axes, shard_axis=None if convert else "head")
                for name in ("k", "v")
            )
            latent = (Field(name="c", dtype="uint8", axes={"dim": 6}),)
            found.append(Arena.planes(name=f"l{layer}.kv", group="kv", layer=layer, fields=kv))
            found.append(Arena.rows(name=f"l{layer}.c", group="kv", layer=layer, fields=latent))
    arenas += [Arena.planes(name=group.name, group=group.name, fields=latent) for group in groups]
    conversion: Any = "derived"
    if convert:
        conversion = Conversion(to_wire=f"{__name__}:{convert}", from_wire=f"{__name__}:{convert}")
    return KvModel(
        contract=1,
        name="toy",
        weights=WeightIdentity(kind="digest", value=weights),
        numerics="test",
        page_tokens=PAGE,
        groups=(Group(name="kv"), *groups),
        arenas=tuple(arenas),
        repack=Repack(arenas=tuple(wire), conversion=conversion) if turned or convert else None,
    )


MODEL = model_of()


class Side:
    """Workers of one degree of tensor parallelism, over memory of their own."""

    def __init__(self, model: KvModel, tp: int = 1, *, max_tp: int = 4, **options: Any) -> None:
        options.setdefault("lane", InlineLane())
        self.workers, self.bindings = [], []
        for number in range(tp):
            held = layout(model, number, tp)
            bindings = {space.key: Binding.allocate(space, BLOCKS) for space in held.spaces}
            self.bindings.append(bindings["full"])
            self.workers.append(Worker(model, held, bindings, max_tp=max_tp, **options))
        self.part = self.workers[0].parts[0]

    @property
    def worker(self) -> Worker:
        """The first."""
        return self.workers[0]

    def fill(self, contents: dict[tuple[str, str], torch.Tensor]) -> None:
        """Write global contents [blocks, rows, head, dim] into every worker's share."""
        for number, binding in enumerate(self.bindings):
            for name, view in binding.views.items():
                view.copy_(self._share(contents[name], view, number))

    def shows(self, contents: dict[tuple[str, str], torch.Tensor], blocks: dict[int, int]) -> bool:
        """Whether blocks of ours hold what blocks of the contents are."""
        return all(
            torch.equal(view[mine], self._share(contents[name], view, number)[other])
            for number, binding in enumerate(self.bindings)
            for name, view in binding.views.items()
            for mine, other in blocks.items()
        )

    def _share(self, whole: torch.Tensor, view: torch.Tensor, number: int) -> torch.Tensor:
        if whole.shape == view.shape:
            return whole
        return whole.tensor_split(len(self.workers), dim=2)[number]

    def save(self, tier: Tier, pages: list[int], blocks: list[int], **options: Any) -> list[list[Code]]:
        """Save by every worker; codes by worker."""
        options = {"cls": SaveClass.CACHEABLE, "deadline": FOREVER, **options}
        return [
            codes_of(worker.save(tier, self.part, keys(pages), np.array(blocks), **options))
            for worker in self.workers
        ]

    def load(self, tier: Tier, pages: list[int], blocks: list[int], **options: Any) -> list[list[Code]]:
        """Look up and load by every worker; codes by worker."""
        return [self.load_one(worker, tier, pages, blocks, **options) for worker in self.workers]

    def load_one(
        self, worker: Worker, tier: Tier, pages: list[int], blocks: list[int], **options: Any
    ) -> list[Code]:
        """Look up and load by one worker."""
        wanted = worker.record_keys(self.part, options.pop("asked", keys(pages)))
        with tier.lookup(wanted, FOREVER).wait(60.0) as lease:
            op = worker.load(
                tier,
                lease,
                np.arange(len(wanted)),
                self.part,
                keys(pages),
                np.array(blocks),
                options.get("deadline", FOREVER),
            )
            return codes_of(op)


def codes_of(op: Op) -> list[Code]:
    """The codes of an operation that ends soon."""
    return [Code(code) for code in op.wait(60.0)]


def keys(pages: list[int]) -> NDArray[np.uint64]:
    """Page keys of some numbers."""
    return np.array([[page, page * 7919] for page in pages], np.uint64).reshape(-1, 2)


def contents_of(model: KvModel, seed: int = 0) -> dict[tuple[str, str], torch.Tensor]:
    """Random bits for every field, for tp 1; small integers, so that equality is exact."""
    made = torch.Generator().manual_seed(seed)
    views = Binding.allocate(layout(model).space("full"), BLOCKS).views
    return {
        name: torch.randint(0, 128, view.shape, generator=made).to(view.dtype) for name, view in views.items()
    }


def dram(**options: Any) -> DramTier:
    """A tier with room for everything."""
    options.setdefault("lane", InlineLane())
    return DramTier(2**20, **options)


OK = Code.OK


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2), (8, 1), (1, 8)])
def test_e3_any_degree_restores_what_any_wrote(writers: int, readers: int, *, turned: bool) -> None:
    """E3: records of one degree of tensor parallelism serve every other, replicas of heads included."""
    model, tier = model_of(turned=turned), dram()
    contents = contents_of(model)
    source, target = Side(model, writers), Side(model, readers)
    if writers <= 4:
        source.fill(contents)
    else:
        for number, binding in enumerate(source.bindings):
            for name, view in binding.views.items():
                whole = contents[name]
                view.copy_(whole if whole.shape == view.shape else whole[:, :, number // 2 : number // 2 + 1])
    assert source.save(tier, [11, 12, 13], [1, 8, 3]) == [[OK] * 3] * writers
    assert tier.stats()["records"] == 3 * 4
    assert target.load(tier, [13, 11], [5, 2]) == [[OK] * 2] * readers
    if readers <= 4:
        assert target.shows(contents, {5: 3, 2: 1})
    else:
        for number, binding in enumerate(target.bindings):
            head = contents["l1.kv", "v"][:, :, number // 2 : number // 2 + 1]
            assert torch.equal(binding.views["l1.kv", "v"][5], head[3])
            assert torch.equal(binding.views["l1.c", "c"][5], contents["l1.c", "c"][3])
    for side in (source, target):
        assert side.worker.stats()["staging_bytes"] == side.worker.stats()["operations"] == 0


def test_e3_a_page_is_ok_only_with_all_its_shards() -> None:
    """E3: one shard that is missing makes the page a miss, for whoever needs that shard."""
    tier, source, target = dram(), Side(MODEL, 2), Side(MODEL, 1)
    source.fill(contents_of(MODEL))
    worker = source.workers[0]
    op = worker.save(tier, source.part, keys([1]), np.array([1]), SaveClass.CACHEABLE, FOREVER)
    assert codes_of(op) == [OK]
    assert target.worker.shards(target.part) == 4
    assert target.load(tier, [1], [1]) == [[Code.MISS]]
    assert Side(MODEL, 2).load(tier, [1], [1]) == [[OK], [Code.MISS]]


def test_pages_are_moved_without_staging_when_they_can() -> None:
    """A page that is one run of bytes goes straight between memory and tier; the bytes are the payload's."""
    memory: list[bytearray] = []

    def allocate(size: int) -> bytearray:
        memory.append(bytearray(size))
        return memory[-1]

    tier, side = dram(allocate=allocate), Side(MODEL, max_tp=1)
    contents = contents_of(MODEL)
    side.fill(contents)
    assert side.worker.shards(side.part) == 1
    assert side.save(tier, [1], [4]) == [[OK]]
    arena = side.bindings[0].arenas["l0.kv"]
    block = arena.storage[arena.offset_bytes + 4 * arena.stride_bytes :][: 2 * (240 + 18)]
    assert bytes(block.numpy()) in bytes(memory[0])
    assert side.load(tier, [1], [7]) == [[OK]]
    assert side.shows(contents, {7: 4})


@pytest.mark.parametrize("max_tp", [1, 4])
def test_e7_damaged_records_are_never_ok(max_tp: int) -> None:
    """E7: a bit flipped anywhere, header or payload, is CORRUPT, counted, and forgotten by the tier."""
    memory: list[bytearray] = []

    def allocate(size: int) -> bytearray:
        memory.append(bytearray(size))
        return memory[-1]

    side, contents = Side(MODEL, max_tp=max_tp), contents_of(MODEL)
    side.fill(contents)
    rng = np.random.default_rng(3)
    corrupt = 0
    for _ in range(40):
        memory.clear()
        tier = dram(allocate=allocate)
        side.save(tier, [1, 2], [1, 2])
        used = [(chunk, at) for chunk in memory for at in range(len(chunk)) if chunk[at]]
        chunk, at = used[rng.integers(len(used))]
        chunk[at] ^= 1 << int(rng.integers(8))
        (codes,) = side.load(tier, [1, 2], [5, 6])
        assert sorted(codes) == [OK, Code.CORRUPT]
        corrupt += 1
        good = codes.index(OK)
        assert side.shows(contents, {5 + good: 1 + good})
        assert tier.stats()["quarantined"] == 1
        assert side.load(tier, [1, 2], [5, 6])[0][1 - good] == Code.MISS
        assert side.save(tier, [1, 2], [1, 2]) == [[OK, OK]]
        assert side.load(tier, [1, 2], [5, 6]) == [[OK, OK]]
    flaws = {name: count for name, count in side.worker.stats().items() if name.startswith("flaw_")}
    assert sum(flaws.values()) == corrupt
    assert side.worker.stats()["faults"] == 0


def test_h8_a_record_of_another_name_or_model_is_told_apart() -> None:
    """H8, D9: bytes under the wrong key, or of other weights, are refused with their own counters."""
    tier, side, other = dram(), Side(MODEL), Side(model_of(weights="b"))
    side.fill(contents_of(MODEL))
    side.save(tier, [1], [1])
    assert side.load(tier, [2], [2], asked=keys([1])) == [[Code.CORRUPT]]
    assert side.worker.stats()["flaw_wrong_key"] == 4
    side.save(tier, [1], [1])
    assert other.load(tier, [1], [2]) == [[Code.CORRUPT]]
    assert other.worker.stats()["flaw_other_fingerprint"] == 4


class Broken:
    """A tier that breaks its promises in one way; all else is the DRAM tier's."""

    def __init__(self, inner: DramTier, how: str) -> None:
        self._inner, self._how = inner, how

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def save(self, keys: RecordKeys, buffers: Buffers, cls: SaveClass, deadline: float, **more: Any) -> Op:
        """Raise, answer too little, or do as asked."""
        if self._how == "raises":
            raise OSError("tier down")
        if self._how == "short":
            return Pending.of(np.zeros(len(keys) + 1, np.uint8))
        return self._inner.save(keys, buffers, cls, deadline, **more)


@pytest.mark.parametrize("how", ["raises", "short"])
def test_r8_a_tier_that_breaks_its_promise_fails_pages_only(how: str) -> None:
    """R8, A15: the operation still ends once, as FAILED, with the reason kept and staging given back."""
    side = Side(MODEL)
    side.fill(contents_of(MODEL))
    broken: Any = Broken(dram(), how)
    assert side.save(broken, [1, 2], [1, 2]) == [[Code.FAILED] * 2]
    stats = side.worker.stats()
    assert (stats["operations"], stats["staging_bytes"], stats["save_failed"]) == (0, 0, 2)
    assert stats["faults"] == 4
    assert "tier down" in str(side.worker.faults[0]) or "codes" in str(side.worker.faults[0])


def test_bad_requests_are_refused_not_raised() -> None:
    """R4, E8: lengths that differ, repeated targets and ids out of range are REFUSED, and kept."""
    tier, side = dram(), Side(MODEL)
    assert side.save(tier, [1, 2], [1]) == [[Code.REFUSED] * 2]
    assert side.save(tier, [1], [0]) == [[Code.REFUSED]]
    assert side.save(tier, [1], [BLOCKS]) == [[Code.REFUSED]]
    side.save(tier, [1, 2], [1, 2])
    assert side.load(tier, [1, 2], [3, 3]) == [[Code.REFUSED] * 2]
    assert side.load(tier, [1], [BLOCKS]) == [[Code.REFUSED]]
    none = side.worker.load(
        tier, Lease.nothing("dram", 4), np.arange(3), side.part, keys([1]), np.array([1]), 0
    )
    assert codes_of(none) == [Code.REFUSED]
    assert all(isinstance(fault, UsageFault) for fault in side.worker.faults)
    assert side.worker.stats()["operations"] == 0


def test_c2_pages_are_read_after_their_writer() -> None:
    """C2: `after` runs before the first byte is read; if it raises nothing is saved."""
    tier, side, contents = dram(), Side(MODEL), contents_of(MODEL)
    assert side.save(tier, [1], [1], after=lambda: side.fill(contents)) == [[OK]]
    side.load(tier, [1], [2])
    assert side.shows(contents, {2: 1})

    def failing() -> None:
        raise RuntimeError("the step failed")

    assert side.save(tier, [2], [1], after=failing) == [[Code.FAILED]]
    assert side.load(tier, [2], [3]) == [[Code.MISS]]
    assert [str(fault) for fault in side.worker.faults] == ["the step failed"]


class Clock:
    """A clock that moves by one second at each look."""

    now_s = 0.0

    def __call__(self) -> float:
        """The time."""
        self.now_s += 1.0
        return self.now_s


def test_a9_no_batch_begins_after_the_deadline() -> None:
    """A9: batches in time are saved, later ones are EXPIRED; H1: each stands for itself."""
    tier, side = dram(clock=lambda: 0.0), Side(MODEL, max_tp=1, clock=Clock(), batch_bytes=1)
    assert side.save(tier, [1, 2, 3, 4], [1, 2, 3, 4], deadline=2.5) == [[OK, OK, Code.EXPIRED, Code.EXPIRED]]
    assert tier.stats()["records"] == 2


def test_h1_many_batches_equal_one() -> None:
    """H1: how an operation is cut into batches changes nothing, and long chains do not nest."""
    contents = contents_of(MODEL)
    pages = [1 + number % (BLOCKS - 1) for number in range(400)]
    for batch_bytes in (1, 2**20):
        tier, side = dram(), Side(MODEL, batch_bytes=batch_bytes)
        side.fill(contents)
        assert side.save(tier, pages, pages) == [[OK] * 400]
        assert side.load(tier, pages[: BLOCKS - 1], pages[: BLOCKS - 1][::-1]) == [[OK] * (BLOCKS - 1)]
        assert side.shows(contents, {BLOCKS - page: page for page in range(1, BLOCKS)})


def test_staging_is_bounded_and_everybody_gets_a_turn() -> None:
    """Operations that stage wait for each other's memory; all end, and the gauge returns to 0."""
    lane = ManualLane()
    tier, side = dram(lane=lane), Side(MODEL, batch_bytes=300, staging_bytes=500)
    contents = contents_of(MODEL)
    side.fill(contents)
    ops = [
        side.worker.save(tier, side.part, keys([page]), np.array([page]), SaveClass.CACHEABLE, FOREVER)
        for page in range(1, BLOCKS)
    ]
    highest = 0
    while lane.step():
        highest = max(highest, side.worker.stats()["staging_bytes"])
    assert 0 < highest <= 500
    assert [codes_of(op) for op in ops] == [[OK]] * (BLOCKS - 1)
    assert side.worker.stats()["staging_bytes"] == 0


def test_worker_and_tier_in_threads() -> None:
    """Own threads on both sides, many operations at once: all whole, gauges at 0, both close."""
    lane = ThreadLane("tier", workers=2)
    tier, side = dram(lane=lane), Side(MODEL, lane=None, batch_bytes=300, staging_bytes=700)
    contents = contents_of(MODEL)
    side.fill(contents)
    ops = [
        side.worker.save(
            tier, side.part, keys([page, 100 + page]), np.array([page, page]), SaveClass.HANDOFF, FOREVER
        )
        for page in range(1, 5)
    ]
    assert [codes_of(op) for op in ops] == [[OK, OK]] * 4
    assert side.load(tier, [101, 4], [5, 6]) == [[OK, OK]]
    assert side.shows(contents, {5: 1, 6: 4})
    assert tier.stats()["handoffs"] > 0
    assert side.worker.close(FOREVER)
    assert side.save(tier, [1], [1]) == [[Code.REFUSED]]
    assert tier.close(FOREVER)
    assert lane.close(30.0)


def test_c10_close_says_when_something_runs() -> None:
    """C10: close is bounded while copies have not ended; what runs still ends."""
    lane = ManualLane()
    tier, side = dram(), Side(MODEL, max_tp=1, lane=lane)
    op = side.worker.save(tier, side.part, keys([1]), np.array([1]), SaveClass.CACHEABLE, FOREVER)
    assert not side.worker.close(0.0)
    lane.drain()
    assert codes_of(op) == [OK]
    assert side.worker.close(FOREVER)


def test_g7_handoff_reaches_the_tier() -> None:
    """G7: the lease id of a handoff goes with the records, so that it can be released by name."""
    tier, side = dram(), Side(MODEL)
    side.save(tier, [1], [1], cls=SaveClass.HANDOFF, handoff="lease-1")
    assert tier.stats()["handoffs"] == 1
    tier.release_handoff("lease-1")
    assert tier.stats()["handoffs"] == 0


def test_e2_parts_have_records_and_identities_of_their_own() -> None:
    """E2: an optional group and another reach are parts with their own keys and memory."""
    model = model_of(groups=(Group(name="draft", optional=True), Group(name="local", reach=Window(tokens=4))))
    tier, side = dram(), Side(model)
    names = {part.name: part for part in side.worker.parts}
    assert set(names) == {"full", "window-4", "draft"}
    for number, part in enumerate(names.values()):
        op = side.worker.save(tier, part, keys([1]), np.array([1]), SaveClass.CACHEABLE, FOREVER)
        assert codes_of(op) == [OK]
        found = side.worker.record_keys(part, keys([1, 2]))
        with tier.lookup(found, FOREVER).value as lease:
            assert lease.present.reshape(2, -1).all(axis=1).tolist() == [True, False]
        assert tier.stats()["records"] == sum(
            side.worker.shards(other) for other in list(names.values())[: number + 1]
        )
    with pytest.raises(UsageFault, match="no binding for space"):
        Worker(model, layout(model), {}, max_tp=1, lane=InlineLane())


def exploding(src: dict[str, torch.Tensor], dst: dict[str, torch.Tensor]) -> None:
    """Plugin callable: works for blocks below a mark, found in the latent."""
    for name, view in dst.items():
        source = src[name]
        view.copy_(source if source.shape == view.shape else source.transpose(1, 2))
    if any(int(view.max()) == 255 for name, view in src.items() if name.endswith("/c")):
        raise ValueError("a value that cannot be stored")


def test_plugin_error_fails_its_batch_only() -> None:
    """What a plugin's callable raises becomes FAILED for its batch, with the plugin named."""
    model = model_of(convert="exploding")
    tier, side = dram(), Side(model, batch_bytes=1)
    contents = contents_of(model)
    contents["l0.c", "c"][2] = 255
    side.fill(contents)
    assert side.save(tier, [1, 2, 3], [1, 2, 3]) == [[OK, Code.FAILED, OK]]
    assert "exploding" in str(side.worker.faults[0])
    assert side.load(tier, [1, 3], [5, 6]) == [[OK, OK]]
    assert side.shows(contents, {5: 1, 6: 3})


def test_e2_the_groups_of_a_part_move_as_one() -> None:
    """E2: two required groups share a record: neither comes back without the other."""
    model = model_of(groups=(Group(name="index"),))
    tier, side, other = dram(), Side(model, max_tp=1), Side(model, max_tp=1)
    assert [part.groups for part in side.worker.parts] == [("kv", "index")]
    contents = contents_of(model)
    side.fill(contents)
    assert side.save(tier, [1, 2], [1, 2]) == [[OK, OK]]
    assert tier.stats()["records"] == 2
    with tier.lookup(side.worker.record_keys(side.part, keys([1])), FOREVER).value as lease:
        tier.discard(lease, np.arange(1))
    assert other.load(tier, [1, 2], [5, 6]) == [[Code.MISS, OK]]
    assert other.shows(contents, {6: 2})


def test_e2_an_optional_part_is_missed_alone_and_completed_later() -> None:
    """E2: without the optional record the page comes back, and that group's rows are as they were."""
    model = model_of(groups=(Group(name="draft", optional=True),))
    tier, side, other = dram(), Side(model, max_tp=1), Side(model, max_tp=1)
    part, draft = side.worker.parts
    contents = contents_of(model)
    side.fill(contents)
    other.bindings[0].views["draft", "c"].fill_(9)

    def save(what: Part) -> list[Code]:
        return codes_of(side.worker.save(tier, what, keys([1]), np.array([1]), SaveClass.CACHEABLE, FOREVER))

    def load(what: Part) -> list[Code]:
        with tier.lookup(other.worker.record_keys(what, keys([1])), FOREVER).value as lease:
            rows = np.arange(other.worker.shards(what))
            return codes_of(other.worker.load(tier, lease, rows, what, keys([1]), np.array([5]), FOREVER))

    assert save(part) == [OK]
    assert (load(part), load(draft)) == ([OK], [Code.MISS])
    assert bool((other.bindings[0].views["draft", "c"] == 9).all())
    assert save(draft) == [OK]
    assert load(draft) == [OK]
    assert other.shows(contents, {5: 1})


class Watched:
    """A tier that says which batches begin, and lets something happen at one of them."""

    def __init__(self, inner: DramTier, *, lends: bool) -> None:
        self._inner, self._lends = inner, lends
        self.begun: list[str] = []
        self.at: dict[int, Callable[[], object]] = {}

    def __getattr__(self, name: str) -> Any:
        if name not in ("reserve", "borrow"):
            return getattr(self._inner, name)
        if not self._lends:
            raise AttributeError(name)
        return self._reserve if name == "reserve" else self._borrow

    def _reserve(self, keys: RecordKeys, size: int, cls: SaveClass, deadline: float, **more: Any) -> Loan:
        return self._begin(cls.value, lambda: self._inner.reserve(keys, size, cls, deadline, **more))

    def _borrow(self, *args: Any) -> Loan:
        return self._begin("restore", lambda: self._inner.borrow(*args))

    def save(self, keys: RecordKeys, buffers: Buffers, cls: SaveClass, deadline: float, **more: Any) -> Op:
        """A batch of a save begins."""
        return self._begin(cls.value, lambda: self._inner.save(keys, buffers, cls, deadline, **more))

    def load(self, *args: Any) -> Op:
        """A batch of a restore begins."""
        return self._begin("restore", lambda: self._inner.load(*args))

    def _begin(self, what: str, work: Callable[[], T]) -> T:
        self.begun.append(what)
        self.at.pop(len(self.begun), lambda: None)()
        return work()


@pytest.mark.parametrize("form", ["one operation", "many"])
@pytest.mark.parametrize("kind", ["inline", "later", "lends"])
def test_copies_go_by_urgency(form: str, kind: str) -> None:
    """Whatever waits: a restore begins next, then a Handoff save, then Cacheable ones, then write-back."""
    lane = ManualLane()
    inner = dram(lane=lane if kind == "later" else InlineLane())
    side = Side(MODEL, max_tp=1, lane=lane, batch_bytes=1)
    watched = Watched(inner, lends=kind == "lends")
    tier: Any = watched

    def save(pages: list[int], cls: SaveClass) -> Op:
        name = "h" if cls is SaveClass.HANDOFF else None
        blocks = np.array([1 + page % (BLOCKS - 1) for page in pages])
        return side.worker.save(tier, side.part, keys(pages), blocks, cls, FOREVER, handoff=name)

    def restore() -> Op:
        wanted = side.worker.record_keys(side.part, keys([1, 2]))
        lease = tier.lookup(wanted, FOREVER).value
        args = (tier, lease, np.arange(2), side.part, keys([1, 2]), np.array([3, 4]), FOREVER)
        op = side.worker.load(*args)
        op.on_done(lambda _: lease.release())
        return op

    ops = [save([1, 2], SaveClass.CACHEABLE)]
    lane.drain()
    watched.begun.clear()

    def others() -> None:
        ops.extend(save([2000 + number], SaveClass.WRITE_BACK) for number in range(2))
        ops.extend(save([1000 + number], SaveClass.HANDOFF) for number in range(2))
        ops.append(restore())

    watched.at[3] = others
    pages = list(range(100, 200))
    ops += (
        [save(pages, SaveClass.CACHEABLE)]
        if form == "one operation"
        else [save([page], SaveClass.CACHEABLE) for page in pages]
    )
    lane.drain()
    assert watched.begun == [
        *["cacheable"] * 3,
        *["restore"] * 2,
        *["handoff"] * 2,
        *["cacheable"] * 97,
        *["write_back"] * 2,
    ]
    assert all(code == OK for op in ops for code in codes_of(op))


def test_equals_are_served_in_order() -> None:
    """Within a class whoever came first goes first."""
    lane = ManualLane()
    side, tier = Side(MODEL, max_tp=1, lane=lane), dram()
    order: list[int] = []
    for number in range(5):
        op = side.worker.save(
            tier, side.part, keys([number + 1]), np.array([1]), SaveClass.CACHEABLE, FOREVER
        )
        op.on_done(lambda _, number=number: order.append(number))
    lane.drain()
    assert order == [0, 1, 2, 3, 4]

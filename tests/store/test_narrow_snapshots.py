"""Snapshots in a narrower dtype than the state: another form on the device and in the tiers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcontract import (
    Arena,
    BlockPool,
    Field,
    Group,
    KvModel,
    KvStore,
    Rank,
    Scope,
    WeightIdentity,
)
from kvcontract.contract.check import check_model
from kvcontract.contract.snapshot import all_spaces
from kvcontract.contract.wire import fingerprint, parts, wire_record
from kvcontract.memory.binding import Binding
from kvcontract.memory.slots import copy_blocks
from kvcontract.pool.checkpoints import Checkpoints
from kvcontract.pool.request import RequestKv, admit
from kvcontract.pool.sides import make_sides
from kvcontract.store.policy import KvPrefix
from kvcontract.tiers.dram import DramTier

PAGE = 4
PROMPT = list(range(19))
BOUND = 2.0**-8


def model(**group: Any) -> KvModel:
    """Pages, and a state of two fields, of which one is narrowed."""
    told: dict[str, Any] = {"snapshot_dtype": "bfloat16", "snapshot_bound": BOUND, **group}
    fields = (
        Field(name="state", dtype="float32", axes={"dim": 64}),
        Field(name="count", dtype="int64", axes={"one": 1}),
    )
    return KvModel(
        contract=1,
        name="narrow",
        weights=WeightIdentity(kind="unresolved"),
        numerics="float32",
        page_tokens=PAGE,
        groups=(Group(name="kv"), Group(name="s", kind="bounded", **told)),
        arenas=(
            Arena.planes(name="kv", group="kv", fields=(Field(name="k", dtype="uint8", axes={"dim": 4}),)),
            Arena.planes(name="s", group="s", fields=fields),
        ),
    )


class Side:
    """A store over it."""

    def __init__(self, kv: KvModel) -> None:
        self.blocks = {space.key: 12 for space in all_spaces(kv)}
        self.memory = {space.key: Binding.allocate(space, self.blocks[space.key]) for space in all_spaces(kv)}
        self.pool = BlockPool(12, PAGE, sides=make_sides(kv, self.blocks, 64))
        self.tier = DramTier(1 << 20)
        self.store = KvStore(kv, [Rank(self.pool, self.memory)], [self.tier])

    def state(self, slot: int) -> torch.Tensor:
        """A live one."""
        return self.memory["slots-s"].views["s", "state"][slot]

    def run(self, prefix: KvPrefix | None = None) -> RequestKv:
        """The whole prompt; the state after 16 tokens is random, and checkpointed."""
        req = admit(
            self.pool,
            prompt_tokens=PROMPT,
            max_new_tokens=1,
            keyer=self.store.keyer,
            scope=Scope(),
            prefix=prefix,
            checkpoints=Checkpoints(PAGE, (16,)),
        )
        assert isinstance(req, RequestKv)
        while req.prefilling:
            chunk = req.schedule_prefill(99)
            copy_blocks(self.memory, chunk.copies)
            if chunk.start == 0:
                torch.manual_seed(1)
                self.state(chunk.slots["s"]).copy_(torch.randn(64))
                self.memory["slots-s"].views["s", "count"][chunk.slots["s"]] = 2**40 + 1
            req.apply_prefill(chunk, 1 if chunk.emits else None)
            self.store.checkpoint(req)
        return req


@pytest.mark.parametrize("source", ["device", "dram"])
def test_what_comes_back_is_within_the_bound_and_only_wider_fields_are_narrowed(source: str) -> None:
    """A restored state is the narrowed one, widened again; other fields come back bit for bit."""
    side = Side(model())
    with side.store:
        first = side.run()
        slot = first.beside.live_slots["s"]
        wanted = side.state(slot).clone()
        side.store.retire(first)
        assert side.store.flush("visible")
        if source == "dram":
            side.pool.clear()
        side.state(slot).fill_(float("nan"))
        prefix = side.store.resolve("0", PROMPT)
        assert (prefix.hit_tokens, set(prefix.sources)) == (16, {source})
        second = side.run(prefix)
        found = side.state(second.beside.live_slots["s"])
        assert torch.equal(found, wanted.bfloat16().float())
        assert ((found - wanted).abs() <= BOUND * wanted.abs()).all()
        assert int(side.memory["slots-s"].views["s", "count"][second.beside.live_slots["s"]]) == 2**40 + 1
        side.store.retire(second)
        side.pool.check_books()
    assert [pool.held for pool in side.pool.sides.pools] == [0, 0]


def test_a_narrower_snapshot_takes_less_and_is_other_content() -> None:
    """Half the bytes, and another fingerprint: it never meets snapshots that keep all bits."""
    wide, narrow = model(snapshot_dtype=None, snapshot_bound=None), model()
    sizes = [wire_record(kv, parts(kv)[-1]).payload_bytes for kv in (wide, narrow)]
    assert sizes == [64 * 4 + 8, 64 * 2 + 8]
    assert fingerprint(wide).required != fingerprint(narrow).required
    assert [part.space for part in parts(narrow)] == ["full", "snapshots-s"]


@pytest.mark.parametrize(
    ("group", "path"),
    [
        ({"snapshot_bound": None}, "groups[1].snapshot_bound"),
        ({"snapshot_dtype": None}, "groups[1].snapshot_bound"),
        ({"snapshot_dtype": "float64"}, "groups[1].snapshot_dtype"),
        ({"snapshot_dtype": "f16"}, "groups[1].snapshot_dtype"),
    ],
)
def test_i3_a_narrower_snapshot_says_how_lossy_it_is(group: dict[str, Any], path: str) -> None:
    """A bound if and only if something is narrowed (KVC-DECL-13)."""
    found = [(item.clause, item.path) for item in check_model(model(**group))]
    assert found == [("KVC-DECL-13", path)]
    assert not check_model(model())

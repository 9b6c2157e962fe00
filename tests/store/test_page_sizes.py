"""Engines of two page sizes that share records: what one writes the other hits, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvcontract import Arena, BlockPool, Field, Group, KvModel, KvStore, Rank, WeightIdentity, admit
from kvcontract.contract.layout import FieldLayout, held, layout
from kvcontract.contract.model import TOKEN_AXIS, Scope
from kvcontract.contract.wire import fingerprint, parts, wire_record
from kvcontract.core.lane import InlineLane
from kvcontract.memory.binding import Binding
from kvcontract.pool.keys import FleetSecret
from kvcontract.pool.request import RequestKv
from kvcontract.tiers.base import Buffers, Tier, record_keys
from kvcontract.tiers.disk import DiskTier
from kvcontract.tiers.dram import DramTier
from kvcontract.tiers.frame import header_bytes
from kvcontract.tiers.shared import SharedTier

RECORD, MAX_TP = 64, 2
SCOPE, SECRET = Scope(salt="tenant"), FleetSecret(bytes(range(32)))
TOKENS = np.random.default_rng(1).integers(0, 50_000, 3 * RECORD + 21).tolist()
UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def model_of(page_tokens: int) -> KvModel:
    """Keys and values by head, tokens outside and inside; rows of a latent, its scale, and nibbles."""

    def cut(name: str, **axes: int) -> Field:
        return Field(name=name, dtype="bfloat16", axes=axes, shard_axis="head")

    latent = (
        Field(name="c", dtype="float8_e4m3fn", axes={"dim": 12}),
        Field(name="s", dtype="float32", axes={"one": 1}),
        Field(name="n", dtype="int4", axes={"dim": 8}),
    )
    return KvModel(
        contract=1,
        name="toy",
        weights=WeightIdentity(kind="digest", value="0" * 32),
        numerics="test",
        page_tokens=page_tokens,
        key_tokens=RECORD,
        groups=(Group(name="kv"),),
        arenas=(
            Arena.planes(
                name="nhd", group="kv", layer=0, fields=(cut("k", head=4, dim=8), cut("v", head=4, dim=6))
            ),
            Arena.planes(name="hnd", group="kv", layer=1, fields=(cut("k", head=4, token=1, dim=8),)),
            Arena.rows(name="mla", group="kv", layer=2, fields=latent, align_bytes=4),
        ),
    )


class Engine:
    """A pool, memory of every worker, and a store over tiers."""

    def __init__(
        self, page_tokens: int, tiers: list[Tier], *, tp: int = 1, layer_first: bool = False
    ) -> None:
        self.model, self.page, pages = model_of(page_tokens), page_tokens, 1 + 4 * RECORD // page_tokens
        self.pool = BlockPool(pages, page_tokens)
        self.spaces = [layout(self.model, worker, tp).space("full") for worker in range(tp)]
        self.memory = []
        for space in self.spaces:
            if layer_first:
                raw = {a.name: torch.zeros(pages, a.content_bytes, dtype=torch.uint8) for a in space.arenas}
                self.memory.append(Binding.of(space, raw))
            else:
                self.memory.append(Binding.allocate(space, pages))
        rank = Rank(self.pool, [{"full": binding} for binding in self.memory])
        more: dict[str, Any] = {"secret": SECRET, "max_tp": MAX_TP, "save_budget": 1.0}
        self.store = KvStore(self.model, [rank], tiers, lane=InlineLane(), **more)

    def rows(self, pages: list[int]) -> Iterator[tuple[str, torch.Tensor, slice]]:
        """Per field and worker: its name, its rows, tokens first, and which heads they are of."""
        for worker, (space, binding) in enumerate(zip(self.spaces, self.memory, strict=True)):
            for arena in space.arenas:
                for field in arena.fields:
                    heads = slice(*held(4, worker, len(self.spaces))) if "head" in field.axes else slice(None)
                    blocks = self.view(binding, field)[pages].movedim(1 + field.axes.index(TOKEN_AXIS), 1)
                    yield f"{arena.name}.{field.name}", blocks.flatten(0, 1), heads

    def view(self, binding: Binding, field: FieldLayout) -> torch.Tensor:
        """A field of all blocks, as integers."""
        view = binding.views[field.arena, field.name]
        return view.view(UNITS[view.element_size()])

    def write(self, pages: list[int], content: dict[str, torch.Tensor]) -> None:
        """Write rows, as `rows` gives them."""
        for worker, (space, binding) in enumerate(zip(self.spaces, self.memory, strict=True)):
            for arena in space.arenas:
                for field in arena.fields:
                    whole = content[f"{arena.name}.{field.name}"]
                    if "head" in field.axes:
                        whole = whole[:, slice(*held(4, worker, len(self.spaces)))]
                    target = self.view(binding, field).movedim(1 + field.axes.index(TOKEN_AXIS), 1)
                    for number, page in enumerate(pages):
                        mine = whole[number * self.page : (number + 1) * self.page]
                        target[page, : len(mine)] = mine

    def run(self, content: dict[str, torch.Tensor]) -> int:
        """Compute the prompt and retire it; pages that were saved."""
        req = admit(self.pool, prompt_tokens=TOKENS, max_new_tokens=1, keyer=self.store.keyer, scope=SCOPE)
        assert isinstance(req, RequestKv)
        req.apply_prefill(req.schedule_prefill(len(TOKENS)), 5)
        self.write(req.pages.tolist(), content)
        saved = self.store.retire(req).wait(30.0).saved
        assert self.store.flush("visible")
        return saved

    def check_hit(self, content: dict[str, torch.Tensor], tier: str) -> None:
        """All whole records come from a tier, and every field of every worker is equal."""
        prefix = self.store.resolve("0", TOKENS, SCOPE)
        assert dict(prefix.sources) == {tier: 3 * RECORD}
        assert prefix.hold is not None
        assert len(prefix.hold.pages) == 3 * RECORD // self.page  # A13
        for name, found, heads in self.rows(prefix.hold.pages.tolist()):
            wanted = content[name][: 3 * RECORD]
            assert torch.equal(found, wanted[:, heads] if found.ndim > 2 else wanted), name
        prefix.release()
        self.pool.check_books()


@contextmanager
def engine(*args: Any, **more: Any) -> Iterator[Engine]:
    """One that closes, with nothing left."""
    made = Engine(*args, **more)
    try:
        yield made
    finally:
        assert made.store.close().drained


def content_of() -> dict[str, torch.Tensor]:
    """Random rows of every field, all bit patterns; tokens first."""
    made = torch.Generator().manual_seed(3)
    shapes = {"nhd.k": (4, 8), "nhd.v": (4, 6), "hnd.k": (4, 8), "mla.c": (12,), "mla.s": (1,), "mla.n": (4,)}
    units = {"mla.c": torch.uint8, "mla.s": torch.int32, "mla.n": torch.uint8}
    found = {}
    for name, shape in shapes.items():
        unit = units.get(name, torch.int16)
        info = torch.iinfo(unit)
        size = (len(TOKENS), *shape)
        found[name] = torch.randint(info.min, info.max, size, generator=made, dtype=torch.int64).to(unit)
    return found


CONTENT = content_of()
DIRECTIONS = [(16, 64), (64, 16), (16, 32), (32, 16)]


def test_d1_two_page_sizes_have_one_identity_and_equal_records() -> None:
    """D1, D6: fingerprint, record keys, and every stored byte are the same; page keys are not."""
    one, other = model_of(16), model_of(64)
    assert fingerprint(one) == fingerprint(other)
    for shard in range(2):
        records = [wire_record(model, parts(model)[0], shard, 2) for model in (one, other)]
        assert records[0] == records[1]
    stored = []
    for page in (16, 64):
        tier = DramTier(1 << 24, lane=InlineLane())
        with engine(page, [tier]) as made:
            assert made.run(CONTENT) == 3 * RECORD // page
            names = made.store.record_keyer.chain(TOKENS, SCOPE)
            part = parts(made.model)[0]
            keys = np.concatenate([record_keys(names, part.id, shard, MAX_TP) for shard in range(MAX_TP)])
            with tier.lookup(keys, math.inf).wait(5.0) as lease:
                assert lease.present.all()
                sizes = [
                    record.payload_bytes + header_bytes(len(record.segments))
                    for record in (wire_record(made.model, part, n, MAX_TP) for n in range(MAX_TP))
                ]
                buffers = [np.zeros(size, np.uint8) for size in sizes for _ in names]
                codes = tier.load(lease, np.arange(len(keys)), Buffers.of(buffers), math.inf).wait(5.0)
            assert not codes.any()
            stored.append((made.store.keyer.chain(TOKENS, SCOPE)[0].tolist(), keys, buffers))
    (first, *mine), (second, *theirs) = stored
    assert first != second
    assert (mine[0] == theirs[0]).all()
    assert all(np.array_equal(*pair) for pair in zip(mine[1], theirs[1], strict=True))


@pytest.mark.parametrize("layer_first", [(False, False), (True, True), (True, False), (False, True)])
@pytest.mark.parametrize("tp", [(1, 2), (2, 1), (1, 1)])
@pytest.mark.parametrize(("writer", "reader"), DIRECTIONS[:2])
def test_what_one_page_size_writes_the_other_hits_in_a_shared_directory(
    writer: int, reader: int, tp: tuple[int, int], layer_first: tuple[bool, bool], tmp_path: Path
) -> None:
    """Design: P at 16 and D at 64 meet on 64, whatever their memory and degree, while both run."""
    meta = {"max_tp": MAX_TP}
    one, other = (SharedTier(tmp_path, 1 << 24, meta=meta, lane=InlineLane()) for _ in range(2))
    with (
        engine(writer, [one], tp=tp[0], layer_first=layer_first[0]) as first,
        engine(reader, [other], tp=tp[1], layer_first=layer_first[1]) as second,
    ):
        assert first.run(CONTENT) == 3 * RECORD // writer
        second.check_hit(CONTENT, "shared")


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("writer", "reader"), DIRECTIONS)
def test_r7_a_disk_is_reopened_at_another_page_size(
    writer: int, reader: int, tp: int, tmp_path: Path
) -> None:
    """R7: what an engine leaves on disk, its successor with other pages has."""
    meta = {"max_tp": MAX_TP}
    with engine(writer, [DiskTier(tmp_path, 1 << 24, meta=meta, direct=False)]) as first:
        assert first.run(CONTENT) == 3 * RECORD // writer
        assert first.store.flush("durable")
    with engine(reader, [DiskTier(tmp_path, 1 << 24, meta=meta, direct=False)], tp=tp) as second:
        second.check_hit(CONTENT, "disk")

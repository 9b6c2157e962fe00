"""A window that an engine keeps as a ring in one slot: kept in pages, shared with engines that page it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvcontract import (
    Arena,
    BlockPool,
    Field,
    FleetSecret,
    Group,
    KvModel,
    KvStore,
    Rank,
    Scope,
    WeightIdentity,
    Window,
)
from kvcontract.contract.check import check_model
from kvcontract.contract.model import Axes
from kvcontract.contract.snapshot import all_spaces
from kvcontract.contract.wire import fingerprint
from kvcontract.memory.binding import Binding
from kvcontract.memory.slots import copy_blocks
from kvcontract.pool.checkpoints import Checkpoints
from kvcontract.pool.request import Chunk, RequestKv, admit
from kvcontract.pool.sides import make_sides
from kvcontract.store.policy import KvPrefix
from kvcontract.tiers.shared import SharedTier

PAGE, WINDOW, ROWS = 4, 9, 20
SECRET = FleetSecret(b"s" * 32)


def model(form: str, *, rows: int = ROWS, key_tokens: int | None = None, **group: Any) -> KvModel:
    """Full attention, and a window in one form or the other."""
    axes = [("head", 2), ("dim", 3)]
    ring = form == "ring"
    near = tuple(
        Field(name=name, dtype="float16", axes=Axes([("token", rows), *axes] if ring else axes))
        for name in "kv"
    )
    told: dict[str, Any] = {"kind": "bounded"} if ring else {}
    return KvModel(
        contract=1,
        name="near",
        weights=WeightIdentity(kind="digest", value="0" * 32),
        numerics="float16",
        page_tokens=PAGE,
        key_tokens=key_tokens,
        groups=(Group(name="full"), Group(name="near", reach=Window(tokens=WINDOW), **told, **group)),
        arenas=(
            Arena.planes(name="full", group="full", fields=(Field(name="k", dtype="uint8", axes={"d": 2}),)),
            Arena.planes(name="near", group="near", fields=near),
        ),
    )


class Engine:
    """Writes rows whose values tell their tokens, in one form or the other."""

    def __init__(self, form: str, folder: Path, **more: Any) -> None:
        self.form, self.kv = form, model(form, **more)
        blocks = {space.key: 40 for space in all_spaces(self.kv)}
        self.memory = {space.key: Binding.allocate(space, blocks[space.key]) for space in all_spaces(self.kv)}
        self.pool = BlockPool(40, PAGE, sides=make_sides(self.kv, blocks, 64))
        self.store = KvStore(
            self.kv, [Rank(self.pool, self.memory)], [SharedTier(folder, 1 << 24)], secret=SECRET
        )

    def row(self, chunk: Chunk, name: str, at: int) -> torch.Tensor:
        """Where a token's row lies."""
        if self.form == "ring":
            return self.memory["slots-near"].views["near", name][chunk.slots["near"], at % ROWS]
        page = int(chunk.pages[f"window-{WINDOW}"][at // PAGE])
        return self.memory[f"window-{WINDOW}"].views["near", name][page, at % PAGE]

    def run(self, tokens: list[int], prefix: KvPrefix | None = None, size: int = 7) -> RequestKv:
        """Run a prompt; before each step everything that it reads is looked at."""
        req = admit(
            self.pool,
            prompt_tokens=tokens,
            max_new_tokens=1,
            keyer=self.store.keyer,
            scope=Scope(),
            prefix=prefix,
            checkpoints=Checkpoints(self.pool.sides.granule_tokens, (16, len(tokens) // 8 * 8)),
        )
        assert isinstance(req, RequestKv)
        while req.prefilling:
            chunk = req.schedule_prefill(size)
            copy_blocks(self.memory, chunk.copies)
            for at in range(max(0, chunk.start - (WINDOW - 1)), chunk.start):
                for name in "kv":
                    assert torch.equal(self.row(chunk, name, at), value(tokens, at, name)), (at, name)
            for at in range(chunk.start, chunk.end):
                for name in "kv":
                    self.row(chunk, name, at).copy_(value(tokens, at, name))
            req.apply_prefill(chunk, 1 if chunk.emits else None)
            self.store.seal(req)
        return req

    def serve(self, tokens: list[int]) -> int:
        """One request; what it hit."""
        prefix = self.store.resolve("0", tokens)
        self.store.retire(self.run(tokens, prefix)).wait(10.0)
        assert self.store.flush("visible")
        self.pool.check_books()
        return prefix.hit_tokens


def value(tokens: list[int], at: int, name: str) -> torch.Tensor:
    """What a token leaves: a pure function of all tokens so far."""
    seed = hash((tuple(tokens[: at + 1]), name)) % 2**31
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1000, (2, 3), generator=generator).half()


def tokens_of(length: int) -> list[int]:
    """A prompt."""
    return np.random.default_rng(0).integers(0, 999, length).tolist()


@pytest.mark.parametrize("key_tokens", [None, 8])
@pytest.mark.parametrize(("first", "second"), [("ring", "paged"), ("paged", "ring"), ("ring", "ring")])
def test_both_forms_of_a_window_share_records_and_give_the_same_hits(
    first: str, second: str, key_tokens: int | None, tmp_path: Path
) -> None:
    """The same fingerprint, the same records, the same hits, and the same rows, whoever wrote them."""
    prompt = tokens_of(45)
    writer = Engine(first, tmp_path / "store", key_tokens=key_tokens)
    reader = Engine(second, tmp_path / "store", key_tokens=key_tokens)
    assert fingerprint(writer.kv) == fingerprint(reader.kv)
    with writer.store, reader.store:
        assert writer.serve(prompt) == 0
        assert reader.serve(prompt) == 40
        assert writer.serve(prompt) == (40 if first == "ring" or key_tokens else 44)  # on its own device
        assert reader.serve(prompt[:18]) == 16
        reader.pool.clear()
        assert reader.serve(prompt[:18]) == 16


def test_pages_that_two_checkpoints_share_are_kept_once(tmp_path: Path) -> None:
    """A deeper checkpoint copies the pages that are new."""
    engine = Engine("ring", tmp_path / "store")
    with engine.store:
        engine.serve(tokens_of(21))
        engine.serve(tokens_of(25))  # begins at 16
        kept = engine.pool.sides.slots[0].index
        assert kept.cached == 4  # before 16 tokens pages 2 and 3 are needed, before 24 pages 4 and 5
        engine.serve([*tokens_of(24), 7, 7, 7, 7, 7])
        assert kept.cached == 4
    assert kept.held == 0


@pytest.mark.parametrize(
    ("rows", "key_tokens", "more"),
    [
        (12, 8, {}),
        (8, None, {}),
        (18, None, {}),
        (ROWS, None, {"snapshot_dtype": "float8_e5m2", "snapshot_bound": 0.3}),
    ],
)
def test_i3_a_ring_that_cannot_be_unrolled_is_refused_with_the_rows_needed(
    rows: int, key_tokens: int | None, more: dict[str, Any]
) -> None:
    """KVC-DECL-13: too few rows for whole records, or rows that are no pages; a narrower form beside."""
    found = {item.clause for item in check_model(model("ring", rows=rows, key_tokens=key_tokens, **more))}
    assert found == {"KVC-DECL-13"}
    assert not check_model(model("ring"))

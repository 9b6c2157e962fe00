"""What bounded state costs: hits against keeping every snapshot, and prefill with and without checkpoints.

    python benchmarks/hybrid.py [--json PATH|-] [--rounds N] [--only hits|prefill] [--tokens N]

Hits: 16 conversations of 8 turns over 3 shared system prompts of 1,024 to 4,096 tokens; a turn is a message
of 64 to 1,024 tokens and an answer of 64; seed 0, conversations shuffled, turns in order.  The best possible
keeps a snapshot at every boundary of every prompt and answer; ours has slots for a tenth of those.
Prefill: a cold prompt of a small Qwen3.5 (random weights) in chunks of 2,048 tokens, with checkpoints and
without, time to the first token and forward passes.  Exit code 1: a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from paired import Case, Row, measure, publish, versions

from kvcontract import Arena, BlockPool, Field, Group, KvModel, KvStore, Rank, Scope, WeightIdentity, admit
from kvcontract.contract.layout import layout
from kvcontract.core.launch import Source, launch
from kvcontract.core.shrink import shrink
from kvcontract.engine.build import Assembly, EngineLimits, assemble
from kvcontract.engine.checkpoint import random_model
from kvcontract.memory.binding import Binding
from kvcontract.pool.checkpoints import CheckpointPolicy
from kvcontract.pool.request import RequestKv
from kvcontract.pool.sides import make_sides

PAGE, BOUNDARY = 16, 64
CONVERSATIONS, TURNS, SYSTEMS = 16, 8, 3
SYSTEM_TOKENS, TURN_TOKENS, ANSWER_TOKENS = (1024, 4096), (64, 1024), 64
CHUNK = 2048
HIT_BAR, MEMORY_SHARE = 0.9, 0.1
PREFILL_BAR, MOST_EXTRA = 1.03, 1
VOCAB, SMALL_VOCAB = 150_000, 500
MOST_TOKENS = 65_536
SCOPE = Scope()
ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "tests" / "configs" / "qwen3.5-4b.json"
OFF = CheckpointPolicy(prompt_end=False, branches=False, every_tokens=None, decoding=False)
Ids = npt.NDArray[np.int64]

MODEL = KvModel(
    contract=1,
    name="benchmark",
    weights=WeightIdentity(kind="unresolved"),
    numerics="uint8",
    page_tokens=PAGE,
    groups=(Group(name="kv"), Group(name="state", kind="bounded", boundary_tokens=BOUNDARY)),
    arenas=tuple(
        Arena.planes(name=name, group=name, fields=(Field(name="x", dtype="uint8", axes={"dim": 16}),))
        for name in ("kv", "state")
    ),
)


# Hits


@dataclass(frozen=True, slots=True)
class Turn:
    """One request.

    Attributes:
        prompt: all that was said so far, and a new message.
        answer: what the model says.
    """

    prompt: Ids
    answer: Ids


def conversations() -> list[Turn]:
    """All requests in the order in which they come."""
    rng = np.random.default_rng(0)

    def drawn(bounds: tuple[int, int]) -> Ids:
        return rng.integers(0, VOCAB, int(rng.integers(bounds[0], bounds[1] + 1)))

    systems = [drawn(SYSTEM_TOKENS) for _ in range(SYSTEMS)]
    by_conversation: list[Iterator[Turn]] = []
    for number in range(CONVERSATIONS):
        said, turns = systems[number % SYSTEMS], []
        for _ in range(TURNS):
            prompt = np.concatenate([said, drawn(TURN_TOKENS)])
            answer = rng.integers(0, VOCAB, ANSWER_TOKENS)
            turns.append(Turn(prompt, answer))
            said = np.concatenate([prompt, answer])
        by_conversation.append(iter(turns))
    order = rng.permutation(np.repeat(np.arange(CONVERSATIONS), TURNS))
    return [next(by_conversation[number]) for number in order.tolist()]


def best_possible(turns: list[Turn]) -> tuple[int, int]:
    """Hit tokens, and how many snapshots that keeps: one at every boundary of everything that was run."""
    kept: set[bytes] = set()
    hits = 0
    for turn in turns:
        names = [turn.prompt[:end].tobytes() for end in range(BOUNDARY, len(turn.prompt), BOUNDARY)]
        deepest = next((at for at in range(len(names), 0, -1) if names[at - 1] in kept), 0)
        hits += deepest * BOUNDARY
        run = np.concatenate([turn.prompt, turn.answer[:-1]])
        kept.update(run[:end].tobytes() for end in range(BOUNDARY, len(run) + 1, BOUNDARY))
    return hits, len(kept)


def hits_of_ours(turns: list[Turn], slots: int) -> tuple[int, dict[str, int]]:
    """Hit tokens of a store with so many slots for snapshots, and its counters."""
    pages = 1 + sum(len(turn.prompt) + len(turn.answer) for turn in turns) // PAGE
    blocks = {"full": pages, "slots-state": slots + 2}  # and the live one, and the padding
    pool = BlockPool(pages, PAGE, sides=make_sides(MODEL, blocks, CHUNK))
    spaces = layout(MODEL).spaces
    memory = {space.key: Binding.allocate(space, blocks[space.key]) for space in spaces}
    hits = 0
    with KvStore(MODEL, [Rank(pool, memory)]) as store:
        for turn in turns:
            prefix = store.resolve("0", turn.prompt)
            hits += prefix.hit_tokens
            wanted = CheckpointPolicy().of(BOUNDARY, len(turn.prompt), prefix.branches)
            req = admit(
                pool,
                prompt_tokens=turn.prompt,
                max_new_tokens=len(turn.answer),
                keyer=store.keyer,
                scope=SCOPE,
                prefix=prefix,
                checkpoints=wanted,
            )
            if not isinstance(req, RequestKv):
                raise SystemExit(f"not admitted: {req}")
            _run(store, req, turn)
        return hits, dict(store.stats().counters)


def _run(store: KvStore, req: RequestKv, turn: Turn) -> None:
    while not req.finished:
        start = req.committed_tokens
        chunk = req.schedule_prefill(CHUNK - start % CHUNK) if req.prefilling else req.schedule_decode()
        token = int(turn.answer[req.new_tokens]) if chunk.emits else None
        req.apply_prefill(chunk, token)
        if req.checkpoint is not None:
            store.seal(req)
    store.retire(req)


def hit_rows() -> list[Row]:
    """Hit tokens beside the best possible."""
    turns = conversations()
    best, snapshots = best_possible(turns)
    slots = int(snapshots * MEMORY_SHARE)
    rows = []
    for count, bar in ((slots, HIT_BAR), (slots // 4, None)):
        ours, counters = hits_of_ours(turns, count)
        note = f"{count} snapshots of {snapshots}; {counters['checkpoints_taken']} taken"
        ratio = ours / best
        row = Row(f"hit tokens, {len(turns)} requests", "tokens", float(ours), float(best), ratio, note=note)
        row.bar, row.ok, row.rounds = bar, bar is None or ratio >= bar, 1
        rows.append(row)
    return rows


# Prefill


class Prefill:
    """A small hybrid model, with checkpoints or without.

    Args:
        on: with.
        tokens: of a prompt.
    """

    def __init__(self, tokens: int, *, on: bool) -> None:
        self.tokens = tokens
        self.rng = np.random.default_rng(1)
        self.passes: list[int] = []
        model, layers, network = small_model()
        pages = 4 * (tokens // PAGE + 2)
        self.parts: Assembly = assemble(
            model,
            layers,
            hf_model=network,
            pages=pages,
            limits=EngineLimits(max_batch_tokens=CHUNK, max_chunk_tokens=CHUNK, max_requests=2),
            beside={"slots-gdn": 16},
            checkpoints=CheckpointPolicy() if on else OFF,
        )

    def __call__(self) -> float:
        """Seconds to the first token of a cold prompt."""
        prompt = self.rng.integers(3, SMALL_VOCAB, self.tokens)
        start = time.perf_counter()
        request = self.parts.engine.submit(prompt, 1)
        result = self.parts.engine.run()[request]
        seconds = time.perf_counter() - start
        if result.hit_tokens or len(result.tokens) != 1:
            raise SystemExit(f"not a cold prompt: {result.hit_tokens} tokens hit, {result.reason}")
        self.passes.append(len(result.split))
        return seconds


def small_model() -> tuple[KvModel, Any, torch.nn.Module]:
    """The declaration of a small Qwen3.5, its map, and the network."""
    config = dict(shrink(json.loads(CONFIG.read_text())).config)
    config["text_config"] = {**config["text_config"], "max_position_embeddings": MOST_TOKENS}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        found = launch(Source("qwen35", config=path), options={"kv_dtype": "float32"})
    return found.model, found.plugin.call("kvc_executor", found.ctx), random_model(config, seed=0)


def prefill_rows(rounds: int, tokens: int) -> list[Row]:
    """Cold time to the first token, and forward passes, with checkpoints and without."""
    on, off = Prefill(tokens, on=True), Prefill(tokens, on=False)
    try:
        row = measure(
            Case(f"cold prefill of {tokens:,} tokens", on, off, bar=PREFILL_BAR, sense="at most"), rounds
        )
        extra = max(on.passes) - max(off.passes)
        row.note = f"{max(on.passes)} passes, {max(off.passes)} without"
        passes = Row("extra forward passes a prompt", "", float(extra), note=f"at most {MOST_EXTRA}")
        passes.ok = extra <= MOST_EXTRA
        taken = on.parts.store.stats().counters["checkpoints_taken"] if on.parts.store is not None else 0
        if not taken:
            raise SystemExit("no checkpoint was taken")
        return [row, passes]
    finally:
        on.parts.close()
        off.parts.close()


def main() -> int:
    """Run the rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=("hits", "prefill"))
    parser.add_argument("--tokens", type=int, default=8500)
    given = parser.parse_args()
    rows: list[Row] = []
    if given.only != "prefill":
        rows += hit_rows()
    if given.only != "hits":
        rows += prefill_rows(given.rounds, given.tokens)
    return publish(rows, versions("numpy", "torch", "transformers"), "Hybrid models", given.json)


if __name__ == "__main__":
    sys.exit(main())

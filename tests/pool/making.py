"""Short ways to make what the tests of the pool need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcontract.contract.model import Scope
from kvcontract.pool import (
    BlockPool,
    Chunk,
    Entitlement,
    FleetSecret,
    Hold,
    Keyer,
    MediaItem,
    RequestKv,
    Reservation,
    admit,
)

SECRET = FleetSecret(b"s" * 16)
KEYER = Keyer(b"model", SECRET, 4)


@dataclass
class Prefix:
    """What a store's resolve gives."""

    hold: Hold | None
    hit_tokens: int


def chain(count: int, seed: int = 1) -> np.ndarray:
    """Keys of a chain of `count` pages."""
    return np.random.default_rng(seed).integers(1, 2**63, (count, 2), np.uint64)


def admitted(pool: BlockPool, pages: int, hold: Hold | None = None) -> Entitlement:
    """A request that must be admitted."""
    answer = pool.try_admit(pages, hold)
    assert isinstance(answer, Entitlement)
    return answer


def reserved(pool: BlockPool, pages: int) -> Reservation:
    """A reservation that must be granted."""
    answer = pool.reserve(pages)
    assert answer is not None
    return answer


def cache(pool: BlockPool, keys: np.ndarray) -> list[int]:
    """Leave a chain cached; returns its pages."""
    hit = pool.match(keys)
    request = admitted(pool, len(keys), hit)
    pool.draw(request, len(keys) - hit.hit_pages)
    pool.register(request, keys[hit.hit_pages :])
    pages = request.pages.tolist()
    pool.release(request)
    pool.check_books()
    return pages


def request(
    pool: BlockPool,
    prompt: int | Sequence[int] = 10,
    new: int = 3,
    *,
    prefix: Prefix | None = None,
    scope: Scope | None = None,
    keyer: Keyer = KEYER,
    media: Sequence[MediaItem] = (),
    **more: Any,
) -> RequestKv:
    """An admitted request, over tokens 0, 1, 2, ... if only their number is given."""
    answer = admit(
        pool,
        prompt_tokens=range(prompt) if isinstance(prompt, int) else prompt,
        max_new_tokens=new,
        keyer=keyer,
        scope=scope or Scope(),
        prefix=prefix,
        media=media,
        **more,
    )
    assert isinstance(answer, RequestKv)
    return answer


def resolve(pool: BlockPool, tokens: int, scope: Scope | None = None, keyer: Keyer = KEYER) -> Prefix:
    """The resident prefix of tokens 0, 1, 2, ..."""
    hold = pool.match(keyer.chain(range(tokens), scope or Scope()))
    return Prefix(hold, keyer.page_tokens * hold.hit_pages)


def next_token(req: RequestKv) -> int:
    """A "model": what is sampled depends on all tokens so far."""
    known = req.tokens
    return int(known.sum() * 31 + len(known)) % 1000 + 1000


def prefill(req: RequestKv, max_tokens: int = 1 << 20) -> list[Chunk]:
    """Run what is known."""
    chunks = []
    while req.prefilling:
        chunk = req.schedule_prefill(max_tokens)
        req.apply_prefill(chunk, next_token(req) if chunk.emits else None)
        chunks.append(chunk)
    return chunks


def decode(req: RequestKv, steps: int = 1 << 20) -> list[Chunk]:
    """Decode to the end, or some steps."""
    chunks: list[Chunk] = []
    while not req.finished and len(chunks) < steps:
        chunk = req.schedule_decode()
        req.apply_decode(chunk, next_token(req))
        chunks.append(chunk)
    return chunks


def books_of(pool: BlockPool) -> dict[str, bytes]:
    """Every array and counter of the books that must come back when a step is undone."""
    books = pool._books
    arrays = ("state", "refs", "pins", "reset", "order", "ring")
    free = books.free_pages[: books.free]
    counters = repr((books.free, books.cached, books.held, books.pinned, pool.gauges()))
    return {
        **{name: getattr(books, name).tobytes() for name in arrays},
        "free": free.tobytes(),
        "n": counters.encode(),
    }

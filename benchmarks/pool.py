"""Keys and pool against vLLM's and SGLang's, and against themselves at other sizes.

    python benchmarks/pool.py [--json PATH|-] [--rounds N] [--no-peers] [--tokens N]

A prompt of 131,072 tokens at page 16 is 8,192 pages of a pool of 65,536, all of which hold something: hits,
names, frees and evictions happen in a full pool, as in service.  The peers come from their wheels
(`peers.py`); the first run installs them into `.bench-venv` inside the clone.  Exit code 1: a bar is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from paired import Case, Row, Timed, measure, publish, versions
from peers import NoPeer, Sglang, Vllm

from kvcontract import BlockPool, FleetSecret, Keyer, Scope
from kvcontract.core.jit import warm_up
from kvcontract.pool import Content, Entitlement, EventLog

PAGE = 16
POOL_PAGES = 65_536
TOKENS = 131_072
SCOPE = Scope()
KEYER = Keyer(b"benchmark", FleetSecret(b"benchmark secret"), PAGE)
RNG = np.random.default_rng(1)
Ids = npt.NDArray[np.int32]
Keys = npt.NDArray[np.uint64]


def timed(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def prompt(tokens: int) -> Ids:
    """Random token ids."""
    return RNG.integers(0, 150_000, tokens).astype(np.int32)


def some_keys(pages: int) -> Keys:
    """Keys that nothing has yet."""
    return RNG.integers(1, 2**63, (pages, 2), np.uint64)


class Ours:
    """One pool, full of cached pages, and the verbs to time.

    Args:
        pages: usable pages.
        ids: a prompt that stays cached.
        events: told, if given.
    """

    def __init__(self, pages: int, ids: Ids, events: EventLog | None = None) -> None:
        self.pool = BlockPool(pages + 1, PAGE, events=events)
        self.ids = ids
        self.listed: list[int] = []
        self.count = len(ids) // PAGE
        self.log = events
        self.cycle(KEYER.chain(ids, SCOPE))
        while self.pool.free >= self.count:
            self.cycle(some_keys(self.count))

    def hash(self) -> float:
        """Derive the keys."""
        return timed(lambda: KEYER.chain(self.ids, SCOPE))

    def match(self) -> float:
        """Derive the keys, find and pin the pages."""
        return self._match(self.ids)

    def match_list(self) -> float:
        """The same from a list of ints."""
        self.listed = self.listed or self.ids.tolist()
        return self._match(self.listed)

    def _match(self, ids: Ids | list[int]) -> float:
        start = time.perf_counter()
        hold = self.pool.match(KEYER.chain(ids, SCOPE))
        seconds = time.perf_counter() - start
        if hold.hit_pages != self.count:
            raise RuntimeError(f"{hold.hit_pages} of {self.count} pages hit")
        hold.release()
        return seconds

    def cycle(self, keys: Keys | None = None) -> dict[str, float]:
        """Draw (evicting when full), register, release; seconds of each."""
        names = some_keys(self.count) if keys is None else keys
        content = None if self.log is None else Content(np.zeros(self.count * PAGE, np.int64))
        request = self.admitted()
        found = {
            "draw": timed(lambda: self.pool.draw(request, self.count)),
            "register": timed(lambda: self.pool.register(request, names, content)),
            "release": timed(request.release),
        }
        if self.log is not None:
            self.log.take()
        return found

    def admitted(self) -> Entitlement:
        """A request for as many pages as the prompt has."""
        answer = self.pool.try_admit(self.count)
        if not isinstance(answer, Entitlement):
            raise TypeError(f"not admitted: {answer}")
        return answer

    def verb(self, name: str) -> Timed:
        """Time one verb; the prompt is made recent first, so that it is never what is evicted."""

        def run() -> float:
            self.pool.match(KEYER.chain(self.ids, SCOPE)).release()
            return self.cycle()[name]

        return run


class Theirs:
    """vLLM's pool, filled in the same way.

    Args:
        ids: a prompt that stays cached.
    """

    def __init__(self, ids: Ids) -> None:
        self.vllm = Vllm(POOL_PAGES, PAGE)
        self.empty = Vllm(POOL_PAGES, PAGE).pool
        self.count = len(ids) // PAGE
        self.listed = [*ids.tolist(), 1]  # one token stays to compute: all pages can hit
        self.vllm.fill(self.listed)
        while len(self.vllm.pool.cached_block_hash_to_block) + self.count <= POOL_PAGES:
            self.cycle()

    def hash(self) -> float:
        """Its sha256 over the request's blocks."""
        request = self.vllm.request(self.listed)
        return timed(lambda: self.vllm.hasher(request))

    def match(self) -> float:
        """Hash, look up, and take the blocks out of the free queue."""
        request, vllm = self.vllm.request(self.listed), self.vllm
        start = time.perf_counter()
        request.block_hashes.extend(vllm.hasher(request))
        blocks = vllm.manager.get_computed_blocks(request)[0].blocks[0]
        vllm.pool.touch(blocks)
        seconds = time.perf_counter() - start
        if len(blocks) != self.count:
            raise RuntimeError(f"{len(blocks)} of {self.count} blocks hit")
        vllm.pool.free_blocks(reversed(blocks))
        return seconds

    def cycle(self) -> dict[str, float]:
        """Get blocks (evicting when full), name them, free them; seconds of each."""
        pool = self.vllm.pool
        request = self.vllm.request(self.listed)
        request.block_hashes.extend(RNG.bytes(32) for _ in range(self.count))
        start = time.perf_counter()
        blocks = pool.get_new_blocks(self.count)
        drawn = time.perf_counter()
        self.vllm.register(request, blocks)
        named = time.perf_counter()
        pool.free_blocks(reversed(blocks))
        end = time.perf_counter()
        return {"draw": drawn - start, "register": named - drawn, "release": end - named}

    def verb(self, name: str) -> Timed:
        """Time one verb; the prompt is made recent first."""

        def run() -> float:
            self.match()
            return self.cycle()[name]

        return run

    def allocate_and_free(self) -> float:
        """Blocks of an empty pool, and back."""
        start = time.perf_counter()
        blocks = self.empty.get_new_blocks(self.count)
        self.empty.free_blocks(reversed(blocks))
        return time.perf_counter() - start

    def allocate(self) -> float:
        """Blocks of an empty pool."""
        start = time.perf_counter()
        blocks = self.empty.get_new_blocks(self.count)
        seconds = time.perf_counter() - start
        self.empty.free_blocks(reversed(blocks))
        return seconds


def allocate_and_free(pool: BlockPool, pages: int, *, both: bool) -> Timed:
    """Draw pages of an empty pool, and back; the time of both, or of the draw."""

    def run() -> float:
        answer = pool.try_admit(pages)
        if not isinstance(answer, Entitlement):
            raise TypeError(f"not admitted: {answer}")
        drawn = timed(lambda: pool.draw(answer, pages))
        return drawn + timed(answer.release) * both

    return run


def cases(ids: Ids, peer: Theirs | None, note: str) -> list[Case]:
    """Everything that vLLM does too."""
    ours = Ours(POOL_PAGES, ids)
    empty = BlockPool(POOL_PAGES + 1, PAGE)
    pages = len(ids) // PAGE
    told = Ours(POOL_PAGES, ids, EventLog())

    def of(timer: Callable[[Theirs], Timed]) -> Timed | None:
        return None if peer is None else timer(peer)

    what = f"{len(ids):,} tokens"
    return [
        Case(f"hash, {what}, int32 array", ours.hash, of(lambda p: p.hash), note=note),
        Case(
            f"hash + match + pin, {what}, int32 array",
            ours.match,
            of(lambda p: p.match),
            bar=20,
            most=1.0,
            note=note,
        ),
        Case(f"hash + match + pin, {what}, list", ours.match_list, of(lambda p: p.match), bar=4, note=note),
        Case(
            f"allocate, {pages:,} pages",
            allocate_and_free(empty, pages, both=False),
            of(lambda p: p.allocate),
            note=note,
        ),
        Case(
            f"allocate + free, {pages:,} pages",
            allocate_and_free(empty, pages, both=True),
            of(lambda p: p.allocate_and_free),
            bar=10,
            note=note,
        ),
        Case(
            f"allocate, evicting, {pages:,} pages",
            ours.verb("draw"),
            of(lambda p: p.verb("draw")),
            bar=10,
            note=note,
        ),
        Case(
            f"register, {pages:,} pages", ours.verb("register"), of(lambda p: p.verb("register")), note=note
        ),
        Case(
            f"free, {pages:,} named pages", ours.verb("release"), of(lambda p: p.verb("release")), note=note
        ),
        Case(
            f"register, {pages:,} pages, events on", told.verb("register"), note="events off: the row above"
        ),
    ]


def radix_cases(ids: Ids) -> list[Case]:
    """SGLang's match of the same prompt: a radix tree does not hash, and slows down with its nodes."""
    ours = Ours(POOL_PAGES, ids)
    made = []
    for nodes in (1, 64, 512):
        tree = Sglang(ids.tolist(), PAGE, nodes)
        name = f"match, against SGLang's radix tree of {nodes} node{'s' * (nodes > 1)}"
        made.append(Case(f"{name}, Python", ours.match, tree.match_python, note="no bar"))
        made.append(Case(f"{name}, Rust, no pin", ours.match, tree.match_rust, note="no bar"))
    return made


def growth_cases(largest_pages: int) -> list[Case]:
    """Ourselves at 1k and at 1M pages, per page; all of the pool in one run."""
    few, many = Ours(1024, prompt(1024 * PAGE)), Ours(largest_pages, prompt(largest_pages * PAGE))
    middle = Ours(POOL_PAGES, prompt(POOL_PAGES * PAGE)) if largest_pages > POOL_PAGES else many

    def per_page(run: Timed, pages: int) -> Timed:
        return lambda: run() / pages

    def pair(name: str, timer: Callable[[Ours], Timed], bar: float) -> list[Case]:
        small = per_page(timer(few), few.count)
        made = []
        for pool, limit in ((middle, None), (many, bar)):
            made.append(
                Case(
                    f"growth of {name}: {pool.count:,} pages against 1,024, a page",
                    per_page(timer(pool), pool.count),
                    small,
                    unit="ns",
                    per_s=1e9,
                    bar=limit,
                    sense="at most",
                    note="" if limit else "no bar",
                )
            )
        return made[1:] if middle is many else made

    def cycled(name: str) -> Callable[[Ours], Timed]:
        return lambda pool: lambda: pool.cycle()[name]

    # Match first: the cycles evict the prompts.
    found = pair("hash + match + pin", lambda pool: pool.match, 2)
    for name, verb in (("evicting allocation", "draw"), ("register", "register"), ("free", "release")):
        found += pair(name, cycled(verb), 12)
    return found


def token_cases() -> list[Case]:
    """Ourselves from 1k to 1M tokens of prompt in one pool, per token."""
    few, many = Ours(POOL_PAGES, prompt(1024)), Ours(POOL_PAGES, prompt(POOL_PAGES * PAGE))
    return [
        Case(
            "growth of hash + match + pin: 1,048,576 tokens against 1,024, a token",
            lambda: many.match() / len(many.ids),
            lambda: few.match() / len(few.ids),
            unit="ns",
            per_s=1e9,
            bar=2,
            sense="at most",
        )
    ]


def run(rounds: int, tokens: int, *, peers: bool, largest_pages: int) -> list[Row]:
    """Measure everything."""
    warm_up()
    ids = prompt(tokens)
    peer, note = None, "no peer: switched off"
    if peers:
        try:
            peer, note = Theirs(ids), ""
        except NoPeer as missing:
            note = f"no peer: {missing}"
    rows = [measure(case, rounds) for case in cases(ids, peer, note)]
    if peers:
        try:
            rows += [measure(case, rounds) for case in radix_cases(ids)]
        except NoPeer as missing:
            rows.append(Row("match, against SGLang's radix tree", "ms", None, note=str(missing)))
    rows += [measure(case, rounds) for case in token_cases()]
    return rows + [measure(case, rounds) for case in growth_cases(largest_pages)]


def main() -> int:
    """Run, print, say by the exit code whether every bar is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", metavar="PATH|-", help="also write one JSON document")
    parser.add_argument("--rounds", type=int, default=15, help="paired rounds of each row, at least 9")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of the prompt")
    parser.add_argument("--no-peers", action="store_true", help="ours alone; installs nothing")
    parser.add_argument("--largest-pages", type=int, default=1 << 20, help="of the growth rows")
    given = parser.parse_args()
    if given.rounds < 9 or given.tokens < PAGE or given.largest_pages < 1024:
        parser.error("at least 9 rounds, a page of tokens, and 1,024 pages")
    rows = run(given.rounds, given.tokens, peers=not given.no_peers, largest_pages=given.largest_pages)
    found = versions("numpy", "numba", "torch") | {"vllm": Vllm.version, "sglang": Sglang.version}
    return publish(rows, found, "Pool and keys", given.json)


if __name__ == "__main__":
    sys.exit(main())

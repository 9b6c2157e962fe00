"""What resolving and sealing cost beside the copies: on the caller's thread, and many at once.

    python benchmarks/store.py [--json PATH|-] [--rounds N]

A prompt of 131,072 tokens at page 16 is 8,192 pages.  A token's state is small on purpose (64 B): what is
timed is the store, not memory.  No peer does the same; growth is measured against ourselves.  Exit code 1: a
bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
from paired import Case, Row, measure, publish, versions

from kvcontract import Arena, BlockPool, Field, Group, KvModel, KvStore, Rank, Scope, WeightIdentity, admit
from kvcontract.contract.layout import layout
from kvcontract.memory.binding import Binding
from kvcontract.pool.request import RequestKv
from kvcontract.tiers.dram import DramTier

PAGE = 16
TOKENS = 131_072
POOL_PAGES = 32_768
FRESH_PAGES = 64
MANY, FEW = 200, 20
COLD_PAGES = 32
SCOPE = Scope()
CALM_S = 60.0
RNG = np.random.default_rng(1)
Ids = npt.NDArray[np.int32]

MODEL = KvModel(
    contract=1,
    name="benchmark",
    weights=WeightIdentity(kind="unresolved"),
    numerics="uint8",
    page_tokens=PAGE,
    groups=(Group(name="kv"),),
    arenas=(Arena.planes(name="a", group="kv", fields=(Field(name="k", dtype="uint8", axes={"dim": 64}),)),),
)


def prompt(tokens: int) -> Ids:
    """Random token ids."""
    return RNG.integers(0, 150_000, tokens).astype(np.int32)


class Side:
    """A store over memory of its own and a DRAM tier.

    Args:
        loop: that the store runs on; None: a thread of its own.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop = loop
        self.pool = BlockPool(POOL_PAGES, PAGE)
        binding = Binding.allocate(layout(MODEL).space("full"), POOL_PAGES)
        tier = DramTier(POOL_PAGES * PAGE * 256)
        self.store = KvStore(MODEL, [Rank(self.pool, {"full": binding})], [tier], loop=loop)

    def keep(self, ids: Ids) -> None:
        """Have a prompt stored, however large."""
        req = admit(self.pool, prompt_tokens=ids, max_new_tokens=1, keyer=self.store.keyer, scope=SCOPE)
        if not isinstance(req, RequestKv):
            raise SystemExit(f"not admitted: {req}")
        req.apply_prefill(req.schedule_prefill(len(ids)), 1)
        while self.store.seal(req).wait(CALM_S).pages:
            pass
        self.store.retire(req).wait(CALM_S)

    def drop(self) -> None:
        """Forget what is on the device."""
        self.pool.set_retention(False)
        self.pool.set_retention(True)


@contextmanager
def side(*, own_loop: bool) -> Iterator[Side]:
    """A side that is closed in the end."""
    loop = None if own_loop else asyncio.new_event_loop()
    made = Side(loop)
    try:
        yield made
    finally:
        if loop is None:
            made.store.close()
        else:
            loop.run_until_complete(made.store.aclose())
            loop.close()


def timed(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# Resolve


def awaited(made: Side, ids: Ids) -> float:
    """One resolve, awaited on the loop that the store runs on."""

    async def work() -> float:
        start = time.perf_counter()
        prefix = await made.store.resolve_prefix("0", ids, SCOPE)
        seconds = time.perf_counter() - start
        if prefix.hit_tokens < len(ids) - PAGE:
            raise SystemExit(f"a hit of {prefix.hit_tokens} tokens")
        prefix.release()
        return seconds

    if made.loop is None:
        raise SystemExit("awaited on a loop of the caller's")
    return made.loop.run_until_complete(work())


def blocking(made: Side, ids: Ids) -> float:
    """One resolve through the façade: there and back between two threads."""
    start = time.perf_counter()
    prefix = made.store.resolve("0", ids, SCOPE)
    seconds = time.perf_counter() - start
    prefix.release()
    return seconds


# Seal


class Sealing:
    """A request that is prefilled in chunks of 64 pages, each of which is sealed.

    Args:
        made: where.
        pages: of a request, sealed before the first chunk that is timed.
        rounds: chunks that are timed.
    """

    def __init__(self, made: Side, pages: int, rounds: int) -> None:
        self._made, self._pages = made, pages
        self._req = self._begun(rounds)

    def _begun(self, rounds: int) -> RequestKv:
        made, tokens = self._made, (self._pages + rounds * FRESH_PAGES) * PAGE
        answer = admit(
            made.pool,
            prompt_tokens=prompt(tokens + 1),
            max_new_tokens=1,
            keyer=made.store.keyer,
            scope=SCOPE,
        )
        if not isinstance(answer, RequestKv):
            raise SystemExit(f"not admitted: {answer}")
        if self._pages:
            answer.apply_prefill(answer.schedule_prefill(self._pages * PAGE), None)
        while made.store.seal(answer).wait(CALM_S).failed:
            pass
        return answer

    def __call__(self) -> float:
        """Seconds of one seal on this thread, while nothing else is going on."""
        req = self._req
        req.apply_prefill(req.schedule_prefill(FRESH_PAGES * PAGE), None)
        start = time.perf_counter()
        report = self._made.store.seal(req)
        seconds = time.perf_counter() - start
        if (pages := report.wait(CALM_S).saved) != FRESH_PAGES:
            raise SystemExit(f"{pages} pages saved, not {FRESH_PAGES}")
        return seconds

    def end(self) -> None:
        """Give the request back."""
        self._made.store.retire(self._req).wait(CALM_S)


# Many at once


class Crowd:
    """Cold prompts that are in the tier, resolved at once.

    Args:
        made: where.
        count: how many.
    """

    def __init__(self, made: Side, count: int) -> None:
        self._made = made
        self._prompts = [prompt(COLD_PAGES * PAGE + 1) for _ in range(count)]
        for ids in self._prompts:
            made.keep(ids)

    def __call__(self) -> float:
        """Seconds a resolve."""
        made = self._made
        made.drop()

        async def work() -> float:
            start = time.perf_counter()
            found = await asyncio.gather(
                *(made.store.resolve_prefix("0", ids, SCOPE) for ids in self._prompts)
            )
            seconds = time.perf_counter() - start
            for prefix in found:
                if prefix.hit_tokens != COLD_PAGES * PAGE:
                    raise SystemExit(f"a hit of {prefix.hit_tokens} tokens: {prefix.degraded}")
                prefix.release()
            return seconds

        if made.loop is None:
            raise SystemExit("awaited on a loop of the caller's")
        return made.loop.run_until_complete(work()) / len(self._prompts)


def run(rounds: int) -> list[Row]:
    """Measure everything."""
    rows = []
    ids = prompt(TOKENS + 1)
    with side(own_loop=False) as made:
        made.keep(ids)
        what = f"resolve, {TOKENS:,} tokens, all on device"
        rows.append(measure(Case(f"{what}, awaited", lambda: awaited(made, ids), most=1.5), rounds))
    with side(own_loop=True) as made:
        made.keep(ids)
        rows.append(measure(Case(f"{what}, blocking", lambda: blocking(made, ids), most=1.5), rounds))
    for pages in (0, TOKENS // PAGE):
        with side(own_loop=True) as made:
            name = f"seal of {FRESH_PAGES} fresh pages" + (
                f" after {pages:,} of the request" if pages else ""
            )
            sealing = Sealing(made, pages, rounds + 1)
            rows.append(measure(Case(name, sealing, unit="us", per_s=1e6, most=200), rounds))
            sealing.end()
    with side(own_loop=False) as made:
        few, many = Crowd(made, FEW), Crowd(made, MANY)
        name = f"{MANY} restores of {COLD_PAGES} pages at once, each, against {FEW} at once"
        rows.append(measure(Case(name, many, few, unit="us", per_s=1e6, bar=2, sense="at most"), rounds))
    return rows


def main() -> int:
    """Run, print, say by the exit code whether every bar is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", metavar="PATH|-", help="also write one JSON document")
    parser.add_argument("--rounds", type=int, default=31, help="rounds of each row, at least 9")
    given = parser.parse_args()
    if given.rounds < 9:
        parser.error("at least 9 rounds")
    return publish(run(given.rounds), versions("numpy", "numba", "torch"), "Store", given.json)


if __name__ == "__main__":
    sys.exit(main())

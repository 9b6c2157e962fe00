"""The parent's end of a store that lives in the child: who asks what, and what must come back.

`Rig` makes content, sends it along, and compares what is read with what must be there; it judges nothing
else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvc_conformance.bench import Bench, Failed, small_enough
from kvc_conformance.beside import Beside
from kvc_conformance.channel import Message
from kvc_conformance.content import POISON, Content, trimmed
from kvcontract.contract.model import Full, KvModel

SMALL_ROW_BYTES: Final = 4096
"""Content of a token in checks that are about pages, not about what lies in them."""

STEP_PAGES: Final = 4
SECRET: Final = bytes(range(32)).hex()
TOKEN_IDS: Final = 50_000

Scope = Mapping[str, str]

_NUMBERS = count(1)


@dataclass(frozen=True, slots=True)
class Hit:
    """What a resolve came to.

    Attributes:
        id: releases it, or admits from it.
        beside: by space, numbers of the pages whose blocks are held there.
        wrong: what is wrong with what it holds, in any space; None if nothing is.
    """

    id: str
    tokens: int
    pages: tuple[int, ...]
    beside: dict[str, list[int]]
    sources: dict[str, int]
    degraded: tuple[str, ...]
    wrong: str | None


def model_for(
    bench: Bench,
    page_tokens: int,
    limit_bytes: int = SMALL_ROW_BYTES,
    key_tokens: int | None = None,
    boundary_tokens: int | None = None,
) -> KvModel:
    """The declaration that stores are made of: small, where there is a small one; see `trimmed`."""
    return small_enough(trimmed(bench.small, page_tokens, limit_bytes, key_tokens, boundary_tokens))


def prompt(seed: int, *path: int, length: int) -> list[int]:
    """Token ids drawn for a purpose."""
    ids: list[int] = np.random.default_rng([seed, *path]).integers(0, TOKEN_IDS, length).tolist()
    return ids


def whose(scope: Scope) -> str:
    """Name of a scope's content."""
    return ", ".join(f"{name} {value!r}" for name, value in sorted(scope.items()))


class Rig:
    """One store in the child.

    Args:
        bench: the workbench.
        model: what it serves.
        pages: of its pool, page 0 included.
        step_pages: most pages of one step.
        content: shared by rigs whose rows are to be told apart.
        more: see `kvc_conformance.probes.store.build`.

    Attributes:
        page: tokens of a page.
        beside: what it keeps beside full pages.
        content: what rows and states hold.
    """

    def __init__(
        self,
        bench: Bench,
        model: KvModel,
        *,
        pages: int,
        step_pages: int = STEP_PAGES,
        content: Content | None = None,
        **more: Any,
    ) -> None:
        self.page = model.page_tokens
        self.beside = Beside.of(model)
        self.content = content or Content(model)
        self._step_tokens = step_pages * self.page
        self._child = bench.small_child
        self._name = f"store-{next(_NUMBERS)}"
        self._requests = count(1)
        more |= {"step_tokens": self._step_tokens}
        self.call("build", model=model.canonical_json(), pages=pages, **more)

    @property
    def name(self) -> str:
        """For rigs that share its tier."""
        return self._name

    def call(self, probe: str, arrays: Mapping[str, NDArray[Any]] | None = None, **arguments: Any) -> Message:
        """Have a probe of `kvc_conformance.probes.store` executed on this store."""
        return self._child.call(f"store.{probe}", {"store": self._name, **arguments}, arrays)

    def churn(self, families: Sequence[Sequence[int]], **arguments: Any) -> dict[str, int]:
        """Have engines in threads run prompts of some families; see `kvc_conformance.probes.churn`."""
        points = {"granule": self.beside.granule_tokens, "stops": self.beside.stops(len(families[0]))}
        arguments |= {"store": self._name, "families": [list(family) for family in families], **points}
        return self._child.call("churn.run", arguments).body

    def resolve(self, tokens: Sequence[int], scope: Scope | None = None, **policy: Any) -> Hit:
        """Resolve, and compare what the hit holds, in every space, with what it must."""
        name, scope = f"request-{next(self._requests)}", scope or {}
        answer = self.call("resolve", id=name, tokens=list(tokens), scope=dict(scope), policy=policy)
        body = answer.body
        wrong = self._wrong(answer, tokens, whose(scope))
        reasons = tuple(body["degraded"])
        pages = tuple(body["pages"])
        return Hit(name, body["hit_tokens"], pages, body["beside"], body["sources"], reasons, wrong)

    def _wrong(self, answer: Message, tokens: Sequence[int], who: str) -> str | None:
        """What is wrong with what a hit holds."""
        hit, pages, beside = (answer.body[name] for name in ("hit_tokens", "pages", "beside"))
        if hit != len(pages) * self.page:
            return f"{len(pages)} pages of {self.page} are pinned for {hit} tokens"
        wanted = {key: self.beside.needed(key, hit) for key in self.beside.windows}
        wanted |= {f"slots-{name}": [hit // self.page - 1] for name in self.beside.slots if hit}
        for key, numbers in wanted.items():
            if sorted(beside.get(key, ())) != numbers:
                return f"{key}: pages {beside.get(key, [])} are held for {hit} tokens; needed are {numbers}"
        if set(beside) - set(wanted):
            return f"held in spaces that nothing needs: {sorted(set(beside) - set(wanted))}"
        wrong = self.content.wrong(answer.arrays[Full().key], tokens, whose=who)
        for key in self.beside.windows if wrong is None else ():
            wrong = wrong or self.wrong_pages(key, beside.get(key, []), answer.arrays.get(key), tokens, who)
        if wrong is None and hit and self.beside.slots and "state" in answer.arrays:
            wrong = self.content.wrong_state(answer.arrays["state"], tokens, hit, who)
        return wrong

    def wrong_pages(
        self,
        key: str,
        numbers: Sequence[int],
        rows: NDArray[Any] | None,
        tokens: Sequence[int],
        who: str,
        end: int | None = None,
    ) -> str | None:
        """What is wrong with pages of one space, given by their numbers, up to a position."""
        for at, number in enumerate(numbers if rows is not None else ()):
            first = number * self.page
            count = self.page if end is None else min(self.page, max(0, end - first))
            found = rows[at * self.page : at * self.page + count] if rows is not None else None
            wrong = None if found is None else self.content.wrong(found, tokens, first, who, key)
            if wrong is not None:
                return f"{key}: {wrong}"
        return None

    def still_wrong(self, hit: Hit, tokens: Sequence[int], scope: Scope | None = None) -> str | None:
        """What is wrong by now with what a hit holds, which nobody has consumed yet."""
        return self._wrong(self.call("reread", id=hit.id), tokens, whose(scope or {}))

    def hit_tokens(self, tokens: Sequence[int], scope: Scope | None = None, **policy: Any) -> int:
        """Resolve and give back.

        Raises:
            Failed: the rows of the hit are not those of its tokens.
        """
        hit = self.resolve(tokens, scope, **policy)
        self.release(hit)
        if hit.wrong is not None:
            raise Failed(f"a hit of {hit.tokens} tokens has wrong content: {hit.wrong}")
        return hit.tokens

    def release(self, hit: Hit) -> None:
        """Give a hit back."""
        self.call("release", id=hit.id)

    def compute(
        self,
        tokens: Sequence[int],
        scope: Scope | None = None,
        *,
        hit: Hit | None = None,
        sampled: Sequence[int] = (0,),
        stops: Sequence[int] | None = None,
    ) -> str:
        """Run a prompt, and then all but the last of the tokens that are sampled; returns the request's id.

        Args:
            tokens: the prompt.
            scope: who may share.
            hit: where it begins.
            sampled: what is sampled.
            stops: where checkpoints are wanted; None: wherever they can be.

        Raises:
            Failed: it was not admitted.
        """
        scope = scope or {}
        stops = self.beside.stops(len(tokens)) if stops is None else list(stops)
        name = self.admit(tokens, scope, hit=hit, max_new=len(sampled), stops=stops)
        start, whole, who = (hit.tokens if hit else 0), [*tokens, *sampled], whose(scope)
        while start < len(tokens):
            limit = min(len(tokens), start + self._step_tokens) if self.beside.windows else len(tokens)
            end = self.beside.step_end(start, limit, stops)
            self.step(name, whole, start, end, who, max_tokens=len(tokens), token=sampled[0])
            start = end
        for at, token in enumerate(sampled[1:], len(tokens)):
            self.step(name, whole, at, at + 1, who, token=token)
        return name

    def admit(
        self,
        tokens: Sequence[int],
        scope: Scope,
        *,
        hit: Hit | None = None,
        max_new: int = 1,
        stops: Sequence[int] | None = None,
    ) -> str:
        """Admit a prompt, from a hit; returns the request's id.

        Raises:
            Failed: it was not admitted.
        """
        name = f"request-{next(self._requests)}" if hit is None else hit.id
        answer = self.ask(name, tokens, scope, max_new, stops)
        if answer != "RequestKv":
            raise Failed(f"a request of {len(tokens)} tokens got the answer {answer!r} from an idle pool")
        return name

    def ask(
        self,
        name: str,
        tokens: Sequence[int],
        scope: Scope,
        max_new: int,
        stops: Sequence[int] | None = None,
    ) -> str:
        """Ask for a request's admission; returns the class of the answer."""
        wanted = self.beside.stops(len(tokens)) if stops is None else list(stops)
        arguments: dict[str, Any] = {"tokens": list(tokens), "scope": dict(scope), "max_new": max_new}
        arguments |= {"granule": self.beside.granule_tokens, "stops": wanted}
        return str(self.call("admit_request", id=name, **arguments).body["answer"])

    def step(
        self, name: str, tokens: Sequence[int], start: int, end: int, who: str, **arguments: Any
    ) -> Message:
        """One step of a request that is to run tokens start .. end - 1.

        Raises:
            Failed: it began with another state than that of its tokens so far.
        """
        content = {"content": self.content.rows(tokens, start, end, who)}
        content["state"] = self.content.state(tokens, end, who)
        answer = self.call("step", content, id=name, **arguments)
        if start and self.content.state_bytes:
            wrong = self.content.wrong_state(answer.arrays["state"], tokens, start, who)
            if wrong is not None:
                raise Failed(f"{name}: a step began with another state than its own: {wrong}")
        return answer

    def keep(self, tokens: Sequence[int], scope: Scope | None = None, **more: Any) -> None:
        """Compute and retire; what is saved has landed then, so that nothing is shed for what comes next."""
        self.call("retire", id=self.compute(tokens, scope, **more))
        self.call("flush")

    def held(self) -> dict[str, int]:
        """Blocks that somebody has, by space."""
        pools = self.call("gauges").body["pools"]
        return {key: int(pool["held"]) for key, pool in pools.items()}

    def evict(self) -> None:
        """Let saves land, drop all that is cached, and overwrite the memory.

        Raises:
            Failed: something is still held afterwards.
        """
        self.call("flush")
        held = self.call("drain", poison=POISON).body["held"]
        left = [f"{number} blocks of {key}" for key, number in held.items() if number]
        if left:
            raise Failed(f"after all requests are gone, {', '.join(left)} are still held")

    def close(self) -> dict[str, Any]:
        """Close it; returns the report and what a later resolve raised."""
        return self.call("close").body

    def leaks(self) -> list[str]:
        """What is not back although nothing is going on."""
        body = self.call("gauges").body
        found = [
            f"pool {key}: {n} blocks {name}"
            for key, pool in body["pools"].items()
            for name, n in pool.items()
            if n
        ]
        found += [f"store: {n} {name}" for name, n in body["store"].items() if n]
        for tier, stats in body["tiers"].items():
            found += [
                f"tier {tier}: {stats[name]} {name}"
                for name in ("leases", "operations", "handoffs", "faults")
                if stats[name]
            ]
        return found

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
from kvc_conformance.channel import Message
from kvc_conformance.content import POISON, Content, trimmed
from kvcontract.contract.model import KvModel

SMALL_ROW_BYTES: Final = 4096
"""Content of a token in checks that are about pages, not about what lies in them."""

SECRET: Final = bytes(range(32)).hex()
TOKEN_IDS: Final = 50_000

Scope = Mapping[str, str]

_NUMBERS = count(1)


@dataclass(frozen=True, slots=True)
class Hit:
    """What a resolve came to.

    Attributes:
        id: releases it, or admits from it.
        wrong: what is wrong with its rows; None if they are right.
    """

    id: str
    tokens: int
    pages: tuple[int, ...]
    sources: dict[str, int]
    degraded: tuple[str, ...]
    wrong: str | None


def model_for(
    bench: Bench, page_tokens: int, limit_bytes: int = SMALL_ROW_BYTES, key_tokens: int | None = None
) -> KvModel:
    """The declaration that stores are made of: small, where there is a small one."""
    return small_enough(trimmed(bench.small, page_tokens, limit_bytes, key_tokens))


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
        content: shared by rigs whose rows are to be told apart.
        more: see `kvc_conformance.probes.store.build`.
    """

    def __init__(
        self, bench: Bench, model: KvModel, *, pages: int, content: Content | None = None, **more: Any
    ) -> None:
        self.page = model.page_tokens
        self.content = content or Content(model)
        self._child = bench.small_child
        self._name = f"store-{next(_NUMBERS)}"
        self._requests = count(1)
        self.call("build", model=model.canonical_json(), pages=pages, **more)

    @property
    def name(self) -> str:
        """For rigs that share its tier."""
        return self._name

    def call(self, probe: str, arrays: Mapping[str, NDArray[Any]] | None = None, **arguments: Any) -> Message:
        """Have a probe of `kvc_conformance.probes.store` executed on this store."""
        return self._child.call(f"store.{probe}", {"store": self._name, **arguments}, arrays)

    def resolve(self, tokens: Sequence[int], scope: Scope | None = None, **policy: Any) -> Hit:
        """Resolve, and compare what the hit's pages hold with what they must."""
        name, scope = f"request-{next(self._requests)}", scope or {}
        answer = self.call("resolve", id=name, tokens=list(tokens), scope=dict(scope), policy=policy)
        body, rows = answer.body, answer.arrays["content"]
        wrong = None
        if body["hit_tokens"] != len(rows):
            wrong = f"{len(body['pages'])} pages of {self.page} are pinned for {body['hit_tokens']} tokens"
        wrong = wrong or self.content.wrong(rows, tokens, whose=whose(scope))
        reasons = tuple(body["degraded"])
        return Hit(name, body["hit_tokens"], tuple(body["pages"]), body["sources"], reasons, wrong)

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
    ) -> str:
        """Run a prompt, and then all but the last of the tokens that are sampled; returns the request's id.

        Raises:
            Failed: it was not admitted.
        """
        scope, name = scope or {}, f"request-{next(self._requests)}" if hit is None else hit.id
        arguments: dict[str, Any] = {"tokens": list(tokens), "scope": dict(scope), "max_new": len(sampled)}
        answer = self.call("admit_request", id=name, **arguments).body["answer"]
        if answer != "RequestKv":
            raise Failed(f"a request of {len(tokens)} tokens got the answer {answer!r} from an idle pool")
        start, whole = (hit.tokens if hit else 0), [*tokens, *sampled]
        content = self.content.rows(whole, start, len(tokens), whose(scope))
        self.call("step", {"content": content}, id=name, max_tokens=len(tokens), token=sampled[0])
        for at, token in enumerate(sampled[1:], len(tokens)):
            content = self.content.rows(whole, at, at + 1, whose(scope))
            self.call("step", {"content": content}, id=name, token=token)
        return name

    def keep(self, tokens: Sequence[int], scope: Scope | None = None, **more: Any) -> None:
        """Compute and retire."""
        self.call("retire", id=self.compute(tokens, scope, **more))

    def evict(self) -> None:
        """Let saves land, drop all that is cached, and overwrite the memory.

        Raises:
            Failed: something is still held afterwards.
        """
        self.call("flush")
        left = self.call("drain", poison=POISON).body
        if left["free"] != left["total"]:
            raise Failed(f"after all requests are gone, {left['total'] - left['free']} pages are still held")

    def close(self) -> dict[str, Any]:
        """Close it; returns the report and what a later resolve raised."""
        return self.call("close").body

    def leaks(self) -> list[str]:
        """What is not back although nothing is going on."""
        body = self.call("gauges").body
        found = [f"pool: {n} pages {name}" for name, n in body["pool"].items() if n]
        found += [f"store: {n} {name}" for name, n in body["store"].items() if n]
        for tier, stats in body["tiers"].items():
            found += [
                f"tier {tier}: {stats[name]} {name}"
                for name in ("leases", "operations", "handoffs", "faults")
                if stats[name]
            ]
        return found

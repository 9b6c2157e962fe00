"""Why a hit is as long as it is (I8): which group, worker, tier or key part cut it.

Every resolve leaves a short record; the latest are kept.  What asks further, whether the same tokens are
known under another scope, is looked up only when somebody asks.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.model import Scope
from kvcontract.pool.keys import TokenIds

KEPT: Final = 1024
KEPT_SCOPES: Final = 64
_FIELDS: Final = ("lora", "lora_revision", "salt")


@dataclass(frozen=True, slots=True)
class Cut:
    """What ended a hit at one page, as one place saw it.

    Attributes:
        where: `device`, or a tier's name.
        page: number of the first page that is not hit there.
        why: in words.
        groups: whose state is missing.
        shards: of a page that is there in part, those that are missing.
        workers: who would need them, or whose copies failed.
    """

    where: str
    page: int
    why: str
    groups: tuple[str, ...] = ()
    shards: tuple[int, ...] = ()
    workers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """What one resolve came to, and why no more.

    Attributes:
        id: of the resolve, `KvPrefix.id`.
        label: the caller's name for it.
        prompt_tokens, limit_tokens, hit_tokens: of the prompt; what a hit could be at most (A12); what it is.
        sources: tokens by where they came from.
        reasons: what went wrong, as in `KvPrefix.degraded`.
        cuts: what each place asked last had to say; empty if the hit is as long as it can be.
        key_parts: fields of the scope by which an otherwise equal prompt that is known differs.
    """

    id: int
    rank: str
    label: str | None
    prompt_tokens: int
    limit_tokens: int
    hit_tokens: int
    sources: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    reasons: tuple[str, ...] = ()
    cuts: tuple[Cut, ...] = ()
    key_parts: tuple[str, ...] = ()

    def __str__(self) -> str:
        of = f"{self.hit_tokens} of {self.prompt_tokens} tokens hit, {self.limit_tokens} possible"
        lines = [f"resolve {self.id} on rank {self.rank!r}: {of}"]
        lines += [f"  from {name}: {tokens} tokens" for name, tokens in self.sources.items()]
        lines += [f"  {reason}" for reason in self.reasons]
        for cut in self.cuts:
            more = [f"shards {list(cut.shards)}"] if cut.shards else []
            more += [f"workers {list(cut.workers)}"] if cut.workers else []
            more += [f"groups {', '.join(cut.groups)}"] if cut.groups else []
            lines.append(f"  page {cut.page}, {cut.where}: {cut.why}" + "".join(f"; {item}" for item in more))
        if self.key_parts:
            lines.append(f"  known under a scope of other {', '.join(self.key_parts)}")
        return "\n".join(lines)


Known = Callable[[str, TokenIds, Scope], bool]
"""Whether the first page of these tokens is resident on a rank in a scope."""


class Explanations:
    """The latest explanations; thread-safe.

    Args:
        known: asked about other scopes.
    """

    def __init__(self, known: Known) -> None:
        self._known = known
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, tuple[Explanation, TokenIds, Scope]] = OrderedDict()
        self._labels: dict[str, int] = {}
        self._scopes: OrderedDict[Scope, None] = OrderedDict()

    def keep(self, found: Explanation, first_page: TokenIds, scope: Scope) -> None:
        """Keep one; `first_page` is a copy of the prompt's first tokens."""
        with self._lock:
            self._kept[found.id] = found, first_page, scope
            if found.label is not None:
                self._labels[found.label] = found.id
            self._scopes[scope] = None
            self._scopes.move_to_end(scope)
            while len(self._scopes) > KEPT_SCOPES:
                self._scopes.popitem(last=False)
            while len(self._kept) > KEPT:
                number, (old, _, _) = self._kept.popitem(last=False)
                if old.label is not None and self._labels.get(old.label) == number:
                    del self._labels[old.label]

    def of(self, resolve: int | str) -> Explanation:
        """The explanation of a resolve, by its id or the latest of a label.

        Raises:
            UsageFault: it is not known, or not any more.
        """
        with self._lock:
            number = self._labels.get(resolve, 0) if isinstance(resolve, str) else resolve
            if number not in self._kept:
                raise UsageFault(f"no resolve {resolve!r} among the latest {len(self._kept)}")
            found, tokens, scope = self._kept[number]
            others = [other for other in self._scopes if other != scope]
        if found.hit_tokens or not len(tokens):
            return found
        for other in others:
            if self._known(found.rank, tokens, other):
                differ = tuple(name for name in _FIELDS if getattr(other, name) != getattr(scope, name))
                return replace(found, key_parts=differ)  # names, never what they hold (D4)
        return found

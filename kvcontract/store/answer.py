"""What a resolve answers: the prefix, its figures, and why it is no longer (I6, I8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from kvcontract.store.explain import Cut, Explanation, Explanations
from kvcontract.store.policy import DEVICE, KvPrefix
from kvcontract.store.search import Ask, Search
from kvcontract.store.stats import Tally
from kvcontract.tiers.base import Tier

_NOTHING: Mapping[str, int] = MappingProxyType({})


class Answers:
    """Makes prefixes and counts them.

    Args:
        groups: names of those that are saved and restored.
        tiers: in the order in which they are asked.
        tally: where tokens are counted by source.
        explanations: where each resolve leaves why it ended.
    """

    def __init__(
        self, groups: Sequence[str], tiers: Sequence[Tier], tally: Tally, explanations: Explanations
    ) -> None:
        self._groups = tuple(groups)
        self._names = (DEVICE, *(tier.name for tier in tiers))
        self._tally = tally
        self._explanations = explanations

    def nothing(self, ask: Ask, reason: str) -> KvPrefix:
        """The empty prefix, and why."""
        self._count(ask, 0, _NOTHING, (reason,), ())
        return KvPrefix.none(ask.rank.name, degraded=(reason,), number=ask.id)

    def prefix(self, search: Search) -> KvPrefix:
        """What a search holds; its hold goes to the caller, or back if it is empty."""
        ask, page = search.ask, search.rank.pool.page_tokens
        legal = ask.media.floor_pages(search.at * page, page)
        if legal < search.at:
            search.hold.trim(legal)  # no hit ends inside an uncut item
        hit = search.at * page
        pages = np.bincount(search.origin[: search.at], minlength=len(self._names)).tolist()
        by_source = zip(self._names, pages, strict=True)
        sources = MappingProxyType({name: count * page for name, count in by_source if count})
        reasons = tuple(search.reasons)
        cuts = () if hit >= ask.limit_tokens else tuple(search.cuts.values())
        self._count(ask, hit, sources, reasons, cuts)
        if not hit:
            search.hold.release()
        valid = MappingProxyType(dict.fromkeys(self._groups, hit))
        beyond = search.reached * page
        return KvPrefix(
            ask.rank.name,
            hit,
            valid,
            search.hold if hit else None,
            sources,
            reasons,
            ask.id,
            (beyond,) if beyond > hit else (),
        )

    def _count(
        self, ask: Ask, hit: int, sources: Mapping[str, int], reasons: tuple[str, ...], cuts: tuple[Cut, ...]
    ) -> None:
        for name, tokens in sources.items():
            self._tally.hit(name, tokens)
        self._tally.hit("computed", len(ask.tokens) - hit)
        for reason in reasons:
            self._tally.degrade(reason)
        found = Explanation(
            ask.id,
            ask.rank.name,
            ask.label,
            len(ask.tokens),
            ask.limit_tokens,
            hit,
            sources,
            reasons,
            cuts,
        )
        page = ask.rank.pool.page_tokens
        first = tuple(int(token) for token in ask.tokens[:page]) if not hit else ()
        self._explanations.keep(found, first, ask.scope)

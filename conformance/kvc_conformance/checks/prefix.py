"""Prefix reuse: how long a hit is, who may have it, and what it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvc_conformance.bench import Bench, Check, Failed
from kvc_conformance.checks.machine import run_machine
from kvc_conformance.content import page_sizes
from kvc_conformance.rig import SECRET, Rig, Scope, model_for, prompt, whose

PAGE_SIZES: Final = (1, 3, 16)
MACHINE_PAGE_SIZES: Final = (1, 3, 5)
BOUNDARY_TOKENS: Final = 4
"""Where states may be taken: at ends of pages, but not of every page."""

SCOPES: Final[tuple[Scope, ...]] = (
    {},
    {"salt": ""},
    {"salt": "None"},
    {"salt": "x"},
    {"lora": ""},
    {"lora": "None"},
    {"lora": "x"},
    {"lora": "x", "lora_revision": "1"},
    {"lora_revision": "x"},
    {"lora": "x", "salt": "x"},
    {"lora": "xx"},
)
"""Scopes that are easily taken for one another."""


def _at_page_sizes(sizes: tuple[int, ...]) -> Callable[[Bench], tuple[str, ...]]:
    return lambda bench: tuple(f"page {size}" for size in page_sizes(bench.small, sizes))


def _page(case: str) -> int:
    return int(case.removeprefix("page "))


def _lengths(bench: Bench, case: str) -> str:
    """KVC-PREFIX-05: how long a hit is."""
    page = _page(case)
    rig = Rig(bench, model_for(bench, page, boundary_tokens=BOUNDARY_TOKENS), pages=64)
    unit = rig.beside.granule_tokens
    around = (1, page - 1, page + 1, unit - 1, unit, unit + 1, 2 * unit, 2 * unit + 1, 3 * unit)
    lengths = sorted({n for n in around if n > 0})
    for number, length in enumerate(lengths):
        tokens = prompt(bench.seed, page, number, length=length)
        rig.keep(tokens)
        _expect(rig, tokens, rig.beside.floor(length - 1), f"a prompt of {length} tokens that ran before")
    _divergence(bench, rig)
    _growth(bench, rig)
    rig.close()
    return f"{len(lengths)} lengths, 5 divergences, 1 conversation"


def _divergence(bench: Bench, rig: Rig) -> None:
    """A prompt that shares a beginning with one that ran hits what lies before the first other token."""
    page, unit = rig.page, rig.beside.granule_tokens
    base = prompt(bench.seed, page, 100, length=3 * unit + 1)
    rig.keep(base)
    for at in sorted({0, unit - 1, unit, unit + unit // 2, 2 * unit, 3 * unit - 1}):
        other = [*base[:at], base[at] ^ 1, *base[at + 1 :]]
        what = f"a prompt that differs from one that ran at token {at} (pages of {page})"
        _expect(rig, other, rig.beside.floor(at), what)


def _growth(bench: Bench, rig: Rig) -> None:
    """The next turn hits what the last one wrote: its last sampled token was never run."""
    page, unit = rig.page, rig.beside.granule_tokens
    first = prompt(bench.seed, page, 200, length=page + 1)
    sampled = prompt(bench.seed, page, 201, length=unit + 2)
    rig.keep(first, sampled=sampled)
    written = len(first) + len(sampled) - 1
    turn = [*first, *sampled, *prompt(bench.seed, page, 202, length=page)]
    _expect(rig, turn, rig.beside.floor(written), f"a next turn after {written} tokens were written")


def _expect(rig: Rig, tokens: list[int], wanted: int, what: str) -> None:
    found = rig.hit_tokens(tokens)
    if found != wanted:
        raise Failed(f"{what} hits {found} tokens; expected {wanted}, in pages of {rig.page}")


def _scopes(bench: Bench, _case: str) -> str:
    """KVC-PREFIX-06: equal tokens in unequal scopes."""
    page = page_sizes(bench.small, (3,))[0]
    rig = Rig(bench, model_for(bench, page), pages=4 * len(SCOPES) + 2, tiers=[{}])
    tokens = prompt(bench.seed, 300, length=2 * page + 1)
    for scope in SCOPES:
        hit = rig.resolve(tokens, scope)
        rig.release(hit)
        if hit.tokens:
            raise Failed(
                f"a request in scope ({whose(scope)}) hits {hit.tokens} tokens that only other scopes have"
                f" computed; {hit.wrong or 'even its content agrees'}"
            )
        rig.keep(tokens, scope)
    for where in ("device", "dram"):
        for scope in SCOPES:
            hit = rig.resolve(tokens, scope)
            rig.release(hit)
            if hit.tokens != 2 * page or hit.wrong or set(hit.sources) != {where}:
                raise Failed(
                    f"scope ({whose(scope)}) ran {len(tokens)} tokens; again, it hits {hit.tokens} of"
                    f" {2 * page} from {hit.sources or 'nowhere'}, expected all from {where}"
                    + (f"; {hit.wrong}" if hit.wrong else "")
                )
        rig.evict()
    rig.close()
    return f"{len(SCOPES)} scopes"


def _identities(bench: Bench, _case: str) -> str:
    """KVC-PREFIX-06: one tier under stores of other identities."""
    page = page_sizes(bench.small, (3,))[0]
    model = model_for(bench, page)
    first = Rig(bench, model, pages=24, tiers=[{}], secret=SECRET)
    tokens = prompt(bench.seed, 301, length=2 * page + 1)
    first.keep(tokens)
    first.call("flush")
    weights = model.weights.model_copy(update={"config": model.weights.config + "another"})
    stores = {
        "the same identity": (model, SECRET),
        "other numerics": (model.model_copy(update={"numerics": model.numerics + "-other"}), SECRET),
        "other weights": (model.model_copy(update={"weights": weights}), SECRET),
        "another fleet's secret": (model, SECRET[::-1]),
        "the same identity, asked after those": (model, SECRET),
    }
    for what, (other, secret) in stores.items():
        rig = Rig(bench, other, pages=8, tiers=[{"of": first.name}], secret=secret, content=first.content)
        found, wanted = rig.hit_tokens(tokens), 2 * page if other is model and secret == SECRET else 0
        if found != wanted:
            raise Failed(f"a store with {what} hits {found} tokens of what this one wrote; expected {wanted}")
    first.close()
    return "numerics, weights and secret tell stores apart"


def _scopes_and_identities(bench: Bench, case: str) -> str:
    return (_scopes if case == "scopes" else _identities)(bench, case)


def _machine(bench: Bench, case: str) -> str:
    return run_machine(bench, _page(case))


CHECKS: Final[tuple[Check, ...]] = (
    Check("KVC-PREFIX-05", _lengths, _at_page_sizes(PAGE_SIZES)),
    Check("KVC-PREFIX-06", _scopes_and_identities, lambda _: ("scopes", "identities")),
    Check("KVC-PREFIX-07", _machine, _at_page_sizes(MACHINE_PAGE_SIZES)),
)

"""Offload: what leaves the device comes back as it was, or not at all; and everything taken comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from kvc_conformance.bench import Bench, Check, CouldNotRun, Failed, first_few
from kvc_conformance.beside import Beside
from kvc_conformance.content import page_sizes
from kvc_conformance.driver import ProbeFailed
from kvc_conformance.rig import SECRET, Hit, Rig, model_for, prompt
from kvcontract.contract.layout import tp_faults
from kvcontract.contract.model import KvModel, WeightIdentity
from kvcontract.contract.wire import parts

PAGE_SIZES: Final = (1, 3, 16)
RECORD_PAGES: Final = ((3, 2), (1, 3))
"""Sizes of pages, and pages of a record, beside records of one page."""
BOUNDARY_TOKENS: Final = 4
MEMORIES: Final = ("page-first", "layer-first")
RESTART: Final = "restarted over a disk tier"
RESTORED_ROW_BYTES: Final = 64 * 1024
STORED_PAGES: Final = 5
DAMAGED_PAGE: Final = 2
SHORT_DEADLINE_S: Final = 0.2
LEFT: Final = "left after the scripts of other clauses"
SCRIPTS: Final = "restores and damage, one by one"
OFFLOAD_05: Final = "KVC-OFFLOAD-05"


@dataclass(frozen=True, slots=True)
class Damage:
    """One way a tier is wrong.

    Attributes:
        kind: see `kvc_conformance.probes.damage`.
        pages: how long the hit is then.
        reason: beginning of the reason that is counted.
        policy: of the resolve that meets it.
        at: place of the record that is meant.
    """

    kind: str
    pages: int
    reason: str
    policy: dict[str, Any]
    at: int


def _damage(kind: str, pages: int, reason: str, **policy: Any) -> Damage:
    return Damage(kind, pages, f"dram: {reason}", policy, DAMAGED_PAGE)


def _beside(kind: str, pages: int, reason: str, **policy: Any) -> Damage:
    return Damage(kind, pages, reason, policy, STORED_PAGES - 1)


DAMAGES: Final = (
    _damage("payload bit flipped", DAMAGED_PAGE, "corrupt"),
    _damage("header byte flipped", DAMAGED_PAGE, "corrupt"),
    _damage("two records swapped", DAMAGED_PAGE, "corrupt"),
    _damage("record of another model", DAMAGED_PAGE, "corrupt"),
    _damage("record is lost", DAMAGED_PAGE, "miss"),
    _damage("load fails", DAMAGED_PAGE, "failed"),
    _damage("load raises", 0, "failed"),
    _damage("load is silent", 0, "load timed out", deadline_s=SHORT_DEADLINE_S),
    _damage("lookup raises", 0, "lookup failed"),
    _damage("lookup is silent", 0, "lookup timed out", deadline_s=SHORT_DEADLINE_S),
    _damage("presence too long", 0, "answered for"),
    _damage("presence too short", 0, "answered for"),
)
"""Of records of full pages."""

BESIDE_DAMAGES: Final = (
    _beside("payload bit flipped", STORED_PAGES - 1, "state at"),
    _beside("header byte flipped", STORED_PAGES - 1, "state at"),
    _beside("record of another model", STORED_PAGES - 1, "state at"),
    _beside("record is lost", STORED_PAGES - 1, "state at"),
    _beside("load fails", STORED_PAGES - 1, "state at"),
    _beside("load raises", 0, "state at"),
    _beside("load is silent", 0, "state did not land in time", deadline_s=SHORT_DEADLINE_S),
    _beside("lookup raises", 0, "dram: lookup failed"),
    _beside("lookup is silent", 0, "dram: lookup timed out", deadline_s=SHORT_DEADLINE_S),
    _beside("presence too long", 0, "dram: lookup failed"),
    _beside("presence too short", 0, "dram: lookup failed"),
)
"""Of records beside: without the last one, the hit ends a boundary earlier."""

WHOLE: Final = "nothing is damaged"


def _restore_cases(bench: Bench) -> tuple[str, ...]:
    sizes = [str(size) for size in page_sizes(bench.small, PAGE_SIZES)]
    sizes += [f"{page_sizes(bench.small, (size,))[0]} x {pages}" for size, pages in RECORD_PAGES]
    tiers = [f"page {size}, {memory}" for size in sizes for memory in MEMORIES]
    return (*tiers, *(f"page {size}, {RESTART}" for size in (sizes[1], sizes[-1])))


def _restore(bench: Bench, case: str) -> str:
    """KVC-OFFLOAD-01."""
    size, memory = case.removeprefix("page ").split(", ")
    lasting = memory == RESTART
    page, pages = (int(number) for number in size.split(" x ")) if "x" in size else (int(size), 1)
    key_tokens = pages * page if pages > 1 else None
    model = model_for(bench, page, RESTORED_ROW_BYTES, key_tokens, BOUNDARY_TOKENS)
    unit = Beside.of(model).stored_tokens
    more: dict[str, Any] = {"pages": 32 * unit // page, "layer_first": memory == "layer-first"}
    if lasting:  # what outlives its process needs weights that are known
        known = WeightIdentity(kind="digest", value="0" * 32)
        model = model.model_copy(update={"weights": known})
        more["secret"] = SECRET
    more["tiers"] = [{"disk": str(bench.folder / case)}] if lasting else [{}]
    rig = Rig(bench, model, **more)
    base = prompt(bench.seed, page, 600, length=3 * unit + page // 2 + 1)
    branch = [*base[:page], *prompt(bench.seed, page, 601, length=2 * unit + 1)]
    for tokens in (base, branch):
        rig.keep(tokens)
    rig.evict()
    if lasting:
        rig.close()
        rig = Rig(bench, model, content=rig.content, **more)
        rig.evict()  # its memory is no zeros
    other = prompt(bench.seed, page, 602, length=4 * page)  # pages come back to other places than they had
    busy = rig.compute(other)
    for tokens in (branch, base):
        wanted = rig.beside.stored_floor(len(tokens) - 1)
        hit = rig.resolve(tokens)
        rig.release(hit)
        _judge_restored(hit, wanted, "disk" if lasting else "dram")
    rig.call("retire", id=busy)
    _note_what_is_left(bench, rig, f"after a restore ({case})")
    state = f", {rig.content.state_bytes:,} B a slot" if rig.content.state_bytes else ""
    return f"{rig.content.row_bytes:,} B a token{state}"


def _judge_restored(hit: Hit, wanted: int, tier: str) -> None:
    if hit.wrong is not None:
        raise Failed(f"what came back through the {tier} tier is not what it was: {hit.wrong}")
    if hit.tokens != wanted:
        raise Failed(
            f"{wanted} tokens were stored and evicted from the device; {hit.tokens} came back"
            f" ({'; '.join(hit.degraded) or 'no reason given'})"
        )
    if not hit.sources.get(tier) or sum(hit.sources.values()) != hit.tokens:
        raise Failed(f"{hit.tokens} tokens came back from the {tier} tier; the sources say {hit.sources}")


def _note_what_is_left(bench: Bench, rig: Rig, after: str) -> None:
    """What a script of another clause leaves behind is KVC-OFFLOAD-04's to judge."""
    rig.call("flush")
    bench.kept.setdefault(LEFT, []).extend(f"{after}: {leak}" for leak in rig.leaks())
    rig.close()


def _damaged(bench: Bench, case: str) -> str:
    """KVC-OFFLOAD-03."""
    page = page_sizes(bench.small, (3,))[0]
    model = model_for(bench, page)
    chosen, part = _chosen(model, case)
    tokens = prompt(bench.seed, 700, length=STORED_PAGES * page + 1)
    damage = None if chosen is None else {"kind": chosen.kind, "page": chosen.at, "part": part}
    rig = Rig(bench, model, pages=64, tiers=[{"damage": damage}])
    try:
        rig.keep(tokens)
        rig.evict()
        wanted = STORED_PAGES if chosen is None else chosen.pages
        _meet(rig, tokens, wanted * page, chosen)
        _again(rig, tokens, wanted * page)
        rig.call("mend")
        _heal(rig, tokens)
    except ProbeFailed as error:
        raise Failed(f"{case}: a tier's failure reached the caller: {error.kind}: {error.text}") from error
    _note_what_is_left(bench, rig, f"after a tier has failed ({case})")
    return "hit in full" if chosen is None else f"hit {wanted} of {STORED_PAGES} pages"


def _damage_cases(bench: Bench) -> tuple[str, ...]:
    first, *beside = parts(bench.small)
    del first
    named = [f"{', '.join(part.groups)}: {item.kind}" for part in beside for item in BESIDE_DAMAGES]
    return (WHOLE, *(item.kind for item in DAMAGES), *named)


def _chosen(model: KvModel, case: str) -> tuple[Damage | None, int]:
    """What is damaged, and in records of which part."""
    first, *beside = parts(model)
    groups, _, kind = case.rpartition(": ")
    if not groups:
        return next((damage for damage in DAMAGES if damage.kind == kind), None), first.id
    part = next(part for part in beside if ", ".join(part.groups) == groups)
    return next(damage for damage in BESIDE_DAMAGES if damage.kind == kind), part.id


def _meet(rig: Rig, tokens: list[int], wanted: int, chosen: Damage | None) -> None:
    """The first resolve that meets the damage."""
    hit = rig.resolve(tokens, **({} if chosen is None else chosen.policy))
    rig.release(hit)
    if hit.wrong is not None:
        raise Failed(f"damaged bytes were served: {hit.wrong}")
    if hit.tokens != wanted:
        raise Failed(f"the hit is {hit.tokens} tokens; expected {wanted}: up to the damage, and no more")
    reasons = [] if chosen is None else [item for item in hit.degraded if item.startswith(chosen.reason)]
    if chosen is not None and not reasons:
        raise Failed(f"no reason begins with {chosen.reason!r}: {list(hit.degraded) or 'none is given'}")
    counted = rig.call("gauges").body["degraded"]
    if any(not counted.get(reason) for reason in reasons):
        raise Failed(f"the reason {reasons[0]!r} is not counted; counters: {counted}")


def _again(rig: Rig, tokens: list[int], wanted: int) -> None:
    """The tier stays damaged, nobody is misled the second time (H3)."""
    hit = rig.resolve(tokens, deadline_s=SHORT_DEADLINE_S)
    rig.release(hit)
    if hit.wrong is not None or hit.tokens < wanted:
        raise Failed(
            f"asked again, the hit is {hit.tokens} of {wanted} tokens; {hit.wrong or 'content is right'}"
        )


def _heal(rig: Rig, tokens: list[int]) -> None:
    """Whole again, and computed again: everything is stored."""
    rig.keep(tokens, hit=rig.resolve(tokens))
    rig.evict()
    hit = rig.resolve(tokens)
    rig.release(hit)
    if hit.wrong is not None or hit.tokens != len(tokens) - 1:
        raise Failed(
            f"after the damage has ended and the prompt ran again, {hit.tokens} of {len(tokens) - 1} tokens"
            f" come back; {hit.wrong or 'content is right'}"
        )


def _idle(bench: Bench, case: str) -> str:
    """KVC-OFFLOAD-04."""
    if case == SCRIPTS:
        if bench.kept.get(LEFT):
            raise Failed(f"nothing is going on any more, and still, {first_few(bench.kept[LEFT])}")
        return ""
    page = page_sizes(bench.small, (3,))[0]
    model = model_for(bench, page, limit_bytes=512)
    rig = Rig(bench, model, pages=16, tiers=[{"capacity_bytes": 12 * (page * 512 + 512)}])
    families = [prompt(bench.seed, 800, number, length=6 * page) for number in range(4)]
    done = rig.churn(families, threads=3, rounds=40, seed=bench.seed)
    rig.call("flush")
    leaks = rig.leaks()
    if leaks:
        raise Failed(f"at idle after a mixed run (seed {bench.seed}): {', '.join(leaks)}")
    books = rig.call("look").body["books"]
    if books is not None:
        raise Failed(f"at idle after a mixed run (seed {bench.seed}): {books}")
    ended = rig.close()
    if not ended["report"]["drained"]:
        raise Failed(f"close left something running: {ended['report']}")
    if ended["after"] != "UsageFault":
        raise Failed(
            f"a resolve after close answered with {ended['after'] or 'a prefix'}; expected UsageFault"
        )
    return ", ".join(f"{number} {name}" for name, number in done.items())


def _refusals(bench: Bench, case: str) -> str:
    """KVC-OFFLOAD-05."""
    page = page_sizes(bench.small, (3,))[0]
    model = model_for(bench, page)
    nameless = model.model_copy(update={"weights": WeightIdentity(kind="unresolved")})
    named = model.model_copy(update={"weights": WeightIdentity(kind="digest", value="0" * 32)})
    match case:
        case "lasting tier, unresolved weights":
            for claim in ("persistent", "shared"):
                _must(bench, nameless, f"a {claim} tier", tiers=[{"claims": {claim: True}}], secret=SECRET)
        case "lasting tier, resolved weights":
            lasting = {"claims": {"persistent": True}}
            _must(bench, named, None, tiers=[lasting], secret=SECRET)
        case "DRAM tier, tp 1":
            _must(bench, nameless, None, tiers=[{}])
        case _:
            if faults := tp_faults(model, 2):
                raise CouldNotRun(f"the declaration cannot be cut over 2 workers: {faults[0]}")
            _must(bench, nameless, None, tiers=[{}], tp=2)
            _must(bench, named, None, tiers=[], tp=2)
    return ""


def _must(bench: Bench, model: KvModel, refused: str | None, **more: Any) -> None:
    """Building a store must be refused, for what is named, or served."""
    arguments = {
        "store": "refused",
        "model": model.canonical_json(),
        "pages": 16,
        "step_tokens": model.page_tokens,
        **more,
    }
    found = bench.small_child.call("store.refusal", arguments).body
    if refused is None and found["clauses"] is not None:
        raise Failed(f"this must be served, and was refused: {found['text']}", fault="runtime")
    if refused is not None and found["clauses"] is None:
        weights = model.weights.kind
        saw = f"{refused} (weights: {weights}) must be refused with {OFFLOAD_05}, and was accepted"
        raise Failed(saw, fault="runtime")
    if refused is not None and set(found["clauses"]) != {OFFLOAD_05}:
        saw = f"{refused} was refused with {found['clauses']}, not {OFFLOAD_05}: {found['text']}"
        raise Failed(saw, fault="runtime")


CHECKS: Final[tuple[Check, ...]] = (
    Check("KVC-OFFLOAD-01", _restore, _restore_cases),
    Check("KVC-OFFLOAD-03", _damaged, _damage_cases),
    Check("KVC-OFFLOAD-04", _idle, lambda _: (SCRIPTS, "a mixed run")),
    Check(
        OFFLOAD_05,
        _refusals,
        lambda _: (
            "lasting tier, unresolved weights",
            "lasting tier, resolved weights",
            "DRAM tier, tp 1",
            "DRAM tier, tp 2",
        ),
    ),
)

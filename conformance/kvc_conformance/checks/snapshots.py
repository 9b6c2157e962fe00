"""What a store does with state that is rewritten at each token, and with windows: a script a promise."""

from __future__ import annotations

from typing import Any, Final

from kvc_conformance.bench import Bench, Check, Failed
from kvc_conformance.beside import Beside
from kvc_conformance.content import page_sizes
from kvc_conformance.driver import ProbeFailed
from kvc_conformance.rig import STEP_PAGES, Rig, model_for, prompt
from kvcontract.contract.model import Full, KvModel

PAGE: Final = 3
PAGE_SIZES: Final = (1, 3, 16)
BOUNDARY_TOKENS: Final = 4
POOL_PAGES: Final = 64
LEAST_SLOTS: Final = 3
"""Blocks of a slab: padding, a live slot, a snapshot."""


def _stored_slots(bench: Bench) -> KvModel:
    """The declaration, at the page size and boundary that snapshots are looked at with."""
    return model_for(bench, page_sizes(bench.small, (PAGE,))[0], boundary_tokens=BOUNDARY_TOKENS)


def _slot_blocks(model: KvModel, blocks: int) -> dict[str, int]:
    return {f"slots-{name}": blocks for name in Beside.of(model).slots}


def _units(rig: Rig, bench: Bench, seed: int, units: int) -> list[int]:
    """A prompt of so many steps between checkpoints, and a token to compute."""
    return prompt(bench.seed, 900, seed, length=units * rig.beside.granule_tokens + 1)


def _expect(rig: Rig, tokens: list[int], wanted: int, what: str) -> None:
    found = rig.hit_tokens(tokens)
    if found != wanted:
        raise Failed(f"{what}: a hit of {found} tokens; expected {wanted}")


# F1, F2, F3


def _published(bench: Bench, case: str) -> str:
    """KVC-BOUNDED-02."""
    rig = Rig(bench, _stored_slots(bench), pages=POOL_PAGES)
    PUBLISHED[case](bench, rig)
    rig.close()
    return ""


def _in_time(bench: Bench, rig: Rig) -> None:
    """Sealed where it stands: found there, and it stays what it was while its owner goes on."""
    unit, tokens = rig.beside.granule_tokens, _units(rig, bench, 1, 3)
    name = rig.admit(tokens, {})
    for end in range(unit, 3 * unit + 1, unit):
        rig.step(name, tokens, end - unit, end, "", max_tokens=unit, token=0)
        for known in range(unit, end + 1, unit):
            _expect(rig, tokens[: known + 1], known, f"sealed at {known}, its owner being at {end}")
    rig.call("retire", id=name)
    _expect(rig, tokens, 3 * unit, "its owner has gone")


def _late(bench: Bench, rig: Rig) -> None:
    """Sealed only when the state is another already: found nowhere, under no name."""
    unit, tokens = rig.beside.granule_tokens, _units(rig, bench, 2, 2)
    name = rig.admit(tokens, {}, stops=[unit])
    rig.step(name, tokens, 0, unit, "", max_tokens=unit, token=0, seal=False)
    rig.step(name, tokens, unit, unit + 1, "", max_tokens=1, token=0, seal=False)
    rig.call("seal", id=name)
    _expect(rig, tokens, 0, f"a request that stood at {unit} was sealed a token later")
    rig.call("retire", id=name)
    _expect(rig, tokens, 0, "and has gone")


def _never(bench: Bench, rig: Rig) -> None:
    """Nobody sealed it, and it ended elsewhere: nothing was taken."""
    unit, tokens = rig.beside.granule_tokens, _units(rig, bench, 3, 1)
    name = rig.admit(tokens, {})
    rig.step(name, tokens, 0, unit, "", max_tokens=unit, token=0, seal=False)
    _expect(rig, tokens, 0, f"a request stands at {unit}, and nobody has sealed it")
    rig.step(name, tokens, unit, unit + 1, "", max_tokens=1, token=0, seal=False)
    rig.call("retire", id=name)
    _expect(rig, tokens, 0, "it ended a token behind the boundary")


def _at_its_end(bench: Bench, rig: Rig) -> None:
    """A request that ends where it can be continued is sealed by its end."""
    unit, tokens = rig.beside.granule_tokens, _units(rig, bench, 4, 1)
    name = rig.admit(tokens[:unit], {})
    rig.step(name, tokens[:unit], 0, unit, "", max_tokens=unit, token=0, seal=False)
    rig.call("retire", id=name)
    _expect(rig, tokens, unit, f"a request that stood at {unit} has ended")


def _reverted(bench: Bench, rig: Rig) -> None:
    """A step that came to nothing leaves nothing to seal: its slot may hold anything."""
    unit, tokens = rig.beside.granule_tokens, _units(rig, bench, 5, 2)
    name = rig.admit(tokens, {})
    rig.step(name, tokens, 0, unit, "", max_tokens=unit, token=0, revert=True)
    rig.call("seal", id=name)
    _expect(rig, tokens, 0, "the step to the boundary was reverted")
    rig.call("retire", id=name)
    _expect(rig, tokens, 0, "and the request has ended")


PUBLISHED: Final = {
    "sealed in time": _in_time,
    "sealed late": _late,
    "never sealed": _never,
    "ended at a boundary": _at_its_end,
    "reverted": _reverted,
}


# F4


def _pinned(bench: Bench, _case: str) -> str:
    """KVC-BOUNDED-03: whatever happens beside, a snapshot stays until it is copied, and no longer."""
    model = _stored_slots(bench)
    rig = Rig(bench, model, pages=POOL_PAGES, beside=_slot_blocks(model, 5))
    unit, tokens = rig.beside.granule_tokens, _units(rig, bench, 10, 2)
    rig.keep(tokens)
    hit = rig.resolve(tokens)
    if hit.wrong is not None or hit.tokens != 2 * unit:
        raise Failed(f"a hit of {hit.tokens} of {2 * unit} tokens; {hit.wrong or 'content is right'}")

    def press(seed: int) -> None:
        others = [_units(rig, bench, seed + number, 3) for number in range(2)]
        names = [rig.compute(other) for other in others]
        for name in names:
            rig.call("retire", id=name)

    press(20)
    wrong = rig.still_wrong(hit, tokens)
    if wrong is not None:
        raise Failed(f"what a hit holds was given to others before it was used: {wrong}")
    name = rig.admit(tokens, {}, hit=hit)
    press(30)
    rig.step(name, tokens, 2 * unit, len(tokens), "", max_tokens=1, token=0)  # judges what was copied
    left = {key: count for key, count in rig.held().items() if key.startswith("slots-") and count != 1}
    if left:
        raise Failed(f"one request is live, and its snapshot is copied; still held: {left}")
    rig.call("retire", id=name)
    _nothing_held(rig)
    rig.close()
    return ""


def _nothing_held(rig: Rig) -> None:
    left = {key: count for key, count in rig.held().items() if count}
    if left:
        raise Failed(f"nobody is there any more, and blocks are held: {left}")


# F5, R2


def _joint(bench: Bench, case: str) -> str:
    """KVC-BOUNDED-04: full pages reach further than what goes beside; the rest is let go."""
    page = page_sizes(bench.small, (PAGE,))[0]
    model = model_for(bench, page, boundary_tokens=BOUNDARY_TOKENS)
    tiers: list[dict[str, Any]] = [{}] if case == "from a tier" else []
    narrow = {
        key: -(-reach.tokens // page) + STEP_PAGES + 3 for key, reach in Beside.of(model).windows.items()
    }
    rig = Rig(bench, model, pages=POOL_PAGES, tiers=tiers, beside={} if tiers else narrow)
    unit, tokens = rig.beside.granule_tokens, _units(rig, bench, 40, 5)
    name = rig.compute(tokens, stops=[unit, 2 * unit])
    rig.call("retire", id=name)
    if tiers:
        rig.evict()
    elif rig.beside.windows:  # their pages stay as long as there is room: take it, and leave the full ones
        for seed in range(41, 44):
            rig.keep(_units(rig, bench, seed, 2), {"salt": str(seed)})
    hit = rig.resolve(tokens)
    if hit.wrong is not None:
        raise Failed(f"a hit of {hit.tokens} tokens: {hit.wrong}")
    if (tiers or not rig.beside.windows) and hit.tokens != 2 * unit:
        raise Failed(
            f"checkpoints are at {unit} and {2 * unit} of {len(tokens)} tokens; the hit is {hit.tokens}"
        )
    held = rig.held()
    if held[Full().key] != hit.tokens // page:
        raise Failed(f"a hit of {hit.tokens} tokens keeps {held[Full().key]} pages of {page} from others")
    rig.release(hit)
    rig.call("flush")
    _nothing_held(rig)
    rig.close()
    return f"hit {hit.tokens} of {len(tokens)} tokens"


# F6, F8


def _full(bench: Bench, case: str) -> str:
    """KVC-BOUNDED-05."""
    model = _stored_slots(bench)
    if case == "a budget below one snapshot":
        return _refused(bench, model)
    rig = Rig(bench, model, pages=POOL_PAGES, beside=_slot_blocks(model, LEAST_SLOTS))
    unit = rig.beside.granule_tokens
    one, other, third = (_units(rig, bench, 60 + number, 2) for number in range(3))
    names = [rig.admit(tokens, {}) for tokens in (one, other)]
    answer = rig.ask("third", third, {}, 1)
    if answer != "Later":
        raise Failed(f"two requests have both slots; a third got the answer {answer!r}")
    for name, tokens in zip(names, (one, other), strict=True):
        for end in (unit, 2 * unit, len(tokens)):  # at each boundary there is no room for a snapshot
            start = end - unit if end < len(tokens) else 2 * unit
            try:
                rig.step(name, tokens, start, end, "", max_tokens=unit, token=0)
            except ProbeFailed as error:
                raise Failed(f"no slot is free at {end} tokens: {error.kind}: {error.text}") from error
    _expect(rig, one, 0, "no slot was free for a snapshot")
    for name in names:
        rig.call("retire", id=name)
    _nothing_held(rig)
    rig.keep(one)
    _expect(rig, one, 2 * unit, "with a slot free again")
    rig.close()
    return "nothing taken, nobody stopped"


def _refused(bench: Bench, model: KvModel) -> str:
    try:
        Rig(bench, model, pages=POOL_PAGES, beside=_slot_blocks(model, LEAST_SLOTS - 1))
    except ProbeFailed as refusal:
        if refusal.kind != "UsageFault" or f"at least {LEAST_SLOTS}" not in refusal.text:
            raise Failed(
                f"a slab without room for one snapshot: {refusal.kind}: {refusal.text}; expected a UsageFault"
                f" that names {LEAST_SLOTS}"
            ) from refusal
        return "refused with the number needed"
    raise Failed("a slab without room for one snapshot was accepted: no prefix could ever be reused")


# Windows


def _windows(bench: Bench, case: str) -> str:
    """KVC-PREFIX-08: a hit holds, and a request keeps, exactly what is read from there on."""
    page = int(case.removeprefix("page "))
    rig = Rig(bench, model_for(bench, page, boundary_tokens=BOUNDARY_TOKENS), pages=POOL_PAGES)
    unit = rig.beside.granule_tokens
    tokens = prompt(bench.seed, page, 950, length=6 * unit + page // 2 + 1)
    name, at = rig.admit(tokens, {}, max_new=2), 0
    stops = rig.beside.stops(len(tokens))
    while at < len(tokens):
        end = rig.beside.step_end(at, min(len(tokens), at + page + 1), stops)
        rig.step(name, [*tokens, 7], at, end, "", max_tokens=page + 1, token=7)
        at = end
        _keeps_what_is_read(rig, name, at)
    rig.step(name, [*tokens, 7], at, at + 1, "", token=8)
    _keeps_what_is_read(rig, name, at + 1)
    for known in range(unit, 6 * unit + 1, unit):
        _expect(rig, tokens[: known + 1], known, f"the prompt has run to {at}, and is cut at {known}")
    rig.call("retire", id=name)
    rig.close()
    return f"{', '.join(rig.beside.windows)}: {len(tokens) // page} pages"


def _keeps_what_is_read(rig: Rig, name: str, end: int) -> None:
    tables = rig.call("look").body["pages"][name]
    for key in rig.beside.windows:
        kept = [number for number, block in enumerate(tables[key]) if block]
        wanted = rig.beside.needed(key, end)
        if kept != wanted:
            raise Failed(f"{key}: after {end} tokens a request has pages {kept}; later steps read {wanted}")


CHECKS: Final[tuple[Check, ...]] = (
    Check("KVC-BOUNDED-02", _published, lambda _: tuple(PUBLISHED)),
    Check("KVC-BOUNDED-03", _pinned),
    Check("KVC-BOUNDED-04", _joint, lambda _: ("on the device", "from a tier")),
    Check("KVC-BOUNDED-05", _full, lambda _: ("no free slot", "a budget below one snapshot")),
    Check(
        "KVC-PREFIX-08",
        _windows,
        lambda bench: tuple(f"page {size}" for size in page_sizes(bench.small, PAGE_SIZES)),
    ),
)

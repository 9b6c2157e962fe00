"""Each check of the store over a sound one in this process, of which one answer is changed: that is told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest
from near import Change, Near, Spoilt, told

from kvc_conformance.bench import Failed
from kvc_conformance.channel import Message
from kvc_conformance.checks import offload, prefix, snapshots
from kvc_conformance.checks.offload import LEFT, SCRIPTS
from kvc_conformance.driver import ProbeFailed
from kvc_conformance.profiles import Profile
from kvcontract import Arena, Field, Group, KvModel, WeightIdentity, Window

CHECKS = {check.clause: check for check in (*offload.CHECKS, *prefix.CHECKS, *snapshots.CHECKS)}


def model_of() -> KvModel:
    """Full attention, a window, and states."""

    def item(name: str, size: int) -> Field:
        return Field(name=name, dtype="float32", axes={"dim": size})

    return KvModel(
        contract=1,
        name="toy",
        weights=WeightIdentity(kind="unresolved"),
        numerics="test",
        page_tokens=3,
        groups=(
            Group(name="kv"),
            Group(name="win", reach=Window(tokens=6)),
            Group(name="gdn", kind="bounded", boundary_tokens=3),
        ),
        arenas=(
            Arena.planes(name="rows", group="kv", layer=0, fields=(item("k", 4),)),
            Arena.planes(name="near", group="win", layer=1, fields=(item("k", 4),)),
            Arena.planes(name="state", group="gdn", layer=2, fields=(item("s", 8),)),
        ),
    )


@dataclass
class Bench:
    """A bench with no processes."""

    folder: Path
    small_child: Near
    small: KvModel = field(default_factory=model_of)
    seed: int = 0
    kept: dict[str, Any] = field(default_factory=dict)
    profile: Profile = field(default_factory=lambda: Profile("a test", mixes=1, mix_steps=40, worlds=1))


@contextmanager
def bench_of(folder: Path, *spoilt: Spoilt) -> Iterator[Any]:
    """A store, and what is changed of its answers."""
    near = Near({"homes": [], "device": "cpu"}, spoilt)
    try:
        yield Bench(folder, near)
    finally:
        near.close()


def no_hit(answer: Message) -> None:
    """Nothing was found."""
    answer.body.update(hit_tokens=0, pages=[], sources={}, beside={})
    arrays: Any = answer.arrays
    for name in list(arrays):
        arrays[name] = arrays[name][:0]
    arrays.pop("state", None)


def bit(name: str) -> Change:
    """One bit of what was read is another."""

    def change(answer: Message) -> None:
        answer.arrays[name].reshape(-1)[0] ^= 1

    return change


def held(key: str, count: int) -> Change:
    """So many blocks are held."""
    return lambda answer: answer.body["pools"][key].update(held=count)


def kept(key: str, number: int) -> Change:
    """A request has a page, or has it no more."""

    def change(answer: Message) -> None:
        for tables in answer.body["pages"].values():
            tables[key][number] = 0 if tables[key][number] else 1

    return change


def left(answer: Message) -> None:
    """Something runs on."""
    answer.body["store"] = {"loads": 1}


def undrained(answer: Message) -> None:
    """Something ran on."""
    answer.body["report"]["drained"] = False


def raised(kind: str, text: str = "no") -> Change:
    """It raises instead."""

    def change(_: Message) -> NoReturn:
        raise ProbeFailed({"kind": kind, "text": text, "trace": ""})

    return change


B2, B3, B4, B5 = (f"KVC-BOUNDED-0{number}" for number in (2, 3, 4, 5))
P5, P6, P7, P8 = (f"KVC-PREFIX-0{number}" for number in (5, 6, 7, 8))
O1, O3, O4, O5 = (f"KVC-OFFLOAD-0{number}" for number in (1, 3, 4, 5))
WINDOW, SLOTS = "window-6", "slots-gdn"
RESTORE = "page 3, page-first"

WRONG: list[tuple[str, str, str, int, Change, str]] = [
    (B2, "sealed in time", "resolve", -1, no_hit, "sealed at 12, its owner being at 12: a hit of 0 tokens"),
    (B2, "sealed in time", "resolve", -7, no_hit, "its owner has gone: a hit of 0 tokens; expected 36"),
    (B2, "sealed in time", "resolve", -3, bit("state"), "a hit of 24 tokens has wrong content: the state"),
    (B2, "sealed in time", "resolve", -3, bit("full"), "a hit of 24 tokens has wrong content: token 0"),
    (B2, "sealed in time", "resolve", -3, bit(WINDOW), "a hit of 24 tokens has wrong content: window-6"),
    (B2, "sealed in time", "step", -2, bit("state"), "a step began with another state than its own"),
    (B2, "ended at a boundary", "resolve", -1, no_hit, "has ended: a hit of 0 tokens; expected 12"),
    (B3, "", "resolve", -1, no_hit, "a hit of 0 of 24 tokens; content is right"),
    (B3, "", "resolve", -1, bit("state"), "a hit of 24 of 24 tokens; the state after 24"),
    (B3, "", "reread", -1, bit("state"), "what a hit holds was given to others before it was used"),
    (B3, "", "gauges", -1, held(SLOTS, 2), "one request is live, and its snapshot is copied; still held"),
    (B3, "", "gauges", -2, held("full", 1), "nobody is there any more, and blocks are held: {'full': 1}"),
    (B4, "from a tier", "resolve", -1, no_hit, "checkpoints are at 12 and 24 of 61 tokens; the hit is 0"),
    (B4, "from a tier", "resolve", -1, bit("full"), "a hit of 24 tokens: token 0"),
    (B4, "from a tier", "gauges", -1, held("full", 9), "keeps 9 pages of 3 from others"),
    (B4, "on the device", "gauges", -1, held("full", 9), "keeps 9 pages of 3 from others"),
    (B4, "from a tier", "gauges", -2, held(WINDOW, 1), "blocks are held: {'window-6': 1}"),
    (
        B4,
        "from a tier",
        "drain",
        1,
        lambda a: a.body["held"].update(full=2),
        "2 blocks of full are still held",
    ),
    (B5, "no free slot", "admit_request", -3, told(answer="RequestKv"), "third got the answer 'RequestKv'"),
    (
        B5,
        "no free slot",
        "admit_request",
        -1,
        told(answer="Later"),
        "got the answer 'Later' from an idle pool",
    ),
    (B5, "no free slot", "step", -2, raised("PoolError"), "no slot is free at 24 tokens: PoolError: no"),
    (B5, "no free slot", "resolve", -2, no_hit, "with a slot free again: a hit of 0 tokens; expected 24"),
    (B5, "no free slot", "gauges", -1, held(SLOTS, 1), "blocks are held"),
    (
        B5,
        "a budget below one snapshot",
        "build",
        1,
        raised("KeyError", "at least 3"),
        "expected a UsageFault",
    ),
    (B5, "a budget below one snapshot", "build", 1, raised("UsageFault", "at least 4"), "that names 3"),
    (B5, "a budget below one snapshot", "build", 1, lambda _: None, "one snapshot was accepted"),
    (P8, "page 3", "look", -4, kept(WINDOW, 0), "window-6: after .* tokens a request has pages"),
    (P8, "page 3", "resolve", -2, no_hit, "and is cut at 24: a hit of 0 tokens"),
    (P8, "page 3", "look", -12, kept(WINDOW, 1), "window-6: after .* tokens a request has pages"),
    (P5, "page 3", "resolve", 5, no_hit, "that ran before hits 0 tokens; expected 12, in pages of 3"),
    (P5, "page 3", "resolve", -12, no_hit, r"differs from one that ran at token 12 \(pages of 3\) hits 0"),
    (P5, "page 3", "resolve", -16, no_hit, "a next turn after 17 tokens were written hits 0 tokens"),
    (P6, "scopes", "resolve", -2, told(hit_tokens=3), "hits 3 tokens that only other scopes have computed"),
    (P6, "scopes", "resolve", -12, no_hit, r"\(\) ran 7 tokens; again, it hits 0 of 6 from nowhere"),
    (
        P6,
        "scopes",
        "resolve",
        -13,
        bit("full"),
        "hits 6 of 6 from {'device': 6}, expected all from device; token",
    ),
    (P6, "scopes", "resolve", -24, told(sources={"device": 6}), "expected all from dram"),
    (
        P6,
        "identities",
        "resolve",
        -1,
        no_hit,
        "the same identity hits 0 tokens of what this one wrote; expected 6",
    ),
    (P6, "identities", "resolve", -5, no_hit, "asked after those hits 0 tokens"),
    (P7, "page 3", "look", -5, told(books="a page too many"), "a page too many"),
    (O1, RESTORE, "resolve", -1, no_hit, r"24 tokens were stored .*; 0 came back \(no reason given\)"),
    (O1, RESTORE, "resolve", -2, bit("full"), "what came back through the dram tier is not what it was"),
    (O1, RESTORE, "resolve", -2, told(sources={"device": 18}), "from the dram tier; the sources say"),
    (O1, RESTORE, "resolve", -2, told(sources={"dram": 3}), "from the dram tier; the sources say"),
    (O3, "load fails", "resolve", -1, bit("full"), "damaged bytes were served: token 0"),
    (O3, "load fails", "resolve", -1, no_hit, "the hit is 0 tokens; expected 6: up to the damage"),
    (O3, "load fails", "resolve", -1, told(degraded=["x"]), r"no reason begins with 'dram: failed': \['x'\]"),
    (O3, "load fails", "gauges", 1, told(degraded={}), "the reason 'dram: failed.*' is not counted"),
    (O3, "load fails", "resolve", -2, no_hit, "asked again, the hit is 0 of 6 tokens; content is right"),
    (O3, "load fails", "resolve", -4, no_hit, "0 of 15 tokens come back; content is right"),
    (O3, "load fails", "resolve", -4, bit("full"), "15 of 15 tokens come back; token 0"),
    (O3, "load fails", "resolve", -1, raised("OSError"), "a tier's failure reached the caller: OSError: no"),
    (O4, "a mixed run", "gauges", 1, left, r"at idle after a mixed run \(seed 0\): store: 1 loads"),
    (O4, "a mixed run", "look", 1, told(books="a page too many"), r"\(seed 0\): a page too many"),
    (O4, "a mixed run", "close", 1, undrained, "close left something running"),
    (O4, "a mixed run", "close", 1, told(after=None), "a resolve after close answered with a prefix"),
    (
        O5,
        "DRAM tier, tp 1",
        "refusal",
        1,
        told(clauses=["x"], text="no"),
        "must be served, and was refused: no",
    ),
    (
        O5,
        "lasting tier, unresolved weights",
        "refusal",
        -2,
        told(clauses=None),
        "a shared tier .* was accepted",
    ),
    (O5, "lasting tier, unresolved weights", "refusal", 1, told(clauses=["x"]), r"was refused with \['x'\]"),
]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of what was dropped
@pytest.mark.parametrize(
    ("clause", "case", "probe", "nth", "change", "said"),
    WRONG,
    ids=[f"{item[0]} {item[2]} {at}" for at, item in enumerate(WRONG)],
)
def test_one_wrong_answer_is_told(
    tmp_path: Path, clause: str, case: str, probe: str, nth: int, change: Change, said: str
) -> None:
    """KVC-PREFIX-05 to KVC-OFFLOAD-05: a store that is right but for one answer."""
    instead = probe == "build" or change.__qualname__.startswith("raised")
    with (
        bench_of(tmp_path, Spoilt(probe, nth, change, instead)) as bench,
        pytest.raises(Failed, match=said),
    ):
        CHECKS[clause].run(bench, case)


def test_what_other_scripts_left_is_told_once(tmp_path: Path) -> None:
    """KVC-OFFLOAD-04: a restore that leaves a lease is right, and this clause is not."""
    with bench_of(tmp_path, Spoilt("gauges", 1, left)) as bench:
        assert str(CHECKS[O1].run(bench, RESTORE)).endswith("B a slot")
        assert bench.kept[LEFT] == [f"after a restore ({RESTORE}): store: 1 loads"]
        with pytest.raises(Failed, match="nothing is going on any more, and still, after a restore"):
            CHECKS[O4].run(bench, SCRIPTS)


@pytest.mark.parametrize(
    ("clause", "case", "said"),
    [
        *((B2, case, "") for case in snapshots.PUBLISHED),
        (B3, "", ""),
        (B4, "on the device", "hit 0 of 61 tokens"),
        (P6, "identities", "numerics, weights and secret tell stores apart"),
        (O1, "page 3, restarted over a disk tier", "32 B a token, 32 B a slot"),
        (O1, "page 3, layer-first", "32 B a token, 32 B a slot"),
        (O3, "win: load fails", "hit 4 of 5 pages"),
        (O3, "gdn: load raises", "hit 0 of 5 pages"),
        *((O5, case, "") for case in ("lasting tier, unresolved weights", "lasting tier, resolved weights")),
        *((O5, f"DRAM tier, tp {tp}", "") for tp in (1, 2)),
        (B4, "from a tier", "hit 24 of 61 tokens"),
        (B5, "a budget below one snapshot", "refused with the number needed"),
        (B5, "no free slot", "nothing taken, nobody stopped"),
        (P5, "page 3", "9 lengths, 5 divergences, 1 conversation"),
        (P6, "scopes", "11 scopes"),
        (P8, "page 3", "window-6: 24 pages"),
        (O3, "nothing is damaged", "hit in full"),
        (O3, "load fails", "hit 2 of 5 pages"),
        (O4, SCRIPTS, ""),
    ],
)
def test_figures_are_told_of_what_is_right(tmp_path: Path, clause: str, case: str, said: str) -> None:
    """A sound store passes; how much was tried is told."""
    with bench_of(tmp_path) as bench:
        assert CHECKS[clause].run(bench, case) == said


BROKEN = (
    "payload bit flipped",
    "header byte flipped",
    "two records swapped",
    "record of another model",
    "record is lost",
    "load fails",
    "load raises",
    "load is silent",
    "lookup raises",
    "lookup is silent",
    "presence too long",
    "presence too short",
)


def test_every_case_of_a_clause_is_planned(tmp_path: Path) -> None:
    """KVC-PREFIX-05 to KVC-OFFLOAD-05: no case can be left out without a word."""
    with bench_of(tmp_path) as bench:
        planned = {clause: check.cases(bench) for clause, check in CHECKS.items()}
    beside = [f"{group}: {kind}" for group in ("win", "gdn") for kind in BROKEN if "swapped" not in kind]
    assert planned == {
        B2: ("sealed in time", "sealed late", "never sealed", "ended at a boundary", "reverted"),
        B3: ("",),
        B4: ("on the device", "from a tier"),
        B5: ("no free slot", "a budget below one snapshot"),
        P5: ("page 1", "page 3", "page 16"),
        P6: ("scopes", "identities"),
        P7: ("page 1", "page 3", "page 5"),
        P8: ("page 1", "page 3", "page 16"),
        O1: (
            *(
                f"page {size}, {memory}"
                for size in ("1", "3", "16", "3 x 2", "1 x 3")
                for memory in ("page-first", "layer-first")
            ),
            "page 3, restarted over a disk tier",
            "page 1 x 3, restarted over a disk tier",
        ),
        O3: ("nothing is damaged", *BROKEN, *beside),
        O4: (SCRIPTS, "a mixed run"),
        O5: (
            "lasting tier, unresolved weights",
            "lasting tier, resolved weights",
            "DRAM tier, tp 1",
            "DRAM tier, tp 2",
        ),
    }

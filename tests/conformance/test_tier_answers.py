"""Each check of tiers over a sound one in this process, of which one answer is changed: that is told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from near import Change, Near, Spoilt, told

from kvc_conformance import tier_rig
from kvc_conformance.bench import Failed, NotApplicable
from kvc_conformance.channel import Message
from kvc_conformance.checks import TIER_CHECKS, tier, tier_damage, tier_life
from kvc_conformance.driver import ProbeFailed
from kvcontract.tiers.base import Code

CHECKS = {check.clause: check for check in TIER_CHECKS}
Body = dict[str, Any]


@dataclass
class Bench:
    """A bench with no processes."""

    folder: Path
    plugin: Any
    peer: Any
    seed: int = 0


@contextmanager
def bench_of(folder: Path, name: str, *spoilt: Spoilt) -> Iterator[Any]:
    """A tier of ours, and what is changed of its answers."""
    one, two = (
        Near({"name": name, "file": None, "plugin_options": {}}, spoilt, whose) for whose in ("first", "peer")
    )
    try:
        yield Bench(folder, one, two)
    finally:
        one.close()
        two.close()


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not happen at once does not happen."""
    for module in (tier_rig, tier, tier_life, tier_damage):
        monkeypatch.setattr(module, "eventually", partial(tier_rig.eventually, patience_s=0.05))


def code(*codes: Code, at: int = 0) -> Change:
    """Other codes, from one record on."""

    def change(answer: Message) -> None:
        for row, value in enumerate(codes, at):
            answer.body["codes"][row] = int(value)

    return change


def here(value: object = None, at: int = 0) -> Change:
    """Another answer for one key; None: the contrary."""

    def change(answer: Message) -> None:
        present = answer.body["present"]
        present[at] = not present[at] if value is None else value

    return change


def all_here(answer: Message) -> None:
    """Everything is said to be there."""
    answer.body["present"] = [True] * len(answer.body["present"])


def all_ok(answer: Message) -> None:
    """Everything is said to have been read."""
    answer.body["codes"] = [0] * len(answer.body["codes"])


def memory(answer: Message) -> None:
    """One bit of the first record is another."""
    answer.arrays["memory"][0] ^= 1


def tried(**values: Any) -> Change:
    """Another end of the first misuse."""
    return lambda answer: answer.body["tried"][0].update(values)


def misuse(name: str, codes: list[int]) -> Change:
    """Other codes of one misuse."""

    def change(answer: Message) -> None:
        next(item for item in answer.body["tried"] if item["name"] == name)["codes"] = codes

    return change


def after(**values: Any) -> Change:
    """Another end of what came after close."""
    return lambda answer: answer.body["after"].update(values)


def seen(answer: Message) -> None:
    """A reader met other bytes."""
    answer.body["seen"] = [*answer.body["seen"], [3, "00", 1]]


def stats(**values: int) -> Change:
    """Another gauge."""
    return lambda answer: answer.body["stats"].update(values)


def untold(answer: Message) -> None:
    """Nobody hears of the loss that came first."""
    keys: Any = answer.arrays
    keys["keys"] = keys["keys"][1:]


def told_alive(answer: Message) -> None:
    """A record that is there is told as lost."""
    last = tier_rig.key_array([tier_rig.FIRST_FILLER + tier_rig.FILLERS - 1])
    keys: Any = answer.arrays
    keys["keys"] = np.concatenate([keys["keys"], last])


WRONG: list[tuple[str, str, str, int, Change, str]] = [
    ("01", "", "build", 1, told(lacks=["discard"]), "it has no discard"),
    ("01", "", "build", 1, told(max_record_bytes=0), "max_record_bytes 0"),
    ("01", "", "build", 1, told(max_record_bytes=True), "max_record_bytes True"),
    ("01", "", "build", 1, told(handoff_release="late"), "handoff_release 'late'"),
    ("01", "", "close", 1, told(closed=False), "close left something running"),
    ("02", "21 B, 3 records", "save", 1, code(Code.FULL), "2 OK, 1 FULL where 3"),
    ("02", "21 B, 3 records", "save", 1, told(unchanged=False), "changed the memory that it was to read"),
    ("02", "21 B, 3 records", "save", 1, told(settled=False), "did not settle"),
    ("02", "21 B, 3 records", "save", 1, told(codes=[0]), "settled with 1 codes"),
    ("02", "21 B, 3 records", "save", 1, told(codes=[0, 99, 0]), "which are no codes"),
    ("02", "21 B, 3 records", "lookup", 1, here(at=1), "record 1 is absent"),
    ("02", "21 B, 3 records", "lookup", 1, told(present=None), "did not settle with a lease"),
    ("02", "21 B, 3 records", "lookup", 1, told(present=[True]), "was answered for 1"),
    ("02", "21 B, 3 records", "load", -1, code(Code.CORRUPT), "leased records ended CORRUPT, OK"),
    ("02", "21 B, 3 records", "load", -2, code(Code.MISS), "leased records ended MISS, OK"),
    ("02", "21 B, 3 records", "load", -2, memory, "at byte 0; 0x"),
    ("03", "7 keys", "lookup", -1, here(), "key 0 of 9"),
    ("03", "7 keys", "lookup", -2, here(at=8), "key 8 of 9"),
    ("03", "7 keys", "save", -1, code(Code.FULL), "2 OK, 1 FULL"),
    ("04", "room", "save", -1, code(Code.SHED), "saved in one batch ended"),
    ("04", "room", "lookup", -1, here(), "after the batch, of records"),
    ("04", "room", "load", -1, code(Code.OK, at=1), "a load of records present, absent, present ended"),
    ("04", "room", "load", -1, code(Code.MISS, at=2), "a load of records present, absent, present ended"),
    ("04", "room", "load", -1, memory, "at byte 0; 0x"),
    ("04", "room", "lookup", -7, here(at=1), "a load of records present, absent, present ended"),
    ("04", "no room", "save", -1, code(Code.FULL), "saved in one batch ended"),
    ("05", "again", "save", -2, code(Code.FULL), "2 OK, 1 FULL"),
    ("05", "again", "save", -3, code(Code.REFUSED), "was refused when it was saved again"),
    ("05", "again", "load", 1, code(Code.MISS), "after records were saved a second time: 2 OK, 1 MISS"),
    ("05", "again", "load", 1, memory, "at byte 0; 0x"),
    ("05", "too late", "save", -1, code(Code.FULL), "FULL', 'EXPIRED'.; expected EXPIRED"),
    ("05", "too late", "lookup", -1, here(at=1), "a save ended EXPIRED; afterwards its record is present"),
    ("05", "too late", "save", 2, code(Code.FULL), "cannot be saved later"),
    ("05", "too late", "load", 1, code(Code.MISS), "a record that failed first and was saved then"),
    ("05", "too large", "save", -1, code(Code.OK), "a save ended OK; afterwards its record is absent"),
    ("05", "no room", "save", -1, code(Code.EXPIRED, at=1), "expected FULL"),
    ("05", "no room", "crowd", 1, code(Code.FAILED, at=-1), "a save ended FAILED; expected FULL"),
    ("05", "no room", "crowd", 1, all_ok, "that nobody may evict fit into a quota"),
    ("06", "", "hammer", 1, seen, "1 of 12 records"),
    ("06", "", "load", 1, code(Code.MISS), "after readers hammered on records"),
    ("07", "stays", "lookup", -2, here(), "of 4 leased records 3 are left"),
    ("07", "stays", "load", 1, code(Code.MISS), r"loads under the lease ended \['MISS', 'OK', 'OK', 'OK'\]"),
    ("07", "stays", "load", 1, memory, "at byte 0; 0x"),
    ("07", "load outlives it", "load", 1, code(Code.FAILED), "a load whose lease ended meanwhile came to"),
    ("07", "load outlives it", "load", 1, memory, "record 2 of"),
    ("07", "released", "lookup", -1, here(), "took a leased record away"),
    ("07", "released", "save", -1, code(Code.OK), "a second lease on the same records did not keep them"),
    ("07", "released", "save", 2, code(Code.FULL), "was released; its records still take all room"),
    ("07", "dropped", "save", 2, code(Code.FULL), "was lost; its records still take all room"),
    ("07", "late", "stats", 1, stats(leases=1), r"stats\(\) counts 1"),
    ("08", "in all", "crowd", 1, code(Code.FULL), r"saves ended \['FULL', 'OK'\] although everything"),
    ("08", "in all", "lookup", 1, here(at=-1), "the record saved last was evicted"),
    ("08", "oversized", "save", -2, code(Code.OK), "ended OK; expected TOO_LARGE"),
    ("08", "oversized", "load", -1, code(Code.MISS), "beside one that was too large: 1 OK, 1 MISS"),
    ("08", "oversized", "load", -2, code(Code.MISS), "of just the size that max_record_bytes allows"),
    ("09", "save", "save", -2, code(Code.OK, at=1), "saves begun after their deadline ended"),
    ("09", "save", "lookup", -1, here(at=1), "saves begun after their deadline ended"),
    ("09", "lookup", "lookup", -1, here(), "a look-up begun after its deadline found a record"),
    ("09", "load", "load", -1, code(Code.FULL), "ended FULL; expected EXPIRED"),
    ("09", "load", "load", -1, memory, "wrote to memory"),
    ("09", "load", "load", -2, code(Code.MISS), "after an operation that came too late"),
    ("10", "", "misuse", 1, told(escaped=["X: y"]), "a thread of the tier ended with X: y"),
    ("10", "", "misuse", 1, lambda answer: answer.body["tried"].pop(), "was not tried"),
    ("10", "", "misuse", 1, tried(raised="X: y"), "raised X: y on the caller's thread"),
    ("10", "", "misuse", 1, tried(settled=False), "never settled"),
    ("10", "", "misuse", 1, tried(called=2), "settled 2 times"),
    ("10", "", "misuse", 1, tried(codes=None), "settled with None; expected one answer for each of 1"),
    ("10", "", "misuse", 1, misuse("load: no rows", [0]), "expected one answer for each of 0"),
    ("10", "", "misuse", 1, misuse("load: too long", [0]), "load: too long: reported OK"),
    ("10", "", "misuse", 1, misuse("load: fewer buffers than rows", [6, 0]), "reported OK"),
    ("10", "", "misuse", 1, misuse("lookup: no record keys", [0, 1]), "said that something is present"),
    ("10", "", "load", 1, code(Code.MISS), "after calls that make no sense"),
    ("11", "discarded", "lookup", 2, here(at=0), r"was discarded; present are \[True, True\]"),
    ("11", "discarded", "lookup", 2, here(at=1), r"was discarded; present are \[False, False\]"),
    ("11", "discarded", "save", -2, code(Code.FULL), "1 FULL where 1"),
    ("11", "discarded", "load", 1, code(Code.MISS), "after a discarded record was saved anew"),
    ("11", "replaced", "load", 1, code(Code.MISS), "after a discarded record was saved anew"),
    ("12", "stays", "load", 1, code(Code.MISS), "handed off, and thrice the quota saved since"),
    ("12", "released", "save", -1, code(Code.OK), "the release of an unknown handoff freed"),
    ("12", "released", "save", 2, code(Code.FULL), "a released handoff still takes all room"),
    ("12", "time is over", "save", 1, code(Code.FULL), "of 1 s that nobody released takes its room for ever"),
    ("13", "visible", "save_and_flush", 1, told(flushed=False), "came to False; expected True"),
    ("13", "durable", "save_and_flush", 1, told(flushed=True), "came to True; expected False"),
    ("13", "landed", "save_and_flush", 1, told(done=39), "settled when 39 of 40 saves had"),
    ("13", "landed", "flush", 1, told(flushed=True), "did not say that its deadline had passed"),
    ("13", "landed", "load", 1, code(Code.MISS), "after flush"),
    ("13", "gauges", "stats", 1, lambda answer: answer.body["stats"].pop("handoffs"), "has no handoffs"),
    ("13", "gauges", "stats", 1, stats(leases=2), r"stats\(\) counts {'leases': 2}"),
    ("13", "gauges", "stats", 1, stats(handoffs=1), r"stats\(\) counts {'handoffs': 1}"),
    ("13", "gauges", "save", -2, code(Code.FULL), "2 OK, 1 FULL"),
    ("13", "close", "save_and_close", 1, told(closed=False), "close did not say that everything had ended"),
    ("13", "close", "save_and_close", 1, told(again=False), "close did not say that everything had ended"),
    ("13", "close", "save_and_close", 1, told(done=False), "and a save had not settled"),
    ("13", "close", "save_and_close", 1, after(save=[6, 0]), "expected REFUSED for each record"),
    ("13", "close", "save_and_close", 1, after(present=None), "a look-up after close found records"),
    ("13", "close", "save_and_close", 1, after(present=[False, True]), "a look-up after close found records"),
    ("13", "close", "save_and_close", 1, after(load=[6, 0]), "a load after close reported OK"),
    ("17", "losses", "told", 1, untold, "1 of 131 records can be found no more, and nobody was told"),
    ("17", "losses", "told", 1, told_alive, "1 records are told as lost and can still be found"),
    ("17", "losses", "told", 1, told(reasons=["gone", "evicted"]), "for the reason 'gone'"),
    ("17", "reset", "reset", 1, told(reset=None), "reset came to False"),
    ("17", "reset", "lookup", -2, here(at=3), "after a reset records can still be found"),
    ("17", "reset", "load", -1, code(Code.EXPIRED), r"reads \['EXPIRED', 'OK', 'OK'\] after it"),
    ("17", "reset", "load", -1, memory, "at byte 0; 0x"),
    ("17", "reset", "load", -2, code(Code.MISS), "saved after a reset"),
]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of a lease that is lost
@pytest.mark.parametrize(
    ("number", "case", "probe", "nth", "change", "said"),
    WRONG,
    ids=[f"{item[0]} {item[2]} {at}" for at, item in enumerate(WRONG)],
)
def test_one_wrong_answer_is_told(
    tmp_path: Path, number: str, case: str, probe: str, nth: int, change: Change, said: str
) -> None:
    """KVC-TIER-01 to KVC-TIER-17: a tier in memory that is right but for one answer."""
    with (
        bench_of(tmp_path, "dram", Spoilt(probe, nth, change)) as bench,
        pytest.raises(Failed, match=said),
    ):
        CHECKS[f"KVC-TIER-{number}"].run(bench, case)


LASTING: list[tuple[str, str, str, str, int, Change, str]] = [
    (
        "disk",
        "14",
        "closed",
        "flush",
        1,
        told(flushed=False),
        "a tier that says it is persistent came to False",
    ),
    ("disk", "14", "closed", "save", 1, code(Code.FULL), "19 OK, 1 FULL"),
    ("disk", "14", "closed", "load", 1, code(Code.MISS), "it says it is persistent; 19 of 20 records"),
    ("disk", "14", "closed", "lookup", -2, all_here, "opened again it holds 12,582,912 B with a quota"),
    ("dram", "14", "closed", "lookup", -2, all_here, "opened again it holds 12,582,912 B with a quota"),
    ("shared", "16", "seen", "load", 1, code(Code.MISS), "saved by another process"),
    ("shared", "16", "leases", "lookup", 1, here(), "that one process had leased were evicted by another"),
    ("shared", "16", "leases", "peer save", 1, code(Code.FULL), "released still hold for another"),
    (
        "shared",
        "16",
        "handoffs",
        "save",
        2,
        code(Code.FULL),
        "a handoff that another process released is still",
    ),
    (
        "dram",
        "16",
        "seen",
        "lookup",
        1,
        all_here,
        "does not say that it is shared, and another process finds",
    ),
    ("disk", "17", "losses", "told", 1, untold, "can be found no more, and nobody was told"),
]


@pytest.mark.parametrize(
    ("name", "number", "case", "probe", "nth", "change", "said"),
    LASTING,
    ids=[f"{item[1]} {item[3]} {at}" for at, item in enumerate(LASTING)],
)
def test_one_wrong_answer_of_what_lasts_is_told(
    tmp_path: Path, name: str, number: str, case: str, probe: str, nth: int, change: Change, said: str
) -> None:
    """KVC-TIER-14, KVC-TIER-16: tiers that keep files are right but for one answer."""
    with (
        bench_of(tmp_path, name, Spoilt(probe, nth, change)) as bench,
        pytest.raises(Failed, match=said),
    ):
        CHECKS[f"KVC-TIER-{number}"].run(bench, case)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of a lease that is lost
@pytest.mark.parametrize(
    ("name", "number", "case", "changes", "said"),
    [
        ("dram", "01", "", {"max_record_bytes": None}, "tier 'dram'"),
        ("dram", "01", "", {"max_record_bytes": 1, "handoff_release": "ttl"}, "tier 'dram'"),
        ("dram", "02", "21 B, 3 records", {}, "63 B in 3 record(s)"),
        ("dram", "03", "7 keys", {}, "3 of 7 present"),
        ("dram", "03", "0 keys", {}, "0 of 0 present"),
        ("dram", "04", "room", {}, "3 batches"),
        ("dram", "08", "in all", {}, "4,194,304 B of 4,194,304 B in use"),
        ("dram", "08", "oversized", {"max_record_bytes": None}, "takes records of any size"),
        ("dram", "08", "oversized", {}, "up to 4,194,304 B"),
        *(("dram", "05", case, {}, "") for case in ("again", "too late", "too large", "no room")),
        *(("dram", "07", case, {}, "") for case in ("stays", "released", "dropped")),
        *(("dram", "09", case, {}, "") for case in ("save", "lookup", "load")),
        ("dram", "10", "", {}, "22 misuses"),
        *(("dram", "11", case, {}, "") for case in ("replaced", "present means loadable")),
        *(("dram", "12", case, {}, "") for case in ("stays", "released", "time is over")),
        *(("dram", "13", case, {}, "") for case in ("landed", "durable", "gauges", "close")),
        ("disk", "14", "closed", {}, "20 records came back"),
        ("shared", "16", "leases", {}, ""),
        ("shared", "16", "handoffs", {}, ""),
        ("dram", "17", "losses", {}, "131 losses told"),
    ],
)
def test_figures_are_told_of_what_is_right(
    tmp_path: Path, name: str, number: str, case: str, changes: Body, said: str
) -> None:
    """Limits that a tier does not have are no fault; how much was tried is told."""
    with bench_of(tmp_path, name, Spoilt("build", 1, told(**changes))) as bench:
        assert CHECKS[f"KVC-TIER-{number}"].run(bench, case) == said
        assert bench.peer.counts["build"] == (number == "16")


@pytest.mark.parametrize(
    ("number", "case", "changes", "said"),
    [
        ("14", "closed", {}, "what is left after a restart is right"),
        ("14", "killed", {}, "it does not say that it is persistent"),
        ("16", "seen", {}, "a second process finds nothing"),
        ("17", "losses", {"tells_losses": False}, "it has no on_loss"),
        ("17", "reset", {"resets": False}, "it has no reset"),
    ],
)
def test_what_is_not_claimed_is_not_asked(
    tmp_path: Path, number: str, case: str, changes: Body, said: str
) -> None:
    """A tier in memory neither lasts nor is shared; what is optional may be left out."""
    with (
        bench_of(tmp_path, "dram", Spoilt("build", 1, told(**changes))) as bench,
        pytest.raises(NotApplicable, match=said),
    ):
        CHECKS[f"KVC-TIER-{number}"].run(bench, case)


def test_a_tier_that_does_not_open_is_told_with_its_line(tmp_path: Path) -> None:
    """KVC-TIER-01: what it raised, where, and the end of the trace."""

    def refuse(_: Message) -> None:
        raise ProbeFailed({"kind": "E", "text": "no", "trace": "\n".join("abcdefgh"), "where": "plugin.py:3"})

    with (
        bench_of(tmp_path, "dram", Spoilt("build", 1, refuse)) as bench,
        pytest.raises(Failed, match="kvc_tier raised E: no") as failed,
    ):
        CHECKS["KVC-TIER-01"].run(bench, "")
    assert failed.value.evidence.where == "plugin.py:3"
    assert failed.value.evidence.trace == tuple("cdefgh")


def test_one_that_is_not_shared_may_refuse_a_second_process(tmp_path: Path) -> None:
    """KVC-TIER-16: then the clause is about others."""
    with bench_of(tmp_path, "disk") as bench, pytest.raises(NotApplicable, match="a second process is told"):
        CHECKS["KVC-TIER-16"].run(bench, "seen")


def test_present_means_loadable(tmp_path: Path) -> None:
    """KVC-TIER-11: what a load fails on is absent from then on."""
    lies = Spoilt("lookup", -3, here(value=True)), Spoilt("load", 1, code(Code.MISS))
    with (
        bench_of(tmp_path, "dram", *lies) as bench,
        pytest.raises(
            Failed, match=r"1 record\(s\) that a load has just failed on are said to be present again"
        ),
    ):
        CHECKS["KVC-TIER-11"].run(bench, "present means loadable")


def test_every_case_of_a_clause_is_planned(tmp_path: Path) -> None:
    """KVC-TIER-01 to KVC-TIER-17: no case can be left out without a word."""
    with bench_of(tmp_path, "dram") as bench:
        planned = {check.clause.removeprefix("KVC-TIER-"): check.cases(bench) for check in TIER_CHECKS}
    assert len(planned) == len(TIER_CHECKS)
    assert planned.pop("15") == tuple(tier_damage.DAMAGES)
    assert planned.pop("02") == tuple(tier.SHAPES)
    assert planned == {
        **dict.fromkeys(("01", "06", "10"), ("",)),
        "03": ("0 keys", "7 keys", "500 keys"),
        "04": ("room", "no room"),
        "05": ("again", "too late", "too large", "no room"),
        "07": ("stays", "load outlives it", "released", "dropped", "late"),
        "08": ("in all", "oversized"),
        "09": ("save", "lookup", "load"),
        "11": ("discarded", "replaced", "present means loadable"),
        "12": ("stays", "released", "time is over"),
        "13": ("landed", "visible", "durable", "gauges", "close"),
        "14": ("closed", "killed"),
        "16": ("seen", "leases", "handoffs"),
        "17": ("losses", "reset"),
    }

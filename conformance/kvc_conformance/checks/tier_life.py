"""Tiers over time: discards, handoffs, barriers, ends of processes, and what claims are worth."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvc_conformance.bench import Bench, Check, Failed, NotApplicable, first_few
from kvc_conformance.driver import ProbeFailed
from kvc_conformance.tier_rig import (
    CAPACITY_BYTES,
    FILLER_BYTES,
    FILLERS,
    FIRST_FILLER,
    RECORD_BYTES,
    TierRig,
    compare,
    eventually,
    key_array,
    record,
)
from kvcontract.tiers.base import Code

ROOM_BYTES: Final = 64 << 20
HANDOFF_TTL_S: Final = 1.0
GAUGES: Final = ("leases", "operations", "handoffs")
KILLS: Final = 3
STORMED: Final = 24
STORMED_BYTES: Final = (RECORD_BYTES, 300_001)
LEVELS: Final = ("landed", "visible", "durable")

NOT_OK: Final = -1
IMPOSSIBLE: Final[dict[str, list[int] | None]] = {
    "load: row beyond the keys": [NOT_OK],
    "load: row below 0": [NOT_OK],
    "load: absent record": [NOT_OK],
    "load: too short": [NOT_OK],
    "load: too long": [NOT_OK],
    "load: fewer buffers than rows": [NOT_OK] * 2,
    "load: more buffers than rows": [NOT_OK],
    "load: no rows": [],
    "load: released lease": [NOT_OK],
    "load: lease of another tier": [NOT_OK],
    "load: lease on nothing": [NOT_OK],
    "save: fewer buffers than keys": [NOT_OK] * 2,
    "save: more buffers than keys": [NOT_OK],
    "save: no records": [],
    "lookup: no keys": [],
    "lookup: no record keys": [0, 0],
    "discard: rows beyond the keys": None,
    "discard: lease of another tier": None,
    "discard: absent record": None,
    "release_handoff: unknown": None,
    "release_handoff: empty": None,
    "flush: deadline long past": None,
}
"""What each misuse must come to: codes (any but OK where NOT_OK stands), or nothing at all."""


def _misused(bench: Bench, _case: str) -> str:
    """KVC-TIER-10."""
    rig = TierRig(bench)
    rig.must_save([1])
    numbers = [1, 2]
    rig.call("lookup", {"keys": key_array(numbers)}, id="misused")
    body = rig.stress("misuse", {"keys": key_array(numbers)}, lengths=[RECORD_BYTES]).body
    wrong = [f"{item['name']}: {said}" for item in body["tried"] if (said := _misuse(item)) is not None]
    missing = sorted(set(IMPOSSIBLE) - {item["name"] for item in body["tried"]})
    wrong += [f"{name}: was not tried" for name in missing]
    wrong += [f"a thread of the tier ended with {text}" for text in body["escaped"]]
    if wrong:
        raise Failed(first_few(wrong))
    rig.release("misused")
    rig.must_have([1], why="after calls that make no sense")
    rig.close()
    return f"{len(IMPOSSIBLE)} misuses"


def _misuse(item: dict[str, Any]) -> str | None:
    """What is wrong with how a tier took a misuse."""
    if item["raised"] is not None:
        return f"raised {item['raised']} on the caller's thread"
    if not item["settled"]:
        return "never settled"
    if item["called"] != 1:
        return f"settled {item['called']} times"
    expected = IMPOSSIBLE[item["name"]]
    if expected is None:
        return None
    codes = item["codes"]
    if codes is None or len(codes) != len(expected):
        return f"settled with {codes}; expected one answer for each of {len(expected)} record(s)"
    if any(want == NOT_OK and code == Code.OK for want, code in zip(expected, codes, strict=True)):
        return "reported OK"
    if any(want == 0 and code for want, code in zip(expected, codes, strict=True)):
        return "said that something is present"
    return None


def _discarded(bench: Bench, case: str) -> str:
    """KVC-TIER-11."""
    rig = TierRig(bench)
    if case == "present means loadable":
        _loadable(rig)
        rig.close()
        return ""
    rig.must_save([1, 2])
    lease, _ = rig.look([1, 2])
    rig.call("discard", id=lease, rows=[0])
    if not eventually(lambda: rig.present([1, 2]) == [False, True]):
        raise Failed(f"record 1 of 2 was discarded; present are {rig.present([1, 2])}")
    if case == "discarded":
        rig.release(lease)
    rig.must_save([1])
    if case == "replaced":
        rig.call("discard", id=lease, rows=[0])
        rig.call("flush", level="visible")
        rig.release(lease)
    rig.must_have([1, 2], why="after a discarded record was saved anew")
    rig.close()
    return ""


def _loadable(rig: TierRig) -> None:
    rig.must_save([1, 2, 3])
    rig.present([1, 2, 3])
    rig.churn()
    numbers = [1, 2, 3, *range(FIRST_FILLER, FIRST_FILLER + FILLERS)]
    sizes = [RECORD_BYTES] * 3 + [FILLER_BYTES] * FILLERS
    lease, present = rig.look(numbers)
    rows = [row for row, here in enumerate(present) if here]
    codes, _ = rig.load(lease, rows, [sizes[row] for row in rows])
    rig.release(lease)
    failed = [numbers[row] for row, code in zip(rows, codes, strict=True) if code is not Code.OK]
    again = rig.present(failed) if failed else []
    if any(again):
        raise Failed(f"{sum(again)} record(s) that a load has just failed on are said to be present again")


def _handoffs(bench: Bench, case: str) -> str:
    """KVC-TIER-12."""
    rig = TierRig(bench, handoff_ttl_s=HANDOFF_TTL_S if case == "time is over" else 60.0)
    match case:
        case "stays":
            kept = [1, 2, 3, 4]
            rig.must_save(kept, handoff="a")
            rig.must_save([5], handoff="b")
            rig.call("release_handoff", handoff="b")
            rig.churn()
            rig.must_have(kept, why="handed off, and thrice the quota saved since")
        case "released":
            rig.fill(handoff="a")
            rig.call("release_handoff", handoff="somebody else's")
            if rig.save([1], FILLER_BYTES) == [Code.OK]:
                raise Failed("the release of an unknown handoff freed another one's records")
            for _ in range(2):
                rig.call("release_handoff", handoff="a")
            early = rig.said["handoff_release"] == "early"
            if early and not rig.room_again(2):
                raise Failed("handoff_release is 'early', and a released handoff still takes all room")
        case _:
            rig.crowd(range(FIRST_FILLER, FIRST_FILLER + FILLERS), handoff="a")
            rig.call("advance", seconds=HANDOFF_TTL_S)
            if not rig.room_again(1):
                raise Failed(f"a handoff of {HANDOFF_TTL_S:g} s that nobody released takes its room for ever")
    rig.close()
    return ""


def _drained(bench: Bench, case: str) -> str:
    """KVC-TIER-13."""
    rig = TierRig(bench, capacity_bytes=ROOM_BYTES)
    numbers = list(range(40))
    arrays = {"keys": key_array(numbers), "content": _sized(numbers, [RECORD_BYTES] * len(numbers))}
    lengths = [RECORD_BYTES] * len(numbers)
    if case == "close":
        _closed(rig.call("save_and_close", arrays, lengths=lengths).body)
        return ""
    if case in LEVELS:
        body = rig.call("save_and_flush", arrays, lengths=lengths, level=case).body
        expected = case != "durable" or rig.said["persistent"]
        if body["flushed"] is not expected:
            raise Failed(f"flush({case!r}) came to {body['flushed']}; expected {expected}")
        if body["done"] != len(numbers):
            raise Failed(f"flush({case!r}) settled when {body['done']} of {len(numbers)} saves had")
        rig.must_have(numbers, why=f"after flush({case!r})")
        if rig.call("flush", level=case, in_s=-1.0).body["flushed"] is not False:
            raise Failed(f"flush({case!r}) did not say that its deadline had passed")
    else:
        _used(rig, numbers)
    rig.close()
    return ""


def _closed(body: dict[str, Any]) -> None:
    after = body["after"]
    if not body["closed"] or not body["again"]:
        raise Failed("close did not say that everything had ended although it had time enough")
    if not body["done"]:
        raise Failed("close said that everything had ended, and a save had not settled")
    if after["save"] != [Code.REFUSED] * len(after["save"]):
        raise Failed(f"a save after close ended {after['save'][:3]}...; expected REFUSED for each record")
    if after["present"] is None or any(after["present"]):
        raise Failed("a look-up after close found records, or did not settle")
    if Code.OK in after.get("load", []):
        raise Failed("a load after close reported OK")


def _used(rig: TierRig, numbers: list[int]) -> None:
    rig.must_save(numbers)
    rig.must_save(numbers[:3], handoff="a")
    rig.read(numbers)
    rig.call("release_handoff", handoff="a")
    missing = [name for name in GAUGES if name not in rig.gauges()]
    if missing:
        raise Failed(f"stats() has no {', '.join(missing)}")
    if not eventually(lambda: not any(rig.gauges()[name] for name in GAUGES)):
        left = {name: value for name, value in rig.gauges().items() if name in GAUGES and value}
        raise Failed(f"nothing is going on any more, and stats() counts {left}")


def _reopened(bench: Bench, case: str) -> str:
    """KVC-TIER-14."""
    if case == "killed":
        return _killed(bench)
    rig = TierRig(bench)
    numbers = list(range(20))
    rig.must_save(numbers)
    persistent, directory = rig.said["persistent"], rig.directory
    if persistent and rig.call("flush", level="durable").body["flushed"] is not True:
        raise Failed("flush('durable') of a tier that says it is persistent came to False")
    rig.close()
    again = TierRig(bench, directory=directory)
    codes = again.read(numbers)
    if persistent and set(codes) != {Code.OK}:
        raise Failed(
            f"it says it is persistent; {codes.count(Code.OK)} of {len(codes)} records that were flushed as"
            " durable are left after it was closed and opened again"
        )
    again.churn()
    held = sum(again.present(range(FIRST_FILLER, FIRST_FILLER + FILLERS)))
    if held * FILLER_BYTES > CAPACITY_BYTES:
        raise Failed(f"opened again it holds {held * FILLER_BYTES:,} B with a quota of {CAPACITY_BYTES:,} B")
    again.close()
    if not persistent:
        raise NotApplicable("it does not say that it is persistent; what is left after a restart is right")
    return f"{len(codes)} records came back"


def _killed(bench: Bench) -> str:
    numbers = list(range(STORMED))
    sizes = [STORMED_BYTES[number % 2] for number in numbers]  # few sizes: a tier may keep each apart
    arrays = {"keys": key_array(numbers), "content": _sized(numbers, sizes)}
    directory, kept = bench.folder / "tier-killed", 0
    for turn in range(KILLS):
        rig = TierRig(bench, directory=directory, capacity_bytes=ROOM_BYTES)
        if not rig.said["persistent"]:
            rig.close()
            raise NotApplicable("it does not say that it is persistent")
        seed = bench.seed + turn
        rig.stress("storm", arrays, lengths=sizes, seed=seed, forget=0.2)
        target = 3 + 5 * turn
        eventually(partial(_has, rig, numbers, target))
        rig.kill()
        after = TierRig(bench, directory=directory, capacity_bytes=ROOM_BYTES)
        kept += after.read(numbers, sizes).count(Code.OK)
        after.must_save(numbers, sizes)
        after.must_have(numbers, sizes, why="saved after a kill")
        after.close()
    return f"{KILLS} kills, {kept} records found whole"


def _has(rig: TierRig, numbers: list[int], target: int) -> bool:
    return sum(rig.present(numbers)) >= target


def _sized(numbers: list[int], sizes: list[int]) -> NDArray[np.uint8]:
    return np.concatenate([record(number, size) for number, size in zip(numbers, sizes, strict=True)])


def _shared(bench: Bench, case: str) -> str:
    """KVC-TIER-16."""
    rig = TierRig(bench)
    rig.must_save([1, 2])
    rig.call("flush", level="visible")
    if not rig.said["shared"]:
        _kept_apart(bench, rig)
    match case:
        case "seen":
            peer = TierRig(bench, child=bench.peer, directory=rig.directory)
            peer.must_have([1, 2], why="saved by another process")
            peer.must_save([3])
            rig.must_have([3], why="saved by another process")
        case "leases":
            kept = rig.fill(lease=True)
            peer = TierRig(bench, child=bench.peer, directory=rig.directory)
            peer.churn()
            if not all(rig.present(kept)):
                raise Failed("records that one process had leased were evicted by another")
            rig.call("release_all", id="crowd")
            if not eventually(lambda: bool(rig.gauges()) and peer.save([4], FILLER_BYTES) == [Code.OK]):
                raise Failed("leases that one process released still hold for another")
        case _:
            rig.fill(handoff="a")
            peer = TierRig(bench, child=bench.peer, directory=rig.directory)
            peer.call("release_handoff", handoff="a")
            if not rig.room_again(4):
                raise Failed("a handoff that another process released is still kept")
    peer.close()
    rig.close()
    return ""


def _kept_apart(bench: Bench, rig: TierRig) -> None:
    """A tier that is not shared refuses a second process, or shows it nothing."""
    try:
        peer = TierRig(bench, child=bench.peer, directory=rig.directory)
    except ProbeFailed as error:
        rig.close()
        raise NotApplicable(f"it is not shared; a second process is told: {error.text}") from error
    found = peer.present([1, 2])
    peer.close()
    rig.close()
    if any(found):
        raise Failed("it does not say that it is shared, and another process finds its records")
    raise NotApplicable("it does not say that it is shared; a second process finds nothing")


def _optional(bench: Bench, case: str) -> str:
    """KVC-TIER-17."""
    rig = TierRig(bench)
    name = "on_loss" if case == "losses" else "reset"
    if not rig.said["tells_losses" if case == "losses" else "resets"]:
        rig.close()
        raise NotApplicable(f"it has no {name}")
    said = _losses(rig) if case == "losses" else _reset(rig)
    rig.close()
    return said


def _losses(rig: TierRig) -> str:
    numbers = [1, 2, 3]
    rig.call("listen")
    rig.must_save(numbers)
    lease, _ = rig.look([3])
    rig.call("discard", id=lease, rows=[0])
    rig.release(lease)
    saved = [*numbers, *range(FIRST_FILLER, FIRST_FILLER + FILLERS)]
    rig.churn()
    lost = [number for number, here in zip(saved, rig.present(saved), strict=True) if not here]
    keys = {number: bytes(key) for number, key in zip(saved, key_array(saved), strict=True)}

    def untold() -> list[int]:
        told = {bytes(key) for key in rig.call("told").arrays["keys"]}
        return [number for number in lost if keys[number] not in told]

    if not eventually(lambda: not untold()):
        raise Failed(f"{len(untold())} of {len(lost)} records can be found no more, and nobody was told")
    answer = rig.call("told")
    told = {bytes(key) for key in answer.arrays["keys"]}
    wrong = sorted({keys[number] for number in set(saved) - set(lost)} & told)
    if wrong:
        raise Failed(f"{len(wrong)} records are told as lost and can still be found")
    reasons = set(answer.body["reasons"]) - {"evicted", "quarantined"}
    if reasons:
        raise Failed(f"a loss was told for the reason {min(reasons)!r}; reasons are evicted, quarantined")
    return f"{len(lost)} losses told"


def _reset(rig: TierRig) -> str:
    numbers = [1, 2, 3]
    rig.must_save(numbers)
    rig.must_save([4], handoff="a")
    lease, _ = rig.look(numbers)
    if rig.call("reset").body["reset"] is not True:
        raise Failed("reset came to False although it had time enough")
    if any(rig.present([*numbers, 4])):
        raise Failed("after a reset records can still be found")
    codes, found = rig.load(lease, range(3), [RECORD_BYTES] * 3)
    rig.release(lease)
    if set(codes) != {Code.OK}:
        raise Failed(f"who had a lease before a reset reads {[code.name for code in codes]} after it")
    compare(numbers, codes, found)
    rig.must_save(numbers)
    rig.must_have(numbers, why="saved after a reset")
    return ""


CHECKS: Final[tuple[Check, ...]] = (
    Check("KVC-TIER-10", _misused),
    Check("KVC-TIER-11", _discarded, lambda _: ("discarded", "replaced", "present means loadable")),
    Check("KVC-TIER-12", _handoffs, lambda _: ("stays", "released", "time is over")),
    Check("KVC-TIER-13", _drained, lambda _: (*LEVELS, "gauges", "close")),
    Check("KVC-TIER-14", _reopened, lambda _: ("closed", "killed")),
    Check("KVC-TIER-16", _shared, lambda _: ("seen", "leases", "handoffs")),
    Check("KVC-TIER-17", _optional, lambda _: ("losses", "reset")),
)

"""Tiers: what they are given they give back, or say why not."""

from __future__ import annotations

import hashlib
from typing import Any, Final

import numpy as np

from kvc_conformance.bench import Bench, Check, Failed, first_few
from kvc_conformance.driver import ProbeFailed
from kvc_conformance.tier_rig import (
    CAPACITY_BYTES,
    FILLER_BYTES,
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
HAMMERED: Final = (12, 2 << 20)  # records, bytes of each

SHAPES: Final = {
    "1 B": ([1], 1),
    "21 B, 3 records": ([21] * 3, 2),
    "4,095 B and 4,097 B": ([4095, 4097], 3),
    "many sizes": ([1, 63, 64, 65, 511, 8192, 65_537, 300_001], 5),
    "3 MiB, 2 records": ([3 << 20] * 2, 7),
    "500 records of 1,000 B": ([1000] * 500, 1),
}
"""Sizes of the records of a batch, and into how many pieces each is cut."""


def _opens(bench: Bench, _case: str) -> str:
    """KVC-TIER-01."""
    try:
        rig = TierRig(bench)
    except ProbeFailed as error:
        saw = f"kvc_tier raised {error.kind}: {error.text}"
        raise Failed(saw, where=error.where, trace=tuple(error.trace.splitlines()[-6:])) from error
    if rig.said["lacks"]:
        raise Failed(f"what kvc_tier returned is no tier: it has no {', '.join(rig.said['lacks'])}")
    limit, release = rig.said["max_record_bytes"], rig.said["handoff_release"]
    faults = [f"max_record_bytes {limit!r}"] * (limit is not None and (type(limit) is not int or limit < 1))
    faults += [f"handoff_release {release!r}"] * (release not in {"early", "ttl"})
    if faults:
        raise Failed(f"its capabilities cannot be: {', '.join(faults)}")
    rig.close()
    return f"tier {rig.said['name']!r}"


def _equal(bench: Bench, case: str) -> str:
    """KVC-TIER-02."""
    sizes, pieces = SHAPES[case]
    rig = TierRig(bench, capacity_bytes=ROOM_BYTES)
    numbers = list(range(len(sizes)))
    rig.must_save(numbers, sizes, pieces=pieces)
    lease, present = rig.look(numbers)
    if not all(present):
        raise Failed(
            f"{len(sizes)} record(s) were saved with code OK; record {present.index(False)} is absent"
        )
    rows = np.random.default_rng(bench.seed).permutation([*numbers, *numbers[:3]]).tolist()
    for cut in (1, pieces + 1):
        codes, found = rig.load(lease, rows, [sizes[row] for row in rows], pieces=cut)
        if set(codes) != {Code.OK}:
            raise Failed(
                f"leased records ended {', '.join(sorted({code.name for code in codes}))} when loaded"
            )
        compare(rows, codes, found)
    rig.release(lease)
    rig.close()
    return f"{sum(sizes):,} B in {len(sizes)} record(s)"


def _per_key(bench: Bench, case: str) -> str:
    """KVC-TIER-03."""
    count = int(case.removesuffix(" keys"))
    rng = np.random.default_rng([bench.seed, count])
    there = set(rng.permutation(count)[: count // 2].tolist())
    rig = TierRig(bench, capacity_bytes=ROOM_BYTES)
    if there:
        rig.must_save(sorted(there), 100)
    asked = rng.permutation([*range(count), *range(count // 3)]).tolist()
    for numbers in (sorted(asked), asked):
        present = rig.present(numbers)
        wrong = [
            f"key {at} of {len(numbers)} (record {number}) is said to be {'present' if here else 'absent'};"
            f" {'it was saved' if number in there else 'it never was'}"
            for at, (number, here) in enumerate(zip(numbers, present, strict=True))
            if here != (number in there)
        ]
        if wrong:
            raise Failed(first_few(wrong))
    rig.close()
    return f"{len(there)} of {count} present"


def _singles(bench: Bench, case: str) -> str:
    """KVC-TIER-04."""
    batch, single = (TierRig(bench) for _ in range(2))
    large = (batch.said["max_record_bytes"] or CAPACITY_BYTES) + 1
    large = min(large, 2 * CAPACITY_BYTES)
    batches = [([1, 2, 3], [100] * 3), ([3, 4, 4, 1], [100] * 4), ([5, 6, 7], [100, large, 100])]
    if case == "no room":
        for rig in (batch, single):
            rig.fill(lease=True)
        batches = [
            ([FIRST_FILLER, 8, 9, FIRST_FILLER + 1], [FILLER_BYTES, FILLER_BYTES, large, FILLER_BYTES])
        ]
    for numbers, sizes in batches:
        together = batch.save(numbers, sizes)
        alone = [single.save([one], [size])[0] for one, size in zip(numbers, sizes, strict=True)]
        if together != alone:
            raise Failed(
                f"records of {sizes} B saved in one batch ended {[code.name for code in together]};"
                f" one by one {[code.name for code in alone]}"
            )
        known = sorted({one for batch_, _ in batches for one in batch_})
        here, there = batch.present(known), single.present(known)
        if here != there:
            raise Failed(f"after the batch, of records {known} {here} are present; one by one {there}")
    if case != "no room":
        lease, present = batch.look([1, 90, 2])
        codes, found = batch.load(lease, [0, 1, 2], [100] * 3)
        batch.release(lease)
        if present != [True, False, True] or codes[0::2] != [Code.OK] * 2 or codes[1] is Code.OK:
            raise Failed(f"a load of records present, absent, present ended {[code.name for code in codes]}")
        compare([1, 2], codes[0::2], found[0::2])
    batch.call("release_all", id="crowd")
    single.call("release_all", id="crowd")
    batch.close()
    single.close()
    return f"{len(batches)} batches"


def _puts(bench: Bench, case: str) -> str:
    """KVC-TIER-05."""
    rig = TierRig(bench)
    size, expected, more = RECORD_BYTES, Code.EXPIRED, dict[str, Any](in_s=-1.0)
    if case == "again":
        rig.must_save([1, 2])
        rig.must_save([2, 3, 1])
        if rig.save_bytes([2], [np.zeros(RECORD_BYTES, np.uint8)]) != [Code.OK]:
            raise Failed("a record that is there was refused when it was saved again")
        rig.must_have([1, 2, 3], why="after records were saved a second time")
        rig.close()
        return ""
    if case == "no room":
        rig.fill(lease=True)
        size, expected, more = FILLER_BYTES, Code.FULL, {}
    elif case == "too large":
        limit = rig.said["max_record_bytes"]
        size, expected, more = min(limit or ROOM_BYTES, ROOM_BYTES) + 1, Code.TOO_LARGE, {}
    codes = rig.save([1, 2], size, **more)
    if case != "too large" and set(codes) != {expected}:  # how large is too large, KVC-TIER-08 knows
        raise Failed(f"two saves ended {[code.name for code in codes]}; expected {expected.name}")
    for code, here in zip(codes, rig.present([1, 2]), strict=True):
        if here != (code is Code.OK):
            raise Failed(
                f"a save ended {code.name}; afterwards its record is {'present' if here else 'absent'}"
            )
    rig.call("release_all", id="crowd")
    if not eventually(lambda: rig.save([1]) == [Code.OK]):
        raise Failed("a record whose save failed before cannot be saved later")
    rig.must_have([1], why="a record that failed first and was saved then")
    rig.close()
    return ""


def _complete(bench: Bench, _case: str) -> str:
    """KVC-TIER-06."""
    count, size = HAMMERED
    rig = TierRig(bench, capacity_bytes=ROOM_BYTES)
    numbers = range(count)
    content = [record(number, size) for number in numbers]
    arrays = {"keys": key_array(numbers), "content": np.concatenate(content)}
    body = rig.stress("hammer", arrays, lengths=[size] * count, threads=2).body
    expected = [hashlib.blake2b(item.data).hexdigest() for item in content]
    early = sorted({row for row, digest, _ in body["seen"] if digest != expected[row]})
    if early:
        raise Failed(
            f"while a record of {size:,} B was being saved, a look-up found it and a load reported OK with"
            f" other bytes ({len(early)} of {count} records)"
        )
    loads = sum(times for *_, times in body["seen"])
    rig.must_have(list(numbers), size, why="after readers hammered on records that were being saved")
    rig.close()
    return f"{loads} loads, all of complete records"


def _leased(bench: Bench, case: str) -> str:
    """KVC-TIER-07."""
    rig = TierRig(bench)
    match case:
        case "stays":
            _stays(rig)
        case "load outlives it":
            rig.must_save([1, 2])
            lease, _ = rig.look([1, 2])
            codes, found = rig.load(lease, [1, 0], [RECORD_BYTES] * 2, release=True)
            if set(codes) - {Code.OK, Code.EXPIRED}:
                raise Failed(f"a load whose lease ended meanwhile came to {[code.name for code in codes]}")
            compare([2, 1], codes, found)
        case _:
            _gives_back(rig, case)
    rig.close()
    return ""


def _stays(rig: TierRig) -> None:
    kept = [1, 2, 3, 4]
    rig.must_save(kept)
    lease, _ = rig.look(kept)
    rig.churn()
    here = rig.present(kept)
    codes, found = rig.load(lease, range(len(kept)), [RECORD_BYTES] * len(kept))
    if not all(here) or set(codes) != {Code.OK}:
        raise Failed(
            f"of {len(kept)} leased records {sum(here)} are left after thrice the quota was saved;"
            f" loads under the lease ended {[code.name for code in codes]}"
        )
    compare(kept, codes, found)
    rig.release(lease)


def _gives_back(rig: TierRig, how: str) -> None:
    kept = rig.fill(lease=True)
    if not all(rig.present(kept)):
        raise Failed("with everything leased, a save that had no room took a leased record away")
    lease, _ = rig.look(kept)
    rig.call("release_all", id="crowd")
    if rig.save([1], FILLER_BYTES) == [Code.OK]:
        raise Failed("a second lease on the same records did not keep them when the first ended")
    if how == "late":
        rig.call("late_lookup", {"keys": key_array(kept)})
    rig.release(lease, "drop" if how == "dropped" else "release")
    if not rig.room_again(2):
        raise Failed(
            f"a lease was {'lost' if how == 'dropped' else 'released'}; its records still take all room"
        )
    if not eventually(lambda: not rig.gauges().get("leases")):
        raise Failed(f"no lease is held any more, and stats() counts {rig.gauges()['leases']}")


def _quota(bench: Bench, case: str) -> str:
    """KVC-TIER-08."""
    rig = TierRig(bench)
    if case == "oversized":
        said = _oversized(rig)
        rig.close()
        return said
    codes = rig.churn()
    if set(codes) != {Code.OK}:
        raise Failed(
            f"saves ended {sorted({code.name for code in codes})} although everything could be evicted"
        )
    numbers = range(FIRST_FILLER, FIRST_FILLER + len(codes))
    lease, present = rig.look(numbers)
    rows = [row for row, here in enumerate(present) if here]
    loaded, _ = rig.load(lease, rows, [FILLER_BYTES] * len(rows))
    rig.release(lease)
    held = loaded.count(Code.OK) * FILLER_BYTES
    if held > CAPACITY_BYTES:
        raise Failed(f"{held:,} B can be loaded from a tier with a quota of {CAPACITY_BYTES:,} B")
    if not present[-1]:
        raise Failed("the record saved last was evicted before those that nobody had used for longer")
    rig.close()
    return f"{held:,} B of {CAPACITY_BYTES:,} B in use"


def _oversized(rig: TierRig) -> str:
    limit = rig.said["max_record_bytes"]
    if limit is None:
        return "takes records of any size"
    rig.must_save([1])
    [code] = rig.save([2], limit + 1)
    if code is not Code.TOO_LARGE:
        raise Failed(f"a record one byte over the limit of {limit:,} B ended {code.name}; expected TOO_LARGE")
    rig.must_save([3])
    rig.must_have([1, 3], why="beside one that was too large")
    rig.must_save([4], limit)
    rig.must_have([4], limit, why="a record of just the size that max_record_bytes allows")
    return f"up to {limit:,} B"


def _deadlines(bench: Bench, case: str) -> str:
    """KVC-TIER-09."""
    rig = TierRig(bench)
    rig.must_save([1])
    match case:
        case "save":
            codes = rig.save([2, 3], in_s=-1.0)
            if codes != [Code.EXPIRED] * 2 or any(rig.present([2, 3])):
                raise Failed(f"saves begun after their deadline ended {[code.name for code in codes]}")
        case "lookup":
            lease, present = rig.look([1], in_s=-1.0)
            rig.release(lease)
            if any(present):
                raise Failed("a look-up begun after its deadline found a record")
        case _:
            lease, _ = rig.look([1])
            codes, found = rig.load(lease, [0], [RECORD_BYTES], in_s=-1.0)
            rig.release(lease)
            if codes != [Code.EXPIRED]:
                raise Failed(f"a load begun after its deadline ended {codes[0].name}; expected EXPIRED")
            if (found[0] != found[0][0]).any():
                raise Failed("a load begun after its deadline wrote to memory")
    rig.must_have([1], why="after an operation that came too late")
    rig.close()
    return ""


CHECKS: Final[tuple[Check, ...]] = (
    Check("KVC-TIER-01", _opens),
    Check("KVC-TIER-02", _equal, lambda _: tuple(SHAPES)),
    Check("KVC-TIER-03", _per_key, lambda _: ("0 keys", "7 keys", "500 keys")),
    Check("KVC-TIER-04", _singles, lambda _: ("room", "no room")),
    Check("KVC-TIER-05", _puts, lambda _: ("again", "too late", "too large", "no room")),
    Check("KVC-TIER-06", _complete),
    Check("KVC-TIER-07", _leased, lambda _: ("stays", "load outlives it", "released", "dropped", "late")),
    Check("KVC-TIER-08", _quota, lambda _: ("in all", "oversized")),
    Check("KVC-TIER-09", _deadlines, lambda _: ("save", "lookup", "load")),
)

"""The disk tier killed, and without power, at any point: absent or equal, usage right, no orphans (R7)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from disk_rig import (
    CALM_S,
    FOREVER,
    NUMBERS,
    SLOT,
    SLOTS,
    equal,
    flush,
    keys_of,
    present,
    save,
    segment_files,
    size_of,
    tier_of,
    usage_is_right,
)
from power_loss import Event, Recorder, image

from kvcontract.tiers import disk_index
from kvcontract.tiers.base import Code
from kvcontract.tiers.disk import DiskTier
from kvcontract.tiers.disk_slots import DiskSlots

NEW = 1000
"""A number that only `check` saves."""


def check(home: Path, required: set[int]) -> list[str]:
    """What is wrong with a store that is opened again; new work is done in it as well."""
    wrong = []
    tier = tier_of(home, SLOTS)
    found = {number: equal(tier, number, size=size_of(number))[0] for number in NUMBERS}
    wrong += [f"{number} has other bytes" for number, same in found.items() if same is False]
    wrong += [f"{number} was durable and is gone" for number in sorted(required) if found[number] is None]
    here = [number for number, same in found.items() if same]
    here += [NEW] * present(tier, NEW)[0]  # of an earlier look
    if tier.stats()["used_bytes"] != sum(size_of(number) for number in here):
        wrong.append("usage is wrong")
    if not usage_is_right(tier):
        wrong.append("files are not those that are counted")
    if save(tier, NEW) != [Code.OK] or equal(tier, NEW) != [True]:
        wrong.append("new work does not go on")
    stats = tier.stats()
    if not tier.close(FOREVER):
        wrong.append("it does not close")
    files = sum(path.stat().st_size for path in segment_files(home))
    if files != stats["allocated_bytes"]:
        wrong.append("orphans")
    return wrong


# Killed


CHILD = """
import sys
sys.path.insert(0, sys.argv[2])
import numpy as np
from disk_rig import FOREVER, NUMBERS, SLOT, SLOTS, content, flush, in_pieces, keys_of, present, size_of
from kvcontract.tiers.base import SaveClass
from kvcontract.tiers.disk import DiskTier

rng = np.random.default_rng(int(sys.argv[3]))
tier = DiskTier(sys.argv[1], SLOTS * SLOT, workers=2, direct=False)
print("open", flush=True)
while True:
    numbers = rng.choice(len(NUMBERS), int(rng.integers(1, 5)), replace=False).tolist()
    print("begin", len(numbers), flush=True)
    buffers = in_pieces([content(number, size_of(number)) for number in numbers])
    op = tier.save(keys_of(*numbers), buffers, SaveClass.CACHEABLE, FOREVER)
    if rng.random() < 0.7:
        op.wait(60)
    if rng.random() < 0.5:
        present(tier, *rng.choice(len(NUMBERS), 5).tolist())
    if rng.random() < 0.4 and op.done and flush(tier):
        here = [number for number, is_here in zip(NUMBERS, present(tier, *NUMBERS)) if is_here]
        print("durable", *here, flush=True)
"""


def killed(home: Path, seed: int, rng: np.random.Generator) -> tuple[set[int], int]:
    """Let a child work in a store, and kill it; what was durable, and how many records were begun since."""
    command = [sys.executable, "-c", CHILD, str(home), str(Path(__file__).parent), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        durable, begun = set[int](), 0
        for _ in range(int(rng.integers(1, 120))):
            durable, begun = heard(child.stdout.readline(), durable, begun)
        os.kill(child.pid, signal.SIGKILL)
        for line in child.stdout:
            durable, begun = heard(line, durable, begun)
        assert child.wait(CALM_S) == -signal.SIGKILL
    return durable, begun


def heard(line: str, durable: set[int], begun: int) -> tuple[set[int], int]:
    """What one line of the child changes; one that was cut off by the kill changes nothing."""
    if line.startswith("durable") and line.endswith("\n"):
        return {int(word) for word in line.split()[1:]}, 0
    if line.startswith("begin"):
        return durable, begun + int([*line.split(), "4"][1])
    return durable, begun


def kill_again_and_again(tmp_path: Path, times: int) -> None:
    """Kill a child in one store over and over; each time the store is as it must be."""
    rng = np.random.default_rng(times)
    for seed in range(times):
        durable, begun = killed(tmp_path, seed, rng)
        tier = tier_of(tmp_path, SLOTS)
        # A BIG record takes the room of two, and gives up a file of the other size for it.
        gone = durable - {number for number in NUMBERS if present(tier, number)[0]}
        assert tier.close(FOREVER)
        assert len(gone) <= 2 * begun, (
            f"seed {seed}: {sorted(gone)} were durable, {begun} records begun since"
        )
        assert check(tmp_path, durable - gone) == [], f"seed {seed}"


def test_r7_h4_killed_at_random(tmp_path: Path) -> None:
    """R7, H4: twenty kills in one store; every key absent or equal, durable ones there, usage right."""
    kill_again_and_again(tmp_path, 20)


@pytest.mark.slow
def test_r7_h4_killed_two_hundred_times(tmp_path: Path) -> None:
    """R7, H4: the same, ten times as often."""
    kill_again_and_again(tmp_path, 200)


# Without power


def work(tier: DiskTier, recorder: Recorder, seed: int, steps: int) -> None:
    """Everything that changes a store, at random; what is promised goes into the log."""

    def lost(keys: object, _reason: str) -> None:
        recorder.note(Event("lost", numbers=frozenset(np.asarray(keys)["page_key"][:, 0].tolist())))

    tier.on_loss(lost)
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        luck = rng.random()
        numbers = rng.choice(len(NUMBERS), int(rng.integers(1, 4)), replace=False).tolist()
        if luck < 0.7:
            for number in numbers:
                assert save(tier, number, size=size_of(number)) == [Code.OK]
        elif luck < 0.8:
            with tier.lookup(keys_of(*numbers), FOREVER).value as lease:
                tier.discard(lease, np.arange(1))
        elif luck < 0.98:
            present(tier, *numbers)
            assert flush(tier)
            here = frozenset(number for number in NUMBERS if present(tier, number)[0])
            recorder.note(Event("durable", numbers=here))
        else:
            recorder.note(Event("lost", numbers=frozenset(NUMBERS)))
            assert tier.reset(FOREVER).value
        recorder.note(Event("step"))


def required(log: list[Event], upto: int) -> set[int]:
    """What must be there after the first events: promised durable, and not lost in any step begun since."""
    promises = [at for at, event in enumerate(log[:upto]) if event.kind == "durable"]
    if not promises:
        return set()
    end = next((at for at, event in enumerate(log) if at >= upto and event.kind == "step"), len(log))
    lost = [event.numbers for event in log[promises[-1] : end] if event.kind == "lost"]
    return set(log[promises[-1]].numbers.difference(*lost))


def violations(
    tmp_path: Path, *, seed: int, points: int, syncs: bool = True, steps: int = 60
) -> Iterator[str]:
    """Record some work, cut the power at random points, and tell what is wrong."""
    home, target = tmp_path / f"home-{seed}", tmp_path / "image"
    recorder = Recorder(home, syncs=syncs)
    tier = tier_of(home, SLOTS, files=recorder, segment_bytes=3 * SLOT)
    work(tier, recorder, seed, steps)
    log = list(recorder.log)
    rng = np.random.default_rng(seed)
    # Anywhere, in the middle of a commit, and when something was written that is about to be synced.
    points_of = {
        kind: [at for at, event in enumerate(log) if event.kind == kind] for kind in ("index", "sync")
    }
    cuts = [range(len(log)), points_of["index"], points_of["sync"] or range(len(log))]
    for upto in rng.permutation(np.concatenate([rng.choice(places, points // 3) for places in cuts])):
        image(recorder, home, int(upto), target, rng)
        must = required(log, int(upto))
        yield from (f"seed {seed}, event {upto}: {fault}" for fault in check(target, must))
    assert tier.close(FOREVER)


@pytest.fixture
def short_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index's log is moved into its database often, so that power goes in the middle of that too."""
    monkeypatch.setattr(disk_index, "_LOG_ROWS", 20)


@pytest.mark.usefixtures("short_log")
def test_r7_c8_without_power_at_any_point(tmp_path: Path) -> None:
    """R7, C8: synced bytes and any part of the others: absent or equal, what was durable there."""
    assert list(violations(tmp_path, seed=1, points=120)) == []


@pytest.mark.slow
@pytest.mark.usefixtures("short_log")
@pytest.mark.parametrize("seed", range(2, 12))
def test_r7_c8_without_power_at_many_points(tmp_path: Path, seed: int) -> None:
    """R7, C8: the same with more seeds and points."""
    assert list(violations(tmp_path, seed=seed, points=400)) == []


def test_the_simulation_sees_a_disk_that_lies(tmp_path: Path) -> None:
    """What proves the order of syncs can fail: without them, durable records are gone."""
    assert any("was durable" in fault for fault in violations(tmp_path, seed=1, points=60, syncs=False))


def test_the_simulation_sees_slots_that_are_written_too_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What proves that slots wait for their rows can fail: without that, other bytes are found."""
    free = DiskSlots._free

    def too_early(self: DiskSlots, slot: object) -> None:
        slot.rowed = False  # type: ignore[attr-defined]
        free(self, slot)  # type: ignore[arg-type]

    monkeypatch.setattr(DiskSlots, "_free", too_early)
    monkeypatch.setattr(DiskSlots, "done", lambda _self, _changes: None)
    faults = (fault for seed in range(1, 9) for fault in violations(tmp_path, seed=seed, points=80))
    assert any("other bytes" in fault or "was durable" in fault for fault in faults)

"""Checks of what tiers keep, over a tier of a few lines: what is damaged, and how a wrong one is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvc_conformance.bench import Failed, NotApplicable
from kvc_conformance.checks import tier_damage
from kvc_conformance.checks.tier_damage import (
    CHECKS,
    DAMAGED,
    DAMAGES,
    RECORDS,
    SEGMENTS,
    SIZE,
    TEMPLATE,
    framed,
)
from kvc_conformance.driver import ProbeFailed
from kvc_conformance.tier_rig import key_array
from kvcontract.memory.checksum import crc32c
from kvcontract.tiers.base import RECORD_KEY, Code

(DAMAGE,) = CHECKS
HEAD = b"a log of records"
LOG = "records/log"


@dataclass
class Bench:
    """What a tier is to be, and what its file was before and after the damage."""

    folder: Path
    persistent: bool = True
    opens: bool = True
    mask: int = 0
    full: tuple[int, ...] = ()
    heals: bool = False
    remembers: bool = False
    before: bytes = b""
    after: bytes = b""
    levels: list[str] = field(default_factory=list)


class Tier:
    """Records by number, one after another in a log."""

    def __init__(self, bench: Any, *, directory: Path | None = None) -> None:
        self.bench, self.opened = bench, directory is not None
        self.directory = directory or bench.folder / "tier"
        self.said = {"persistent": bench.persistent}
        self.log = self.directory / LOG
        self.gone: set[int] = set()
        if directory is not None:
            bench.after = self.log.read_bytes() if self.log.exists() else b""
            if not bench.opens:
                raise ProbeFailed({"kind": "RuntimeError", "text": "cannot", "trace": ""})

    def save_bytes(self, numbers: Sequence[int], contents: Sequence[NDArray[np.uint8]]) -> list[Code]:
        """All at once."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        (self.directory / "a").write_bytes(b"")
        kept = np.concatenate(contents) ^ np.uint8(self.bench.mask)
        self.log.write_bytes(HEAD + kept.tobytes())
        self.bench.before = self.bench.before or self.log.read_bytes()
        self.gone = {4} if 2 in self.bench.full and self.opened else set()
        full = int(self.opened) in self.bench.full
        return [Code.FULL if full and number == RECORDS - 1 else Code.OK for number in numbers]

    def call(self, probe: str, **given: Any) -> None:
        """A flush or a discard."""
        if probe == "flush":
            self.bench.levels.append(given["level"])
        elif not self.bench.remembers:
            self.gone.update(given["rows"])

    def _read(self, number: int) -> NDArray[np.uint8]:
        data = self.log.read_bytes() if self.log.exists() else b""
        at = len(HEAD) + number * SIZE
        return np.frombuffer(data[at : at + SIZE], np.uint8) ^ np.uint8(self.bench.mask)

    def present(self, numbers: Sequence[int]) -> list[bool]:
        """Those that are as long as they should be."""
        return [number not in self.gone and self._read(number).nbytes == SIZE for number in numbers]

    def look(self, numbers: Sequence[int]) -> tuple[str, list[bool]]:
        """The same, with a lease."""
        return "lease", self.present(numbers)

    def load(
        self, lease: str, rows: Sequence[int], sizes: Sequence[int]
    ) -> tuple[list[Code], list[NDArray[np.uint8]]]:
        """What lies there, looked at or not."""
        assert (lease, set(sizes) <= {SIZE}) == ("lease", True)
        found = [self._read(row) for row in rows]
        if self.bench.heals:
            found = [_reframed(row, bytes_) for row, bytes_ in zip(rows, found, strict=True)]
        return [Code.OK] * len(rows), found

    def release(self, lease: str) -> None:
        """It goes back."""
        assert lease == "lease"

    def close(self) -> None:
        """Nothing runs."""


def _reframed(number: int, found: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """With a frame that fits, whatever it is."""
    payload = found[TEMPLATE.header_bytes :]
    sums = np.array([[crc32c(payload[: SEGMENTS[0]]), crc32c(payload[SEGMENTS[0] :])]], np.uint32)
    keys = key_array([number]).view(RECORD_KEY).reshape(-1)
    return np.concatenate([TEMPLATE.encode(keys, sums)[0], payload])


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A bench with no processes, that does not wait."""
    monkeypatch.setattr(tier_damage, "TierRig", Tier)
    monkeypatch.setattr(tier_damage, "eventually", lambda holds: holds())
    return Bench(tmp_path)


def at(number: int) -> int:
    """Where a record lies in the log."""
    return len(HEAD) + number * SIZE


def flipped(data: bytes, inside: int) -> bytes:
    """One bit of each damaged record is another."""
    changed = bytearray(data)
    for number in DAMAGED:
        changed[at(number) + inside] ^= 0x10
    return bytes(changed)


def half_zeros(data: bytes) -> bytes:
    """The second half of each."""
    changed = bytearray(data)
    for number in DAMAGED:
        changed[at(number) + SIZE // 2 : at(number + 1)] = bytes(SIZE - SIZE // 2)
    return bytes(changed)


def swapped(data: bytes) -> bytes:
    """One in the other's place."""
    one, two = (data[at(number) : at(number + 1)] for number in DAMAGED)
    changed = data.replace(one, b"?" * SIZE).replace(two, one)
    return changed.replace(b"?" * SIZE, two)


WANTED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "bit of the payload": (lambda data: flipped(data, TEMPLATE.header_bytes + 5000), "6 OK, 2 CORRUPT"),
    "bit of the frame": (lambda data: flipped(data, 20), "6 OK, 2 CORRUPT"),
    "half is zeros": (half_zeros, "6 OK, 2 CORRUPT"),
    "torn": (lambda data: data[: at(DAMAGED[0]) + SIZE // 2], "1 OK, 7 MISS"),
    "two swapped": (swapped, "6 OK, 2 CORRUPT"),
    "file is gone": (lambda _: b"", "8 MISS"),
    "file is another's": (lambda _: b"somebody else's file\n" * 100, "8 MISS"),
    "strange file beside it": (lambda data: data, "8 OK"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_tier_15_records_are_damaged_where_they_lie(bench: Any, case: str) -> None:
    """KVC-TIER-15: each case does what it is called, to two records; a tier that takes it is conformant."""
    change, said = WANTED[case]
    assert DAMAGE.run(bench, case) == said
    assert len(bench.before) == at(RECORDS)
    assert all(
        bench.before[at(number) : at(number + 1)] == framed(number).tobytes() for number in range(RECORDS)
    )
    assert bench.after == change(bench.before)
    assert (bench.folder / "tier" / "records" / "strange").exists() == case.startswith("strange")
    assert bench.levels == ["durable"]
    assert DAMAGE.cases(bench) == tuple(WANTED)


@pytest.mark.parametrize("case", ["bit of the payload", "two swapped", "half is zeros"])
def test_tier_15_a_tier_that_vouches_for_what_it_found_is_told(bench: Any, case: str) -> None:
    """KVC-TIER-15: a frame that is made anew hides what was damaged."""
    bench.heals = True
    with pytest.raises(Failed, match="record 1 came back with other bytes, and a frame that fits them"):
        DAMAGE.run(bench, case)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"remembers": True}, "were discarded and are still said to be present"),
        ({"opens": False}, "it does not open any more: cannot"),
        ({"full": (0,)}, "could not be saved"),
        ({"full": (1,)}, "records cannot be saved anew"),
        ({"full": (2,)}, "after every record was saved anew, not all of them can be loaded"),
    ],
)
def test_tier_15_other_ways_to_be_wrong_are_told(bench: Any, change: dict[str, Any], said: str) -> None:
    """KVC-TIER-15: what is discarded ends, what opened once opens again, and what is free can be used."""
    for name, value in change.items():
        setattr(bench, name, value)
    with pytest.raises(Failed, match=said):
        DAMAGE.run(bench, "bit of the frame")


@pytest.mark.parametrize("change", [{"persistent": False}, {"mask": 0xFF}])
def test_tier_15_is_about_tiers_that_keep_records_as_they_are(bench: Any, change: dict[str, Any]) -> None:
    """KVC-TIER-15: memory does not last, and what was rewritten cannot be found to be damaged."""
    for name, value in change.items():
        setattr(bench, name, value)
    with pytest.raises(NotApplicable):
        DAMAGE.run(bench, "torn")

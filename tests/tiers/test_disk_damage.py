"""A disk store that was changed behind its back: absent or equal, and counted (E7, H4, H8)."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disk_rig import (
    BYTES,
    CALM_S,
    FINGERPRINT,
    FOREVER,
    SLOT,
    FaultyFiles,
    equal,
    flush,
    keys_of,
    present,
    raising,
    save,
    segment_files,
    tier_of,
    usage_is_right,
)

from kvcontract.memory.checksum import crc32c
from kvcontract.tiers.base import Buffers, Code, SaveClass
from kvcontract.tiers.disk import DiskTier
from kvcontract.tiers.frame import FrameTemplate

COUNT = 8


def made(home: Path, **options: Any) -> None:
    """A store of COUNT records in four files, closed."""
    options.setdefault("segment_bytes", 2 * SLOT)
    tier = tier_of(home, COUNT, **options)
    assert save(tier, *range(COUNT)) == [Code.OK] * COUNT
    assert tier.close(FOREVER)


def reopened(home: Path, expected: list[bool | None]) -> dict[str, int]:
    """Open, look, see that new work goes on and that a third opening finds the same; the figures."""
    tier = tier_of(home, COUNT)
    assert equal(tier, *range(COUNT)) == expected
    stats = tier.stats()
    assert stats["records"] == sum(here is not None for here in expected)
    assert stats["used_bytes"] == stats["records"] * BYTES
    assert usage_is_right(tier)
    assert flush(tier)
    assert tier.close(FOREVER)
    tier = tier_of(home, COUNT)
    assert equal(tier, *range(COUNT)) == expected
    gone = [number for number, here in enumerate(expected) if here is None]
    assert set(save(tier, *gone)) <= {Code.OK}
    assert equal(tier, *range(COUNT)) == [True] * COUNT
    assert tier.close(FOREVER)
    return stats


def swap(first: Path, second: Path) -> None:
    """Let two files change places."""
    other = first.with_suffix(".x")
    first.rename(other)
    second.rename(first)
    other.rename(second)


def overwrite(path: Path, at: int, data: bytes) -> None:
    """Change a file in place."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


ALL = [True] * COUNT


@pytest.mark.parametrize(
    ("damage", "gone", "counted"),
    [
        (lambda files: files[0].unlink(), 2, "rows_dropped"),
        (lambda files: files[0].write_bytes(files[0].read_bytes()[:-1]), 2, "rows_dropped"),
        (lambda files: files[0].write_bytes(b""), 2, "rows_dropped"),
        (lambda files: files[0].write_bytes(files[0].read_bytes() + b"more"), 2, "rows_dropped"),
        (lambda files: swap(files[0], files[1]), 4, "flaw_wrong_key"),
        (lambda files: overwrite(files[0], 0, b"somebody else's bytes"), 1, "flaw_foreign"),
        (lambda files: overwrite(files[0], 8, b"\x07"), 1, "flaw_other_format"),
        (lambda files: overwrite(files[0], SLOT - 1, b"\0\1"), 2, "quarantined"),
        (lambda files: overwrite(files[0], 0, bytes(2 * SLOT)), 2, "flaw_foreign"),
        (lambda files: overwrite(files[0], 0, files[0].read_bytes()[SLOT:]), 1, "flaw_wrong_key"),
    ],
    ids=[
        "missing", "cut", "emptied", "grown", "swapped", "foreign", "other format", "torn", "zeros", "copied",
    ],
)  # fmt: skip
def test_h4_changed_files(
    tmp_path: Path, damage: Callable[[list[Path]], object], gone: int, counted: str
) -> None:
    """H4, H8: a file that was cut, swapped, replaced or overwritten: its records are absent, and counted."""
    made(tmp_path)
    damage(segment_files(tmp_path))
    stats = reopened(tmp_path, [None] * gone + ALL[gone:])
    assert stats[counted] == gone


def test_h4_an_unreadable_file(tmp_path: Path) -> None:
    """H4: a file that cannot be opened takes its records with it and nothing else."""
    made(tmp_path)
    files = FaultyFiles()
    files.faults["open"] = raising(errno.EACCES, 1)
    tier = tier_of(tmp_path, COUNT, files=files)
    assert equal(tier, *range(COUNT)) == [None, None, *ALL[2:]]
    assert tier.stats()["rows_dropped"] == 2
    assert usage_is_right(tier)
    assert tier.close(FOREVER)
    reopened(tmp_path, [None, None, *ALL[2:]])


@pytest.mark.parametrize("damage", ["missing", "cut", "foreign", "emptied", "header"])
def test_h4_a_lost_index(tmp_path: Path, damage: str) -> None:
    """H4: an index that cannot be read is begun anew; everything is absent, nothing is left over."""
    made(tmp_path)
    index = tmp_path / "index.db"
    if damage == "missing":
        index.unlink()
    elif damage == "header":
        overwrite(index, 0, bytes(100))
    else:
        index.write_bytes(
            {"cut": index.read_bytes()[:5000], "foreign": b"not ours" * 999, "emptied": b""}[damage]
        )
    stats = reopened(tmp_path, [None] * COUNT)
    assert stats["orphans_removed"] == 4
    assert stats["index_lost"] == (damage not in ("missing", "emptied"))


def test_h4_rows_that_were_changed(tmp_path: Path) -> None:
    """H4: a row that is not as it was written, or is gone, takes its record with it and is counted."""
    made(tmp_path)
    db = sqlite3.connect(tmp_path / "index.db")
    with db:
        db.execute("update records set slot = 1 - slot where key = ?", (keys_of(0).tobytes(),))
        db.execute("update records set key = ? where key = ?", (bytes(21), keys_of(1).tobytes()))
        db.execute("delete from records where key = ?", (keys_of(2).tobytes(),))
        db.execute("update records set record_bytes = 'many' where key = ?", (keys_of(3).tobytes(),))
    db.close()
    stats = reopened(tmp_path, [None] * 4 + ALL[4:])
    assert stats["rows_dropped"] == 4


def test_an_index_that_breaks_under_a_running_owner_is_written_anew(tmp_path: Path) -> None:
    """H4, R7: what is in memory is the index; a damaged file is replaced, and nothing durable is lost."""
    files = FaultyFiles()
    tier = tier_of(tmp_path, COUNT, segment_bytes=2 * SLOT, files=files)
    assert save(tier, 0, 1, 2) == [Code.OK] * 3
    assert flush(tier)

    def broken(_: int) -> None:
        files.faults.clear()
        for name in ("index.db", "index.db-wal"):
            overwrite(tmp_path / name, 0, b"\xff" * (tmp_path / name).stat().st_size)
        error = sqlite3.DatabaseError("database disk image is malformed")
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error

    files.faults["commit"] = broken
    for number in range(3, COUNT):
        assert save(tier, number) == [Code.OK]
        assert flush(tier)
    assert tier.stats()["index_rewritten"] == 1
    assert equal(tier, *range(COUNT)) == ALL
    assert tier.close(FOREVER)
    reopened(tmp_path, ALL)


# Bit flips


RECORDS, PAYLOAD, SEGMENT = 12, 6000, 2048
TEMPLATE = FrameTemplate(FINGERPRINT, (SEGMENT, SEGMENT, PAYLOAD - 2 * SEGMENT))


def payload_of(number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The payload of a record."""
    return np.random.default_rng(number).integers(0, 256, PAYLOAD, np.uint8)


def sums(payload: np.ndarray[Any, np.dtype[np.uint8]]) -> list[int]:
    """crc32c of each segment."""
    return [crc32c(payload[at : at + SEGMENT]) for at in range(0, PAYLOAD, SEGMENT)]


def stored(home: Path) -> None:
    """A store of framed records, as a worker saves them."""
    tier = tier_of(home, 3 * RECORDS)
    keys, payloads = keys_of(*range(RECORDS)), [payload_of(number) for number in range(RECORDS)]
    headers = TEMPLATE.encode(keys, np.array([sums(payload) for payload in payloads], np.uint32))
    pieces = Buffers.of([piece for pair in zip(headers, payloads, strict=True) for piece in pair])
    buffers = Buffers(pieces.address, pieces.length_bytes, 2 * np.arange(RECORDS + 1), pieces.keepalive)
    assert not tier.save(keys, buffers, SaveClass.CACHEABLE, FOREVER).wait(CALM_S).any()
    assert tier.close(FOREVER)


def read_back(tier: DiskTier) -> tuple[list[int], int]:
    """Numbers whose records come back; how many were refused by the tier, or by who checks the bytes."""
    keys, served, refused = keys_of(*range(RECORDS)), [], 0
    with tier.lookup(keys, FOREVER).value as lease:
        for row in np.flatnonzero(lease.present).tolist():
            header, payload = np.zeros(TEMPLATE.header_bytes, np.uint8), np.zeros(PAYLOAD, np.uint8)
            pieces = Buffers.of([header, payload])
            buffers = Buffers(pieces.address, pieces.length_bytes, np.array([0, 2]), pieces.keepalive)
            code = tier.load(lease, np.array([row]), buffers, FOREVER).wait(CALM_S)[0]
            if code != Code.OK:
                refused += 1
                continue
            flaws, claimed = TEMPLATE.verify(header[None], keys[row : row + 1])
            if flaws[0] is not None or claimed[0].tolist() != sums(payload):
                tier.discard(lease, np.array([row]))
                refused += 1
                continue
            assert np.array_equal(payload, payload_of(row)), f"record {row} was served with other bytes"
            served.append(row)
    return served, refused


def test_e7_r7_a_thousand_flipped_bits_in_records(tmp_path: Path) -> None:
    """E7, R7: a flipped bit in a record is never served and always counted; elsewhere it hurts nobody."""
    stored(tmp_path)
    files = segment_files(tmp_path)
    sizes = np.array([path.stat().st_size for path in files])
    rng = np.random.default_rng(5)
    hit = 0
    for _ in range(50):
        flips = []
        for at in rng.integers(0, int(sizes.sum()), 20).tolist():
            number = int(np.searchsorted(np.cumsum(sizes), at, side="right"))
            flips.append((files[number], at - int(sizes[:number].sum()), 1 << int(rng.integers(8))))
        flip(flips)
        tier = tier_of(tmp_path, 3 * RECORDS)
        served, refused = read_back(tier)
        stats = tier.stats()
        assert served == [number for number, here in enumerate(present(tier, *range(RECORDS))) if here]
        assert len(served) + refused == RECORDS
        assert stats["quarantined"] == refused
        hit += refused
        tier.close(FOREVER)
        for path in tmp_path.glob("index.db*"):
            path.unlink()
        for path in segment_files(tmp_path):
            path.unlink()
        stored(tmp_path)
        files = segment_files(tmp_path)
    assert hit > 200


def flip(flips: list[tuple[Path, int, int]]) -> None:
    """Flip bits."""
    for path, at, bit in flips:
        with path.open("r+b") as file:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ bit]))


def test_e7_r7_a_thousand_flipped_bits_in_the_index(tmp_path: Path) -> None:
    """E7, R7: whatever flipped bits do to the index, records are absent or equal, and losses are counted."""
    home = tmp_path / "store"
    stored(home)
    whole = {path: path.read_bytes() for path in [*segment_files(home), home / "index.db"]}
    rng = np.random.default_rng(6)
    lost = 0
    for _ in range(50):
        for path, content in whole.items():
            path.write_bytes(content)
        size = len(whole[home / "index.db"])
        places = rng.integers(0, size, 20).tolist()
        flip([(home / "index.db", at, 1 << int(rng.integers(8))) for at in places])
        tier = tier_of(home, 3 * RECORDS)
        served, refused = read_back(tier)
        stats = tier.stats()
        missing = RECORDS - len(served)
        assert refused <= stats["quarantined"]
        assert not missing or stats["rows_dropped"] + stats["index_lost"] + stats["quarantined"] > 0
        assert usage_is_right(tier)
        assert save(tier, 99) == [Code.OK]
        assert equal(tier, 99) == [True]
        lost += bool(missing)
        assert tier.close(FOREVER)
    assert lost > 10

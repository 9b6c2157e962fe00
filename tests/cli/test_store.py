"""`kvc store`: what operators see of a disk tier's directory, whole, damaged, in use, or killed."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcontract.cli.main import main
from kvcontract.core.lane import InlineLane
from kvcontract.memory.checksum import crc32c
from kvcontract.tiers.base import Buffers, SaveClass, record_keys
from kvcontract.tiers.disk import DiskTier
from kvcontract.tiers.frame import FrameTemplate

SLOT, PAYLOAD = 8192, 4096
FOREVER = math.inf
FINGERPRINTS = (bytes(16 * [0xAA]), bytes(16 * [0xBB]))


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any]:
    """Exit code and the one JSON document on stdout."""
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def text(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Exit code and what a person reads."""
    code = main([*map(str, arguments)])
    return code, capsys.readouterr().out


def tier_of(home: Path) -> DiskTier:
    """Room for eight records in files of two."""
    options = {"lane": InlineLane(), "direct": False, "segment_bytes": 2 * SLOT, "meta": {"max_tp": 8}}
    return DiskTier(home, 8 * SLOT, **options)  # type: ignore[arg-type]


def fill(tier: DiskTier, *, part: int = 0, fingerprint: bytes = FINGERPRINTS[0], first: int = 1) -> None:
    """Save three framed records."""
    pages = np.array([[number, part] for number in range(first, first + 3)], np.uint64)
    keys = record_keys(pages, part, 0, 1)
    payloads = [np.random.default_rng(number).integers(0, 256, PAYLOAD, np.uint8) for number in range(3)]
    sums = np.array([[crc32c(payload)] for payload in payloads], np.uint32)
    headers = FrameTemplate(fingerprint, [PAYLOAD]).encode(keys, sums)
    pieces = Buffers.of([piece for pair in zip(headers, payloads, strict=True) for piece in pair])
    buffers = Buffers(pieces.address, pieces.length_bytes, 2 * np.arange(4), pieces.keepalive)
    assert not tier.save(keys, buffers, SaveClass.CACHEABLE, FOREVER).value.any()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A closed store of six records for two models."""
    tier = tier_of(tmp_path / "store")
    fill(tier)
    fill(tier, part=64, fingerprint=FINGERPRINTS[1])
    assert tier.close(FOREVER)
    return tmp_path / "store"


def segments(home: Path) -> list[Path]:
    """The files that hold records."""
    return sorted((home / "segments").iterdir())


def overwrite(path: Path, at: int, data: bytes) -> None:
    """Change a file in place."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def test_ls_groups_records_by_what_they_are_for(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One row for each fingerprint, part and shard; what is not ours is named."""
    (home / "notes.txt").write_text("mine")
    code, found = run(capsys, "store", "ls", home)
    assert code == 0
    same = {"shard": 0, "shards": 1, "records": 3, "record_bytes": 3 * (PAYLOAD + 128)}
    assert found["records"] == [
        {"fingerprint": 16 * "aa", "part": 0, **same},
        {"fingerprint": 16 * "bb", "part": 64, **same},
    ]
    assert (found["owner"], found["foreign"], found["rows_damaged"]) == (None, ["notes.txt"], 0)
    assert found["label"]["meta"] == {"max_tp": 8}
    code, said = text(capsys, "store", "ls", home)
    assert code == 0
    assert "6 records" in said
    assert "max_tp 8" in said
    assert "not ours, left alone: notes.txt" in said


def test_du_adds_up(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The parts are the segment files; quota and what is left of it are told."""
    (home / "segments" / "00000099.kvseg").write_bytes(bytes(SLOT))
    code, found = run(capsys, "store", "du", home)
    usage = found["bytes"]
    files = sum(path.stat().st_size for path in segments(home))
    parts = ("record_bytes", "padding_bytes", "free_slot_bytes", "orphan_bytes")
    assert (code, sum(usage[name] for name in parts), usage["segment_bytes"]) == (0, files, files)
    assert (usage["orphan_bytes"], usage["capacity_bytes"]) == (SLOT, 8 * SLOT)
    assert usage["free_bytes"] == SLOT
    assert usage["disk_free_bytes"] > 0
    assert "quota of the segment files" in text(capsys, "store", "du", home)[1]


def test_a_running_owner_is_named_and_not_disturbed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """H6: reading needs no lock and sees what is committed; tidying up is refused, with who has it."""
    tier = tier_of(home)
    fill(tier, first=100, part=1)
    assert tier.flush("durable", FOREVER).value
    code, found = run(capsys, "store", "ls", home)
    assert (code, found["owner"]["pid"], found["owner"]["runs"]) == (0, os.getpid(), True)
    assert sum(row["records"] for row in found["records"]) == 8
    code, found = run(capsys, "store", "verify", home)
    assert (code, found["whole"], found["records"]) == (0, True, 8)
    code, found = run(capsys, "store", "gc", home)
    assert code == 2
    assert f"process {os.getpid()} " in found["error"]
    assert f"open in process {os.getpid()}" in text(capsys, "store", "ls", home)[1]
    assert tier.close(FOREVER)


KILLED = """
import sys, os
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_store import fill, tier_of, FOREVER
tier = tier_of(Path(sys.argv[1]))
fill(tier, first=50, part=1)
assert tier.flush("durable", FOREVER).value
os.kill(os.getpid(), 9)
"""


def test_a_killed_owner_is_told_as_such(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it had committed is read, though nobody has opened the store since."""
    here = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", KILLED, str(home), here], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    code, found = run(capsys, "store", "ls", home)
    assert (code, found["owner"]["runs"]) == (0, False)
    assert sum(row["records"] for row in found["records"]) == 8
    assert run(capsys, "store", "verify", home)[0] == 0
    assert "not closed by process" in text(capsys, "store", "ls", home)[1]
    assert run(capsys, "store", "gc", home)[0] == 0
    assert run(capsys, "store", "ls", home)[1]["owner"] is None


def test_verify_finds_damage_and_gc_removes_it(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """E7: a changed place, frame or payload is found by reading all; exit 1, and 0 once it is removed."""
    assert run(capsys, "store", "verify", home)[1]["whole"] is True
    first, second, third = segments(home)
    overwrite(first, SLOT - 1, b"\x77\x78")  # the end of one payload, the front of the next
    overwrite(second, 5000, b"\x79")
    third.write_bytes(third.read_bytes()[:SLOT])
    (home / "segments" / "00000099.kvseg").write_bytes(bytes(SLOT))
    code, found = run(capsys, "store", "verify", home)
    assert (code, found["whole"], found["records"], found["moved"]) == (1, False, 6, 0)
    whys = sorted(item["why"] for item in found["damaged"])
    assert whys == ["corrupt_payload", "corrupt_payload", "foreign", "truncated"]
    assert all(len(item["key"]) == 42 for item in found["damaged"])
    code, said = text(capsys, "store", "verify", home)
    assert (code, said.count("DAMAGED")) == (1, 4)
    code, found = run(capsys, "store", "gc", home)
    assert code == 0
    assert found["after"]["records"] == 1
    assert found["after"]["orphans_removed"] == 2
    assert found["after"]["rows_dropped"] == 2
    code, found = run(capsys, "store", "verify", home)
    assert (code, found["whole"], found["records"]) == (0, True, 1)
    assert "1 record of 4,224 B read, 0 damaged" in text(capsys, "store", "gc", home)[1]
    tier = tier_of(home)
    assert tier.stats()["capacity_bytes"] == 8 * SLOT
    assert tier.close(FOREVER)


def test_gc_of_a_lost_index_leaves_an_empty_store(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """H4: `ls` says that an index cannot be read; `gc` begins a new one and removes what nobody knows."""
    (home / "index.db").write_bytes(b"not an index" * 999)
    code, found = run(capsys, "store", "ls", home)
    assert code == 3
    assert "cannot be read" in found["error"]
    code, found = run(capsys, "store", "gc", home)
    assert (code, found["after"]["records"], found["after"]["orphans_removed"]) == (0, 0, 3)
    assert segments(home) == []
    assert run(capsys, "store", "ls", home)[0] == 0


@pytest.mark.parametrize("verb", ["ls", "du", "verify", "gc"])
def test_what_is_no_store_is_refused(tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2 for a directory that is none, or of another format; nothing is made in it."""
    code, found = run(capsys, "store", verb, tmp_path)
    assert (code, "has no store.json" in found["error"]) == (2, True)
    assert run(capsys, "store", verb, tmp_path / "nowhere")[0] == 2
    label = {"kind": "kvcontract disk store", "format": 7}
    (tmp_path / "store.json").write_text(json.dumps(label))
    code, found = run(capsys, "store", verb, tmp_path)
    assert (code, "format 7" in found["error"]) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["store.json"]


def test_usage_of_the_group(capsys: pytest.CaptureFixture[str]) -> None:
    """No verb: the help; a wrong one: exit 2."""
    assert "verify" in text(capsys, "store", "--help")[1]
    assert main(["store", "nonsense"]) == 2

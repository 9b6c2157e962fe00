"""The parent's end of a tier that lives in a child: records by number, and what must come back of them.

`TierRig` makes keys and bytes, sends them along, and compares what is read with what must be there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvc_conformance.bench import Bench, Failed, first_few
from kvc_conformance.channel import Message
from kvc_conformance.driver import Child
from kvc_conformance.probes.tier_made import GAP_BYTES, POISON
from kvcontract.tiers.base import RECORD_KEY_BYTES, Code, record_keys

CAPACITY_BYTES: Final = 4 << 20
RECORD_BYTES: Final = 20_000
FILLER_BYTES: Final = 64 << 10
FILLERS: Final = 3 * CAPACITY_BYTES // FILLER_BYTES
"""So many records of FILLER_BYTES are thrice the quota."""

FIRST_FILLER: Final = 100_000
PATIENCE_S: Final = 5.0

_NUMBERS = count(1)


def key_array(numbers: Iterable[int]) -> NDArray[np.uint8]:
    """uint8[n, 21]: the record key of each number."""
    pages = np.array([np.random.default_rng([21, number]).integers(0, 2**63, 2) for number in numbers])
    keys = record_keys(pages.reshape(-1, 2).astype(np.uint64), 0, 0, 1)
    return np.frombuffer(keys.tobytes(), np.uint8).reshape(-1, RECORD_KEY_BYTES)


def record(number: int, size: int) -> NDArray[np.uint8]:
    """The bytes of a record."""
    return np.random.default_rng([22, number]).integers(0, 256, size, np.uint8)


def eventually(holds: Callable[[], bool], patience_s: float = PATIENCE_S) -> bool:
    """Ask again and again, for a while."""
    end = time.monotonic() + patience_s
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


class TierRig:
    """One tier in a child.

    Args:
        bench: the workbench.
        child: where it lives; None: the child that has the plugin.
        directory: where it may keep files; None: a fresh one.
        more: see `kvc_conformance.probes.tier.build`.
    """

    def __init__(
        self, bench: Bench, *, child: Child | None = None, directory: Path | None = None, **more: Any
    ) -> None:
        number = next(_NUMBERS)
        self.directory = directory or bench.folder / f"tier-{number}"
        self._child = child or bench.plugin
        self._name = f"tier-{number}"
        self._leases = count(1)
        arguments = {"capacity_bytes": CAPACITY_BYTES, **more, "directory": str(self.directory)}
        self.said: dict[str, Any] = self.call("build", **arguments).body

    def call(self, probe: str, arrays: Mapping[str, NDArray[Any]] | None = None, **arguments: Any) -> Message:
        """Have a probe of `kvc_conformance.probes.tier` executed on this tier."""
        return self._child.call(f"tier.{probe}", {"tier": self._name, **arguments}, arrays)

    def stress(self, probe: str, arrays: Mapping[str, NDArray[Any]], **arguments: Any) -> Message:
        """Have a probe of `kvc_conformance.probes.tier_stress` executed on this tier."""
        return self._child.call(f"tier_stress.{probe}", {"tier": self._name, **arguments}, arrays)

    def kill(self) -> None:
        """End the child as the machine would: without a warning, in the midst of whatever it does."""
        self._child.kill()

    def save(
        self, numbers: Sequence[int], size: int | Sequence[int] = RECORD_BYTES, **more: Any
    ) -> list[Code]:
        """Save the records of some numbers in one batch; returns their codes.

        Raises:
            Failed: it did not settle, has no code for each, or changed the memory it was given.
        """
        sizes = [size] * len(numbers) if isinstance(size, int) else list(size)
        return self.save_bytes(
            numbers, [record(number, length) for number, length in zip(numbers, sizes, strict=True)], **more
        )

    def save_bytes(
        self, numbers: Sequence[int], contents: Sequence[NDArray[np.uint8]], **more: Any
    ) -> list[Code]:
        """Save other bytes than a record's own."""
        arrays = {"keys": key_array(numbers), "content": np.concatenate(contents)}
        body = self.call("save", arrays, lengths=[item.nbytes for item in contents], **more).body
        what = f"a save of {len(numbers)} record(s)"
        if not body["unchanged"]:
            raise Failed(f"{what} changed the memory that it was to read")
        return _coded(body, len(numbers), what)

    def must_save(
        self, numbers: Sequence[int], size: int | Sequence[int] = RECORD_BYTES, **more: Any
    ) -> None:
        """Save, and have every code OK.

        Raises:
            Failed: one is not.
        """
        codes = self.save(numbers, size, **more)
        if set(codes) != {Code.OK}:
            raise Failed(f"{_told(codes)} where {len(codes)} record(s) had room and time enough")

    def look(self, numbers: Sequence[int], **more: Any) -> tuple[str, list[bool]]:
        """Look numbers up; returns the lease's id, and which are present.

        Raises:
            Failed: nothing settled, or the answer is not one for each key.
        """
        lease = f"lease-{next(self._leases)}"
        present = self.call("lookup", {"keys": key_array(numbers)}, id=lease, **more).body["present"]
        if present is None:
            raise Failed(f"a look-up of {len(numbers)} key(s) did not settle with a lease")
        if len(present) != len(numbers):
            raise Failed(f"a look-up of {len(numbers)} key(s) was answered for {len(present)}")
        return lease, present

    def release(self, lease: str, how: str = "release") -> None:
        """Give a lease back, or lose it."""
        self.call("release", id=lease, how=how)

    def present(self, numbers: Sequence[int]) -> list[bool]:
        """Which records a look-up finds; the lease goes back at once."""
        lease, present = self.look(numbers)
        self.release(lease)
        return present

    def load(
        self, lease: str, rows: Sequence[int], sizes: Sequence[int], **more: Any
    ) -> tuple[list[Code], list[NDArray[np.uint8]]]:
        """Load rows of a lease; returns codes and what then lies in memory.

        Raises:
            Failed: it did not settle, or wrote beside the memory it was given.
        """
        answer = self.call("load", id=lease, rows=list(rows), lengths=list(sizes), **more)
        codes = _coded(answer.body, len(rows), f"a load of {len(rows)} record(s)")
        memory, found, at = answer.arrays["memory"], [], 0
        for size in sizes:
            found.append(memory[at : at + size])
            gap = memory[at + size : at + size + GAP_BYTES]
            if (gap != POISON).any():
                raise Failed(f"a load of a record of {size:,} B wrote behind the memory that it was given")
            at += size + GAP_BYTES
        return codes, found

    def read(self, numbers: Sequence[int], size: int | Sequence[int] = RECORD_BYTES) -> list[Code]:
        """Look up and load; each record is what was saved, or has a code that says why not.

        Raises:
            Failed: bytes came back that were not saved.
        """
        sizes = [size] * len(numbers) if isinstance(size, int) else list(size)
        lease, present = self.look(numbers)
        rows = [row for row, here in enumerate(present) if here]
        codes, found = self.load(lease, rows, [sizes[row] for row in rows])
        self.release(lease)
        compare([numbers[row] for row in rows], codes, found)
        loaded = iter(codes)
        return [next(loaded) if here else Code.MISS for here in present]

    def must_have(
        self, numbers: Sequence[int], size: int | Sequence[int] = RECORD_BYTES, *, why: str
    ) -> None:
        """Read, and have every record.

        Raises:
            Failed: one is not there or not right.
        """
        codes = self.read(numbers, size)
        if set(codes) - {Code.OK}:
            raise Failed(f"{why}: {_told(codes)} of {len(codes)} record(s)")

    def churn(self) -> list[Code]:
        """Save thrice the quota of other records; returns their codes."""
        return self.crowd(range(FIRST_FILLER, FIRST_FILLER + FILLERS))

    def fill(self, **more: Any) -> list[int]:
        """Save records that must stay, until one has no room; returns the numbers of those that are there.

        Raises:
            Failed: there was room for more than the quota, or the last one ended otherwise than FULL.
        """
        numbers = range(FIRST_FILLER, FIRST_FILLER + FILLERS)
        codes = self.crowd(numbers, **more)
        if codes[-1] is Code.OK:
            raise Failed(
                f"{len(codes)} records of {FILLER_BYTES:,} B that nobody may evict fit into a quota of"
                f" {CAPACITY_BYTES:,} B"
            )
        if codes[-1] is not Code.FULL:
            raise Failed(f"with everything in use, a save ended {codes[-1].name}; expected FULL")
        return list(numbers[: len(codes) - 1])

    def crowd(self, numbers: Sequence[int], **more: Any) -> list[Code]:
        """Save fillers one at a time; of a handoff, or if each is leased, only until one is not OK."""
        arrays = {"keys": key_array(numbers), "content": record(FIRST_FILLER, FILLER_BYTES)}
        body = self.call("crowd", arrays, lengths=[FILLER_BYTES], **{"id": "crowd", **more}).body
        return [Code(code) for code in body["codes"]]

    def room_again(self, number: int) -> bool:
        """Whether one more record finds room, sooner or later."""
        return eventually(lambda: self.save([number], FILLER_BYTES) == [Code.OK])

    def gauges(self) -> dict[str, int]:
        """The tier's figures."""
        found: dict[str, int] = self.call("stats").body["stats"]
        return found

    def close(self) -> None:
        """Close it.

        Raises:
            Failed: something still runs.
        """
        if not self.call("close").body["closed"]:
            raise Failed("close left something running although nothing was going on")


def compare(numbers: Sequence[int], codes: Sequence[Code], found: Sequence[NDArray[np.uint8]]) -> None:
    """What loads report as OK must be what was saved.

    Raises:
        Failed: it is not; tells the first byte.
    """
    wrong = []
    for number, code, bytes_ in zip(numbers, codes, found, strict=True):
        expected = record(number, bytes_.nbytes)
        if code is Code.OK and not np.array_equal(bytes_, expected):
            at = int(np.flatnonzero(bytes_ != expected)[0])
            wrong.append(
                f"record {number} of {bytes_.nbytes:,} B has 0x{int(bytes_[at]):02x} at byte {at:,};"
                f" 0x{int(expected[at]):02x} was saved there"
            )
    if wrong:
        raise Failed(first_few(wrong))


def _coded(body: Mapping[str, Any], expected: int, what: str) -> list[Code]:
    if not body["settled"]:
        raise Failed(f"{what} did not settle")
    if len(body["codes"]) != expected:
        raise Failed(f"{what} settled with {len(body['codes'])} codes")
    unknown = sorted(set(body["codes"]) - set(map(int, Code)))
    if unknown:
        raise Failed(f"{what} settled with {unknown}, which are no codes")
    return [Code(code) for code in body["codes"]]


def _told(codes: Sequence[Code]) -> str:
    """How many of which."""
    return ", ".join(f"{codes.count(code)} {code.name}" for code in sorted(set(codes)))

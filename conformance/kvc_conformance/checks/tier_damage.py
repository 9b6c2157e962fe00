"""Tiers that keep files: what happens to those while nobody looks.

The records are framed, as a store's are: a tier may hand damaged bytes on, since the frame tells; it may not
take them for whole itself, and it must forget what it is told to forget.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvc_conformance.bench import Bench, Check, Failed, NotApplicable
from kvc_conformance.driver import ProbeFailed
from kvc_conformance.tier_rig import TierRig, eventually, key_array, record
from kvcontract.memory.checksum import crc32c
from kvcontract.tiers.base import RECORD_KEY, Code
from kvcontract.tiers.frame import FrameTemplate

RECORDS: Final = 8
SEGMENTS: Final = (12_288, 9_000)
DAMAGED: Final = (1, 4)
"""Numbers of the two records that are damaged."""

TEMPLATE: Final = FrameTemplate(bytes(range(16)), SEGMENTS)
SIZE: Final = TEMPLATE.header_bytes + sum(SEGMENTS)
SMALLEST_SEARCHED: Final = 64


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a record lies."""

    file: Path
    at: int


def _flip(places: list[_Place], at: int) -> None:
    for place in places:
        data = bytearray(place.file.read_bytes())
        data[place.at + at] ^= 0x10
        place.file.write_bytes(data)


def _zero(places: list[_Place]) -> None:
    for place in places:
        data = bytearray(place.file.read_bytes())
        data[place.at + SIZE // 2 : place.at + SIZE] = bytes(SIZE - SIZE // 2)
        place.file.write_bytes(data)


def _tear(places: list[_Place]) -> None:
    for place in sorted(places, key=lambda place: -place.at):
        with place.file.open("r+b") as file:
            file.truncate(place.at + SIZE // 2)


def _swap(places: list[_Place]) -> None:
    one, two = places
    first = one.file.read_bytes()[one.at : one.at + SIZE]
    second = two.file.read_bytes()[two.at : two.at + SIZE]
    for place, content in ((one, second), (two, first)):
        data = bytearray(place.file.read_bytes())
        data[place.at : place.at + SIZE] = content
        place.file.write_bytes(data)


def _delete(places: list[_Place]) -> None:
    for file in {place.file for place in places}:
        file.unlink()


def _replace(places: list[_Place]) -> None:
    for file in {place.file for place in places}:
        file.write_bytes(b"somebody else's file\n" * 100)


def _strange(places: list[_Place]) -> None:
    for folder in {place.file.parent for place in places}:
        (folder / "strange").write_bytes(bytes(SIZE))


DAMAGES: Final[dict[str, Callable[[list[_Place]], None]]] = {
    "bit of the payload": lambda places: _flip(places, TEMPLATE.header_bytes + 5000),
    "bit of the frame": lambda places: _flip(places, 20),
    "half is zeros": _zero,
    "torn": _tear,
    "two swapped": _swap,
    "file is gone": _delete,
    "file is another's": _replace,
    "strange file beside it": _strange,
}


def framed(number: int) -> NDArray[np.uint8]:
    """A record with its frame."""
    payload = record(number, sum(SEGMENTS))
    cut = SEGMENTS[0]
    sums = np.array([[crc32c(payload[:cut]), crc32c(payload[cut:])]], np.uint32)
    keys = key_array([number]).view(RECORD_KEY).reshape(-1)
    return np.concatenate([TEMPLATE.encode(keys, sums)[0], payload])


def _whole(number: int, found: NDArray[np.uint8]) -> bool:
    """Whether a frame vouches for what was found."""
    header, payload = found[: TEMPLATE.header_bytes], found[TEMPLATE.header_bytes :]
    keys = key_array([number]).view(RECORD_KEY).reshape(-1)
    flaws, claimed = TEMPLATE.verify(header.reshape(1, -1), keys)
    sums = [crc32c(payload[: SEGMENTS[0]]), crc32c(payload[SEGMENTS[0] :])]
    return flaws == [None] and claimed[0].tolist() == sums


def _damaged(bench: Bench, case: str) -> str:
    """KVC-TIER-15."""
    numbers = list(range(RECORDS))
    contents = [framed(number) for number in numbers]
    rig = TierRig(bench)
    if not rig.said["persistent"]:
        rig.close()
        raise NotApplicable("it does not say that it is persistent")
    if rig.save_bytes(numbers, contents) != [Code.OK] * RECORDS:
        raise Failed(f"{RECORDS} records of {SIZE:,} B could not be saved")
    rig.call("flush", level="durable")
    rig.close()
    places = [_find(rig.directory, contents[number]) for number in DAMAGED]
    found = [place for place in places if place is not None]
    if len(found) < len(places):
        raise NotApplicable(f"it keeps no record as it is below {rig.directory.name}/")
    DAMAGES[case](found)
    try:
        again = TierRig(bench, directory=rig.directory)
    except ProbeFailed as error:
        raise Failed(f"{case}: it does not open any more: {error.text}") from error
    codes = _meet(again, numbers, contents, case)
    if not eventually(lambda: again.save_bytes(numbers, contents) == [Code.OK] * RECORDS):
        raise Failed(f"{case}: records cannot be saved anew")
    if _meet(again, numbers, contents, case) != [Code.OK] * RECORDS:
        raise Failed(f"{case}: after every record was saved anew, not all of them can be loaded")
    again.close()
    return ", ".join(f"{codes.count(code)} {code.name}" for code in sorted(set(codes)))


def _find(directory: Path, content: NDArray[np.uint8]) -> _Place | None:
    """Where below a directory some bytes lie."""
    wanted = content.tobytes()
    for file in sorted(path for path in directory.rglob("*") if path.is_file()):
        at = file.read_bytes().find(wanted) if file.stat().st_size >= SMALLEST_SEARCHED else -1
        if at >= 0:
            return _Place(file, at)
    return None


def _meet(rig: TierRig, numbers: list[int], contents: list[NDArray[np.uint8]], case: str) -> list[Code]:
    """Load what is there; what the frame does not vouch for is discarded, and is then absent."""
    lease, present = rig.look(numbers)
    rows = [row for row, here in enumerate(present) if here]
    loaded, found = rig.load(lease, rows, [SIZE] * len(rows))
    codes = [Code.MISS] * len(numbers)
    for row, code, bytes_ in zip(rows, loaded, found, strict=True):
        codes[row] = code
        if code is Code.OK and not np.array_equal(bytes_, contents[row]):
            if _whole(numbers[row], bytes_):
                raise Failed(f"{case}: record {row} came back with other bytes, and a frame that fits them")
            codes[row] = Code.CORRUPT
    wrong = [row for row, code in enumerate(codes) if code is Code.CORRUPT]
    rig.call("discard", id=lease, rows=wrong)
    rig.release(lease)
    if not eventually(lambda: not any(rig.present([numbers[row] for row in wrong]))):
        raise Failed(f"{case}: damaged records were discarded and are still said to be present")
    return codes


CHECKS: Final[tuple[Check, ...]] = (Check("KVC-TIER-15", _damaged, lambda _: tuple(DAMAGES)),)

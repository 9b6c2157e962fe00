"""The frame around a stored record, so that whatever reads it knows what it has read (H8).

::

    offset  bytes
         0      8  magic  89 4B 56 43 52 0D 0A 1A
         8      2  format version
        10      2  zero
        12      4  header bytes, a multiple of 64
        16     16  fingerprint of the part
        32     21  record key: page_key[16] | part u8 | shard u16 | shards u16
        53      3  zero
        56      8  payload bytes, which follow the header
        64      4  number of segments
        68      4  zero
        72      8  id of the key that the payload is encrypted with; zeros: it is in the clear
        80     12  nonce, if encrypted
        92     16  tag, if encrypted
       108  12 * s segments: bytes u64, crc32c u32
                   zeros
       end      4  crc32c of everything before it: the header's last four bytes

Integers are little endian.  The header's sum covers its padding, so that any changed byte shows.  Sums of
segments are of the bytes as they are stored, encrypted or not: whoever tidies up a store finds what is
damaged without any key, and a sum tells nothing about what was encrypted.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.layout import round_up
from kvcontract.memory.checksum import crc32c
from kvcontract.tiers.base import RECORD_KEY_BYTES, RecordKeys

MAGIC: Final = b"\x89KVCR\r\n\x1a"
FORMAT: Final = 2
ALIGN_BYTES: Final = 64
FINGERPRINT_BYTES: Final = 16
KEY_ID_BYTES: Final = 8
NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
SEAL_BYTES: Final = KEY_ID_BYTES + NONCE_BYTES + TAG_BYTES
CLEAR: Final = bytes(SEAL_BYTES)
"""What stands for key id, nonce and tag where nothing is encrypted."""

_FIXED: Final = struct.Struct(f"<8sHHI16s21s3xQI4x{SEAL_BYTES}s")
_SEGMENT: Final = struct.Struct("<QI")
_SUM: Final = struct.Struct("<I")
_PREFIX_BYTES: Final = 16  # up to and including the header's length
_KEY_AT: Final = 32
_SEAL_AT: Final = 72


class Flaw(StrEnum):
    """Why a frame is not the one expected; values name counters."""

    FOREIGN = "foreign"
    OTHER_FORMAT = "other_format"
    TRUNCATED = "truncated"
    CORRUPT_HEADER = "corrupt_header"
    OTHER_FINGERPRINT = "other_fingerprint"
    WRONG_KEY = "wrong_key"
    OTHER_SEGMENTS = "other_segments"
    CORRUPT_PAYLOAD = "corrupt_payload"
    UNKNOWN_KEY = "unknown_key"
    WRONG_TAG = "wrong_tag"
    NOT_ENCRYPTED = "not_encrypted"


FLAW_MEANING: Final[dict[Flaw, str]] = {
    Flaw.FOREIGN: "not a record of ours (no magic)",
    Flaw.OTHER_FORMAT: "a record of another format version",
    Flaw.TRUNCATED: "shorter than its header says",
    Flaw.CORRUPT_HEADER: "a header whose checksum does not fit",
    Flaw.OTHER_FINGERPRINT: "a record of another model, numerics or layout",
    Flaw.WRONG_KEY: "another record than the one asked for",
    Flaw.OTHER_SEGMENTS: "a payload cut into other segments",
    Flaw.CORRUPT_PAYLOAD: "a segment whose checksum does not fit",
    Flaw.UNKNOWN_KEY: "encrypted with a key that is not known here",
    Flaw.WRONG_TAG: "encrypted bytes, key or frame that are not those that were saved",
    Flaw.NOT_ENCRYPTED: "in the clear, where its scope has a key",
}


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """A header that is whole; whether it is the expected one is another question (`verify`).

    Attributes:
        fingerprint: 16 bytes, of the part.
        key: 21 bytes.
        segments: (bytes, crc32c) of each.
        seal: 36 bytes, key id, nonce and tag; `CLEAR`: not encrypted.
    """

    fingerprint: bytes
    key: bytes
    segments: tuple[tuple[int, int], ...]
    seal: bytes = CLEAR

    @property
    def payload_bytes(self) -> int:
        """Bytes that follow the header."""
        return sum(size for size, _ in self.segments)


def header_bytes(segments: int) -> int:
    """Length of the header of a record of that many segments."""
    used = _FIXED.size + segments * _SEGMENT.size + _SUM.size
    return round_up(used, ALIGN_BYTES)


def encode(
    fingerprint: bytes, key: bytes, segments: Sequence[int], crcs: Sequence[int], seal: bytes = CLEAR
) -> bytes:
    """The header of one record.

    Args:
        fingerprint: 16 bytes.
        key: 21 bytes.
        segments: bytes of each segment.
        crcs: crc32c of each segment, as it is stored.
        seal: 36 bytes, key id, nonce and tag of an encrypted payload.

    Raises:
        UsageFault: a part has the wrong length.
    """
    _check_parts(fingerprint, segments)
    if len(key) != RECORD_KEY_BYTES or len(crcs) != len(segments) or len(seal) != SEAL_BYTES:
        raise UsageFault(
            f"a key of {len(key)} B and a seal of {len(seal)} B with {len(crcs)} sums for {len(segments)}"
            f" segments; expected {RECORD_KEY_BYTES} B, {SEAL_BYTES} B and a sum for each segment"
        )
    size = header_bytes(len(segments))
    head = _FIXED.pack(MAGIC, FORMAT, 0, size, fingerprint, key, sum(segments), len(segments), seal)
    body = b"".join(_SEGMENT.pack(*pair) for pair in zip(segments, crcs, strict=True))
    covered = (head + body).ljust(size - _SUM.size, b"\0")
    return covered + _SUM.pack(crc32c(covered))


def _check_parts(fingerprint: bytes, segments: Sequence[int]) -> None:
    if len(fingerprint) != FINGERPRINT_BYTES or not segments or min(segments) < 1:
        raise UsageFault(
            f"a fingerprint of {len(fingerprint)} B and segments {list(segments)};"
            f" expected {FINGERPRINT_BYTES} B and at least one segment, none empty"
        )


def decode(data: bytes | bytearray | memoryview) -> FrameHeader | Flaw:
    """Read a header.

    Args:
        data: begins with the header; may be longer.

    Returns:
        The header, or why there is none: FOREIGN, OTHER_FORMAT, TRUNCATED or CORRUPT_HEADER.
    """
    view = bytes(data[:_PREFIX_BYTES])
    if view[: len(MAGIC)] != MAGIC[: len(view)] or not view:
        return Flaw.FOREIGN
    if len(view) < _PREFIX_BYTES:
        return Flaw.TRUNCATED
    _, version, _, size = struct.unpack("<8sHHI", view)
    if version != FORMAT:
        return Flaw.OTHER_FORMAT
    if size % ALIGN_BYTES or size < header_bytes(1):
        return Flaw.CORRUPT_HEADER
    if len(data) < size:
        return Flaw.TRUNCATED
    whole = bytes(data[:size])
    if _SUM.unpack_from(whole, size - _SUM.size)[0] != crc32c(whole[: -_SUM.size]):
        return Flaw.CORRUPT_HEADER
    _, _, reserved, _, fingerprint, key, payload, count, seal = _FIXED.unpack_from(whole)
    # A sum that fits does not mean that a correct writer wrote it.
    if reserved or header_bytes(count) != size:
        return Flaw.CORRUPT_HEADER
    segments = tuple(_SEGMENT.iter_unpack(whole[_FIXED.size : _FIXED.size + count * _SEGMENT.size]))
    header = FrameHeader(fingerprint, key, segments, seal)
    return header if header.payload_bytes == payload else Flaw.CORRUPT_HEADER


def verify(
    data: bytes | bytearray | memoryview, *, fingerprint: bytes, key: bytes, segments: Sequence[int]
) -> Flaw | None:
    """Whether a header is the one expected; None if it is, else the first reason why not."""
    header = decode(data)
    if isinstance(header, Flaw):
        return header
    if header.fingerprint != fingerprint:
        return Flaw.OTHER_FINGERPRINT
    if header.key != key:
        return Flaw.WRONG_KEY
    if [size for size, _ in header.segments] != list(segments):
        return Flaw.OTHER_SEGMENTS
    return None


class FrameTemplate:
    """Headers of many records of one part and shard: all but key and sums is made once.

    Args:
        fingerprint: 16 bytes, of the part.
        segments: bytes of each segment.
    """

    def __init__(self, fingerprint: bytes, segments: Sequence[int]) -> None:
        _check_parts(fingerprint, segments)
        self.fingerprint = fingerprint
        self.segments = tuple(segments)
        self.header_bytes = header_bytes(len(segments))
        blank = encode(fingerprint, bytes(RECORD_KEY_BYTES), segments, [0] * len(segments))
        self._blank = np.frombuffer(blank, np.uint8)

    def encode(
        self, keys: RecordKeys, crcs: NDArray[np.uint32], seals: NDArray[np.uint8] | None = None
    ) -> NDArray[np.uint8]:
        """Headers of n records.

        Args:
            keys: [n].
            crcs: uint32[n, segments], of the bytes as they are stored.
            seals: uint8[n, 36], of payloads that are encrypted.

        Returns:
            uint8[n, header_bytes].
        """
        headers = np.tile(self._blank, (len(keys), 1))
        headers[:, _KEY_AT : _KEY_AT + RECORD_KEY_BYTES] = np.frombuffer(keys.tobytes(), np.uint8).reshape(
            len(keys), RECORD_KEY_BYTES
        )
        if seals is not None:
            self.seals(headers)[:] = seals
        self._sums_of(headers)[:] = (
            crcs.astype("<u4").view(np.uint8).reshape(len(keys), len(self.segments), 4)
        )
        totals = [crc32c(header) for header in headers[:, : -_SUM.size]]
        headers[:, -_SUM.size :] = np.array(totals, "<u4").view(np.uint8).reshape(len(keys), _SUM.size)
        return headers

    def verify(
        self, headers: NDArray[np.uint8], keys: RecordKeys
    ) -> tuple[list[Flaw | None], NDArray[np.uint32]]:
        """Judge headers that came back.

        Args:
            headers: uint8[n, header_bytes].
            keys: [n], the records asked for.

        Returns:
            Per record None or its flaw, and uint32[n, segments] of the sums they claim.
        """
        claimed = np.ascontiguousarray(self._sums_of(headers)).view("<u4")[:, :, 0].astype(np.uint32)
        # What a header claims, encoded again, is the header itself unless something else is wrong with it.
        equal = (self.encode(keys, claimed, self.seals(headers)) == headers).all(axis=1)
        flaws: list[Flaw | None] = [None] * len(keys)
        for row in np.flatnonzero(~equal).tolist():
            flaws[row] = (
                verify(
                    headers[row].tobytes(),
                    fingerprint=self.fingerprint,
                    key=keys[row].tobytes(),
                    segments=self.segments,
                )
                or Flaw.CORRUPT_HEADER
            )
        return flaws, claimed

    def seals(self, headers: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """uint8[n, 36]: a view of key id, nonce and tag; zeros where nothing is encrypted."""
        return headers[:, _SEAL_AT : _SEAL_AT + SEAL_BYTES]

    def _sums_of(self, headers: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """uint8[n, segments, 4]: a view of where the segments' sums lie."""
        end = _FIXED.size + len(self.segments) * _SEGMENT.size
        entries = headers[:, _FIXED.size : end].reshape(len(headers), len(self.segments), _SEGMENT.size)
        return entries[:, :, _SEGMENT.size - _SUM.size :]

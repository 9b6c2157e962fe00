"""Record frames: self-describing, and any damage shows (H8, E7)."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcontract.contract.errors import UsageFault
from kvcontract.memory.checksum import SegmentSums, crc32c, crc32c_iov
from kvcontract.tiers.base import record_keys
from kvcontract.tiers.frame import (
    CLEAR,
    FLAW_MEANING,
    FORMAT,
    MAGIC,
    Flaw,
    FrameHeader,
    FrameTemplate,
    decode,
    encode,
    header_bytes,
    verify,
)

FINGERPRINT = bytes(range(16))
KEY = bytes(range(100, 121))


def _slow_crc32c(data: bytes) -> int:
    """The definition, bit by bit: an oracle that shares no code."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def test_e7_sums_are_crc32c() -> None:
    """E7: the published check value, and the bitwise definition over pieces at odd offsets."""
    assert crc32c(b"123456789") == 0xE3069283
    data = np.arange(301, dtype=np.uint16).view(np.uint8)
    base = data.ctypes.data
    address, length = [base + 1, base + 8, base + 8, base + 109], [7, 0, 101, 3]
    assert crc32c_iov(address, length) == _slow_crc32c(data[1:112].tobytes())
    assert crc32c_iov([base + 5], [9], crc32c_iov([base], [5])) == _slow_crc32c(data[:14].tobytes())


def test_e7_segments_cut_across_pieces() -> None:
    """E7: a segment may span pieces and a piece may span segments."""
    data = np.random.default_rng(1).integers(0, 256, (2, 40), np.uint8)
    sums = SegmentSums([7, 13, 20], [5, 5, 27, 3])
    address = np.stack([data.ctypes.data + 40 * np.arange(2) + at for at in (0, 7, 20)], axis=1)
    found = sums.sums(address.astype(np.int64))
    for row in range(2):
        cuts = [data[row, :5], data[row, 5:10], data[row, 10:37], data[row, 37:]]
        assert found[row].tolist() == [_slow_crc32c(cut.tobytes()) for cut in cuts]


def test_h8_golden_header() -> None:
    """H8: the bytes of a header, field by field; changing them needs another format version."""
    seal = bytes(range(200, 236))
    header = encode(FINGERPRINT, KEY, [1000, 24], [0xDEADBEEF, 7], seal)
    assert len(header) == header_bytes(2) == 192
    assert header_bytes(1) == 128
    assert header[:16] == MAGIC + struct.pack("<HHI", FORMAT, 0, 192)
    assert header[16:32] == FINGERPRINT
    assert header[32:53] == KEY
    assert header[53:56] == bytes(3)
    assert header[56:72] == struct.pack("<QII", 1024, 2, 0)
    assert header[72:108] == seal
    assert header[108:132] == struct.pack("<QIQI", 1000, 0xDEADBEEF, 24, 7)
    assert header[132:188] == bytes(56)
    assert header[188:] == struct.pack("<I", _slow_crc32c(header[:188]))
    assert encode(FINGERPRINT, KEY, [1000, 24], [1, 2])[72:108] == CLEAR == bytes(36)


segments = st.lists(st.tuples(st.integers(1, 2**40), st.integers(0, 2**32 - 1)), min_size=1, max_size=20)


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=21, max_size=21), segments)
def test_h8_headers_round_trip(fingerprint: bytes, key: bytes, pairs: list[tuple[int, int]]) -> None:
    """H8: what was written is read back, also with the payload behind it."""
    header = encode(fingerprint, key, [size for size, _ in pairs], [crc for _, crc in pairs])
    assert len(header) % 64 == 0
    found = decode(header + b"payload")
    assert found == FrameHeader(fingerprint, key, tuple(pairs))
    assert isinstance(found, FrameHeader)
    assert found.payload_bytes == sum(size for size, _ in pairs)


@given(segments, st.data())
def test_h8_any_changed_byte_is_detected(pairs: list[tuple[int, int]], data: st.DataObject) -> None:
    """H8: one byte changed anywhere in a header, padding included, is never taken for the record."""
    sizes = [size for size, _ in pairs]
    header = bytearray(encode(FINGERPRINT, KEY, sizes, [crc for _, crc in pairs]))
    at = data.draw(st.integers(0, len(header) - 1))
    header[at] ^= data.draw(st.integers(1, 255))
    assert verify(bytes(header), fingerprint=FINGERPRINT, key=KEY, segments=sizes) is not None


def test_h8_every_single_bit_flip_of_one_header() -> None:
    """H8: exhaustively: each bit of a header, by itself and through the batch form."""
    keys = record_keys(np.array([[1, 2]], np.uint64), 3, 4, 5)
    template = FrameTemplate(FINGERPRINT, (1000, 24))
    header = template.encode(keys, np.array([[5, 6]], np.uint32))
    for bit in range(header.size * 8):
        broken = header.copy()
        broken[0, bit // 8] ^= 1 << bit % 8
        assert isinstance(decode(broken.tobytes()), Flaw), bit
        assert template.verify(broken, keys)[0] != [None], bit


@given(st.binary(max_size=300))
def test_h8_garbage_is_never_a_header(junk: bytes) -> None:
    """H8: any bytes are judged without an exception."""
    assert isinstance(decode(junk), Flaw)
    assert isinstance(decode(MAGIC + junk), Flaw)


def test_h8_reasons_are_told_apart() -> None:
    """H8: a reader can say what it found instead of the record."""
    header = encode(FINGERPRINT, KEY, [64], [1])

    def flaw(data: bytes, **other: object) -> Flaw | None:
        expected = {"fingerprint": FINGERPRINT, "key": KEY, "segments": [64], **other}
        return verify(data, **expected)  # type: ignore[arg-type]

    assert flaw(header) is None
    assert flaw(b"") is Flaw.FOREIGN
    assert flaw(b"PNG" + header[3:]) is Flaw.FOREIGN
    assert flaw(header[:12]) is Flaw.TRUNCATED
    assert flaw(header[:-1]) is Flaw.TRUNCATED
    assert flaw(header[:8] + b"\1\0" + header[10:]) is Flaw.OTHER_FORMAT
    assert flaw(header[:70] + b"\1" + header[71:]) is Flaw.CORRUPT_HEADER
    assert flaw(header, fingerprint=bytes(16)) is Flaw.OTHER_FINGERPRINT
    assert flaw(header, key=bytes(21)) is Flaw.WRONG_KEY
    assert flaw(header, segments=[32, 32]) is Flaw.OTHER_SEGMENTS
    assert set(FLAW_MEANING) == set(Flaw)


def test_h8_a_correct_sum_over_nonsense_is_refused() -> None:
    """H8: totals that contradict each other are corrupt although the header's sum fits."""
    good = encode(FINGERPRINT, KEY, [64], [1])
    for at, value in ((56, 65), (64, 9), (10, 1)):
        broken = bytearray(good)
        broken[at] = value
        broken[-4:] = struct.pack("<I", _slow_crc32c(bytes(broken[:-4])))
        assert decode(bytes(broken)) is Flaw.CORRUPT_HEADER


def test_h1_batch_of_headers_equals_singles() -> None:
    """H1: the fast form writes the same bytes as the plain one, and judges the same."""
    rng = np.random.default_rng(2)
    keys = record_keys(rng.integers(0, 2**64, (5, 2), np.uint64), 64, 1, 2)
    crcs = rng.integers(0, 2**32, (5, 3), np.uint32)
    template = FrameTemplate(FINGERPRINT, (10, 20, 30))
    headers = template.encode(keys, crcs)
    for row in range(5):
        single = encode(FINGERPRINT, keys[row].tobytes(), (10, 20, 30), crcs[row].tolist())
        assert headers[row].tobytes() == single
    flaws, claimed = template.verify(headers, keys)
    assert flaws == [None] * 5
    assert np.array_equal(claimed, crcs)
    headers[1, 40] ^= 1
    flaws, _ = template.verify(headers, keys[::-1].copy())
    assert flaws == [Flaw.WRONG_KEY, Flaw.CORRUPT_HEADER, None, Flaw.WRONG_KEY, Flaw.WRONG_KEY]
    other = FrameTemplate(bytes(16), (10, 20, 30))
    assert other.verify(headers, keys)[0][0] is Flaw.OTHER_FINGERPRINT


def test_bad_parts_are_refused() -> None:
    """Parts of the wrong length are the caller's fault, with the numbers."""
    with pytest.raises(UsageFault, match="15 B"):
        encode(bytes(15), KEY, [1], [1])
    with pytest.raises(UsageFault, match="20 B"):
        encode(FINGERPRINT, bytes(20), [1], [1])
    with pytest.raises(UsageFault, match="segment"):
        FrameTemplate(FINGERPRINT, [])

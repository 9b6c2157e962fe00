"""Encrypted payloads: what goes in comes out, and nothing else opens (D4, E7, H8)."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import pytest

from kvcontract.contract.errors import MissingExtra, UsageFault
from kvcontract.contract.model import Scope
from kvcontract.tiers import cipher as ciphers
from kvcontract.tiers import disk_audit
from kvcontract.tiers.base import Buffers, Code, RecordKeys, SaveClass, record_keys
from kvcontract.tiers.cipher import NO_KEY, Encryption, RecordCipher, key_id
from kvcontract.tiers.disk import DiskTier
from kvcontract.tiers.frame import CLEAR, Flaw, FrameHeader, decode, encode

pytest.importorskip("cryptography")

A, B = b"a" * 32, b"b" * 32
PRINT = bytes(range(16))
SIZE = 1000


def cipher_of(**keys: bytes) -> RecordCipher:
    """One whose scopes name their keys by their salts."""
    return RecordCipher(Encryption(keys, lambda scope: scope.salt))


def names(count: int = 3) -> RecordKeys:
    """Of records."""
    return record_keys(np.arange(2 * count, dtype=np.uint64).reshape(count, 2), 0, 0, 1)


def payloads(count: int = 3) -> np.ndarray:
    """uint8[count, SIZE], compressible: what is encrypted looks like nothing else."""
    return np.tile(np.arange(count, dtype=np.uint8)[:, None], (1, SIZE))


def places(memory: np.ndarray) -> np.ndarray:
    """Where each payload begins."""
    return memory.ctypes.data + SIZE * np.arange(len(memory), dtype=np.int64)


def opened(cipher: RecordCipher, seals: np.ndarray, memory: np.ndarray, **more: object) -> list[Flaw | None]:
    """Try to decrypt."""
    given = {"keys": names(), "fingerprint": PRINT, "clear": False} | more
    return cipher.open(seals, address=places(memory), size_bytes=SIZE, **given)


def test_payloads_come_back_and_are_unreadable_in_between() -> None:
    """In place; every record has a nonce of its own, and the frame tells the key by its id alone."""
    memory, plain = payloads(), payloads()
    cipher = cipher_of(a=A)
    seals = cipher.seal(key_id(A), names(), PRINT, places(memory), SIZE)
    assert all(len(np.unique(row)) > 200 for row in memory)
    assert {seal[:8].tobytes() for seal in seals} == {key_id(A)}
    assert len({seal[8:20].tobytes() for seal in seals}) == 3
    assert opened(cipher, seals, memory) == [None] * 3
    assert np.array_equal(memory, plain)


@pytest.mark.parametrize("at", [0, 8, 19, 20, 35])
def test_e7_a_changed_seal_opens_nothing(at: int) -> None:
    """E7: another id is an unknown key; another nonce or tag does not fit."""
    memory, cipher = payloads(), cipher_of(a=A)
    seals = cipher.seal(key_id(A), names(), PRINT, places(memory), SIZE).copy()
    seals[1, at] ^= 1
    flaw = Flaw.UNKNOWN_KEY if at < 8 else Flaw.WRONG_TAG
    assert opened(cipher, seals, memory) == [None, flaw, None]


@pytest.mark.parametrize("what", ["payload", "key", "fingerprint", "swapped"])
def test_e7_a_payload_opens_only_as_the_record_it_was_saved_as(what: str) -> None:
    """E7: bytes, record key and fingerprint are authenticated together."""
    memory, cipher = payloads(), cipher_of(a=A)
    seals = cipher.seal(key_id(A), names(), PRINT, places(memory), SIZE)
    keys, print_ = names(), PRINT
    wrong = [Flaw.WRONG_TAG] * 3
    if what == "payload":
        memory[0, 500] ^= 0x80
        wrong = [Flaw.WRONG_TAG, None, None]
    elif what == "key":
        keys = record_keys(keys["page_key"], 1, 0, 1)
    elif what == "fingerprint":
        print_ = bytes(16)
    else:
        seals, memory[[0, 1]] = seals[[1, 0, 2]], memory[[1, 0]]
        wrong = [Flaw.WRONG_TAG, Flaw.WRONG_TAG, None]
    assert opened(cipher, seals, memory, keys=keys, fingerprint=print_) == wrong


def test_an_unknown_key_and_a_clear_record_are_told_apart() -> None:
    """A reader without the key misses; in the clear is only what may be."""
    memory = payloads()
    seals = cipher_of(a=A).seal(key_id(A), names(), PRINT, places(memory), SIZE)
    assert opened(cipher_of(b=B), seals, memory) == [Flaw.UNKNOWN_KEY] * 3
    clear = np.zeros((3, 36), np.uint8)
    assert clear[0].tobytes() == CLEAR
    assert opened(cipher_of(b=B), clear, memory) == [Flaw.NOT_ENCRYPTED] * 3
    assert opened(cipher_of(b=B), clear, memory, clear=True) == [None] * 3


def test_keys_may_change_while_old_records_are_read() -> None:
    """Rotation: several keys are known, each record opens with its own."""
    old, new = payloads(), payloads()
    cipher = cipher_of(a=A, b=B)
    assert (cipher.id_of(Scope(salt="a")), cipher.id_of(Scope())) == (key_id(A), NO_KEY)
    first = cipher.seal(cipher.id_of(Scope(salt="a")), names(), PRINT, places(old), SIZE)
    second = cipher.seal(cipher.id_of(Scope(salt="b")), names(), PRINT, places(new), SIZE)
    assert opened(cipher, first, old) == opened(cipher, second, new) == [None] * 3
    assert np.array_equal(old, new)


def test_whole_records_are_encrypted_with_their_frames() -> None:
    """A relay's: sums are of what is stored; a damaged record gets no tag."""
    cipher, name = cipher_of(a=A), names(1)[0].tobytes()
    payload = payloads(1)[0]
    sizes = [600, 400]
    sums = [ciphers.crc32c(payload[:600]), ciphers.crc32c(payload[600:])]
    head = encode(PRINT, name, sizes, sums)
    record = np.concatenate([np.frombuffer(head, np.uint8), payload])
    where = record.ctypes.data
    assert cipher.seal_frame(key_id(A), bytes(21), where, record.nbytes) == Code.CORRUPT
    record[-1] ^= 1
    assert cipher.seal_frame(key_id(A), name, where, record.nbytes) == Code.CORRUPT
    record[-1] ^= 1
    assert cipher.seal_frame(key_id(A), name, where, record.nbytes) == Code.OK
    header = decode(record.tobytes())
    assert isinstance(header, FrameHeader)
    at = len(head)
    assert [claimed for _, claimed in header.segments] == [
        ciphers.crc32c(record[at : at + 600]),
        ciphers.crc32c(record[at + 600 :]),
    ]
    seal = np.frombuffer(header.seal, np.uint8)[None]
    start = np.array([where + at], np.int64)
    assert cipher.open(seal, names(1), PRINT, start, SIZE, clear=False) == [None]
    assert np.array_equal(record[at:], payload)
    before = record.copy()  # its frame says that it is encrypted: nobody without the key can tell more
    assert cipher.seal_frame(key_id(A), name, where, record.nbytes) == Code.OK
    assert np.array_equal(record, before)


def test_kvc_store_verify_finds_damage_without_a_key(tmp_path: Path) -> None:
    """H4, E7: sums are of the stored bytes, so whoever tidies up needs no key."""
    payload, name = np.zeros(20_000, np.uint8), names(1)
    head = encode(PRINT, name[0].tobytes(), [len(payload)], [ciphers.crc32c(payload)])
    record = np.concatenate([np.frombuffer(head, np.uint8), payload])
    assert (
        cipher_of(a=A).seal_frame(key_id(A), name[0].tobytes(), record.ctypes.data, record.nbytes) == Code.OK
    )
    tier = DiskTier(tmp_path, 1 << 22)
    start, size = record.ctypes.data, len(head)
    pieces = np.array([start, start + size]), np.array([size, len(payload)]), np.array([0, 2])
    saved = tier.save(name, Buffers(*pieces, (record,)), SaveClass.CACHEABLE, math.inf).wait(60.0)
    assert saved.tolist() == [Code.OK]
    assert tier.close(time.monotonic() + 60.0)
    assert disk_audit.verify(tmp_path, lambda *_: None).whole
    (segment,) = (tmp_path / "segments").iterdir()
    data = bytearray(segment.read_bytes())
    data[data.index(record[10_000:10_100].tobytes())] ^= 1
    segment.write_bytes(data)
    assert [why for _, why in disk_audit.verify(tmp_path, lambda *_: None).damaged] == ["corrupt_payload"]


def test_d4_keys_are_shown_nowhere() -> None:
    """D4: no repr and no fault shows one."""
    given = Encryption({"one": A, "two": A, "odd": b"short-key"}, lambda _: None)
    assert given.faults() == ["encryption key 'odd': expected 32 bytes"]
    assert repr(given) == "Encryption(keys=['odd', 'one', 'two'])"
    assert Encryption({"one": A, "two": A}, lambda _: None).faults() == [
        "encryption keys 'one' and 'two' are the same"
    ]
    assert "aaaa" not in repr(vars(ciphers.RecordCipher).keys())
    with pytest.raises(UsageFault, match="key_of names 'x'; keys are a"):
        cipher_of(a=A).id_of(Scope(salt="x"))


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra's install line."""

    def missing(module: str, extra: str) -> None:
        raise MissingExtra(module.split(".", maxsplit=1)[0], extra)

    monkeypatch.setattr(ciphers, "require", missing)
    with pytest.raises(MissingExtra, match=r"cryptography is not installed; .*kvcontract\[crypto\]"):
        cipher_of(a=A)

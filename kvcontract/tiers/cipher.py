"""Records encrypted with keys of their scopes: AES-256-GCM, one key of the operator's for each.

A payload is encrypted in place, where it is staged on its way out, and decrypted in place before it goes to
its pages.  Its frame says with which key (an id that tells nothing about it), nonce and tag; what is
authenticated beside the payload is the record's key and the fingerprint, so that a record that was moved to
another's place, or written by another model, does not open.

A frame's checksums are of the encrypted bytes: `kvc store verify` needs no key to find what a disk has
damaged, and a sum of the plain bytes, in the clear, would tell which records are equal.

Nonces are random.  For 96 bits of them, the rule is at most 2^32 records a key: change keys before that.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvcontract.contract.errors import UsageFault, require
from kvcontract.contract.model import Scope
from kvcontract.memory.checksum import crc32c
from kvcontract.tiers.base import Capabilities, Code, RecordKeys
from kvcontract.tiers.frame import (
    CLEAR,
    KEY_ID_BYTES,
    NONCE_BYTES,
    SEAL_BYTES,
    Flaw,
    FrameHeader,
    decode,
    encode,
)

KEY_BYTES: Final = 32
NO_KEY: Final = bytes(KEY_ID_BYTES)
"""Id that stands for records in the clear."""

_PERSON: Final = b"kvc-key-id"
_CIPHERS: Final = "cryptography.hazmat.primitives.ciphers"

KeyId = bytes
"""8 bytes: a keyed digest of the key, public."""


@dataclass(frozen=True, slots=True, repr=False)
class Encryption:
    """Which records are encrypted, and with what.

    It holds for tiers whose records outlive or leave the process; what stays in its memory is in the clear.

    Attributes:
        keys: 32 bytes each, by a name that is the operator's alone; all that may be needed to read.
        key_of: name of the key that new records of a scope are written with; None: they are stored in the
            clear.  Called from any thread; one that raises, or names no key, costs saves and never privacy.
    """

    keys: Mapping[str, bytes]
    key_of: Callable[[Scope], str | None]

    def __repr__(self) -> str:
        return f"Encryption(keys={sorted(self.keys)})"

    def faults(self) -> list[str]:
        """What is wrong with the keys; none is ever shown."""
        odd = [
            f"encryption key {name!r}: expected {KEY_BYTES} bytes"
            for name, key in self.keys.items()
            if not isinstance(key, bytes) or len(key) != KEY_BYTES
        ]
        if odd:
            return odd
        ids = {name: key_id(key) for name, key in self.keys.items()}
        return [
            f"encryption keys {one!r} and {other!r} are the same"
            for one, other in combinations(ids, 2)
            if ids[one] == ids[other]
        ]


def leaves(capabilities: Capabilities) -> bool:
    """Whether records of such a tier outlive or leave the process, and are encrypted if any are."""
    return capabilities.persistent or capabilities.shared


def key_id(key: bytes) -> KeyId:
    """The public name of a key."""
    return hashlib.blake2b(key=key, digest_size=KEY_ID_BYTES, person=_PERSON).digest()


class RecordCipher:
    """Encrypts and decrypts payloads; thread-safe.

    Args:
        encryption: without faults.

    Raises:
        MissingExtra: the library is not installed.
    """

    def __init__(self, encryption: Encryption) -> None:
        package = require(_CIPHERS, "crypto")
        self._cipher: Any = package.Cipher
        self._aes: Any = require(f"{_CIPHERS}.algorithms", "crypto").AES
        self._gcm: Any = require(f"{_CIPHERS}.modes", "crypto").GCM
        self._wrong_tag: Any = require("cryptography.exceptions", "crypto").InvalidTag
        self._key_of = encryption.key_of
        self._ids = {name: key_id(key) for name, key in encryption.keys.items()}
        self._keys = {key_id(key): key for key in encryption.keys.values()}

    def id_of(self, scope: Scope) -> KeyId:
        """Id of the key of a scope; `NO_KEY`: its records are stored in the clear.

        Raises:
            UsageFault: the operator's function names a key that there is not.
        """
        name = self._key_of(scope)
        if name is None:
            return NO_KEY
        if name not in self._ids:
            raise UsageFault(f"key_of names {name!r}; keys are {', '.join(sorted(self._ids)) or 'none'}")
        return self._ids[name]

    def seal(
        self, key: KeyId, keys: NDArray[Any], fingerprint: bytes, address: NDArray[np.int64], size_bytes: int
    ) -> NDArray[np.uint8]:
        """Encrypt payloads in place.

        Args:
            key: from `id_of`; not `NO_KEY`.
            keys: [n], 21 bytes each, of the records.
            fingerprint: 16 bytes, of their part.
            address: int64[n], where each payload begins; the caller keeps the memory alive.
            size_bytes: of each payload.

        Returns:
            uint8[n, 36], what their frames have to say of it.
        """
        secret, nonces = self._keys[key], os.urandom(NONCE_BYTES * len(keys))
        seals = bytearray()
        for row, (name, start) in enumerate(zip(_names(keys), address.tolist(), strict=True)):
            nonce = nonces[row * NONCE_BYTES : (row + 1) * NONCE_BYTES]
            context = self._cipher(self._aes(secret), self._gcm(nonce)).encryptor()
            context.authenticate_additional_data(name + fingerprint)
            payload = _writable(start, size_bytes)
            context.update_into(payload, payload)
            context.finalize()
            seals += key + nonce + context.tag
        return np.frombuffer(bytes(seals), np.uint8).reshape(len(keys), SEAL_BYTES)

    def open(
        self,
        seals: NDArray[np.uint8],
        keys: RecordKeys,
        fingerprint: bytes,
        address: NDArray[np.int64],
        size_bytes: int,
        *,
        clear: bool,
    ) -> list[Flaw | None]:
        """Decrypt payloads in place.

        Args:
            seals: uint8[n, 36], from their frames.
            keys: of n records.
            fingerprint: 16 bytes, of their part.
            address: int64[n].
            size_bytes: of each payload.
            clear: whether records in the clear are taken; else one that somebody has put there would be.

        Returns:
            By record None, or why it is not to be used: its bytes are undefined then.
        """
        return [
            self._open_one(seal.tobytes(), name + fingerprint, start, size_bytes, clear=clear)
            for seal, name, start in zip(seals, _names(keys), address.tolist(), strict=True)
        ]

    def _open_one(
        self, seal: bytes, beside: bytes, address: int, size_bytes: int, *, clear: bool
    ) -> Flaw | None:
        if seal == CLEAR:
            return None if clear else Flaw.NOT_ENCRYPTED
        secret = self._keys.get(seal[:KEY_ID_BYTES])
        if secret is None:
            return Flaw.UNKNOWN_KEY
        nonce, tag = seal[KEY_ID_BYTES : KEY_ID_BYTES + NONCE_BYTES], seal[KEY_ID_BYTES + NONCE_BYTES :]
        context = self._cipher(self._aes(secret), self._gcm(nonce, tag)).decryptor()
        context.authenticate_additional_data(beside)
        payload = _writable(address, size_bytes)
        context.update_into(payload, payload)
        try:
            context.finalize()
        except self._wrong_tag:
            return Flaw.WRONG_TAG
        return None

    def seal_frame(self, key: KeyId, name: bytes, address: int, size_bytes: int) -> Code:
        """Encrypt a whole record, frame and all, that lies in memory; one that is encrypted is left so.

        Args:
            key: from `id_of`; not `NO_KEY`.
            name: 21 bytes, the record's key.
            address: where its frame begins.
            size_bytes: of frame and payload.

        Returns:
            CORRUPT if the record is not whole: nothing damaged gets a tag that says it is.
        """
        record = np.frombuffer(_writable(address, size_bytes), np.uint8)
        header = decode(record.data)
        if not isinstance(header, FrameHeader) or header.key != name:
            return Code.CORRUPT
        if header.seal != CLEAR:
            return Code.OK
        at = size_bytes - header.payload_bytes
        if at < 0 or _sums(record[at:], header) != [claimed for _, claimed in header.segments]:
            return Code.CORRUPT
        keys = np.frombuffer(name, np.uint8)[None]
        where = np.array([address + at], np.int64)
        seal = self.seal(key, keys, header.fingerprint, where, header.payload_bytes)
        sizes = [size for size, _ in header.segments]
        sums = _sums(record[at:], header)
        record[:at] = np.frombuffer(encode(header.fingerprint, name, sizes, sums, seal.tobytes()), np.uint8)
        return Code.OK


def _names(keys: NDArray[Any]) -> list[bytes]:
    return [key.tobytes() for key in keys]


def _sums(payload: NDArray[np.uint8], header: FrameHeader) -> list[int]:
    found, at = [], 0
    for size, _ in header.segments:
        found.append(crc32c(payload[at : at + size]))
        at += size
    return found


def _writable(address: int, size_bytes: int) -> memoryview:
    return memoryview((ctypes.c_uint8 * size_bytes).from_address(address)).cast("B")

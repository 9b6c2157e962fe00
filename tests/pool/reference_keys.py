"""The key derivation once more, in plain Python and straight from its description: slow and obvious."""

from __future__ import annotations

import hashlib
import struct

MASK = 2**64 - 1


def _rotate(value: int, bits: int) -> int:
    return ((value << bits) | (value >> (64 - bits))) & MASK


def _rounds(v: list[int], count: int) -> None:
    for _ in range(count):
        v[0] = (v[0] + v[1]) & MASK
        v[1] = _rotate(v[1], 13) ^ v[0]
        v[0] = _rotate(v[0], 32)
        v[2] = (v[2] + v[3]) & MASK
        v[3] = _rotate(v[3], 16) ^ v[2]
        v[0] = (v[0] + v[3]) & MASK
        v[3] = _rotate(v[3], 21) ^ v[0]
        v[2] = (v[2] + v[1]) & MASK
        v[1] = _rotate(v[1], 17) ^ v[2]
        v[2] = _rotate(v[2], 32)


def siphash_2_4_128(key: bytes, message: bytes) -> bytes:
    """SipHash-2-4 with 16 bytes of output."""
    k0, k1 = struct.unpack("<QQ", key)
    v = [
        k0 ^ 0x736F6D6570736575,
        k1 ^ 0x646F72616E646F6D ^ 0xEE,
        k0 ^ 0x6C7967656E657261,
        k1 ^ 0x7465646279746573,
    ]
    whole = len(message) // 8 * 8
    tail = message[whole:].ljust(7, b"\0") + bytes([len(message) & 0xFF])
    for (word,) in struct.iter_unpack("<Q", message[:whole] + tail):
        v[3] ^= word
        _rounds(v, 2)
        v[0] ^= word
    v[2] ^= 0xEE
    _rounds(v, 4)
    low = v[0] ^ v[1] ^ v[2] ^ v[3]
    v[1] ^= 0xDD
    _rounds(v, 4)
    return struct.pack("<QQ", low, v[0] ^ v[1] ^ v[2] ^ v[3])


def encode(fields: list[bytes | None]) -> bytes:
    """Every field numbered, marked present or absent, and length-prefixed."""
    out = b""
    for number, value in enumerate(fields):
        out += struct.pack("<BBQ", number, value is not None, len(value or b"")) + (value or b"")
    return out


def chain(
    fingerprint: bytes,
    secret: bytes,
    page_tokens: int,
    tokens: list[int],
    scope: tuple[str | None, str | None, str | None],
    extras: dict[int, bytes] | None = None,
) -> list[bytes]:
    """Keys of the full pages, 16 bytes each."""
    secret_id = hashlib.blake2b(key=secret, digest_size=8, person=b"kvc-secret-id").digest()
    fields = [
        struct.pack("<I", 1),
        fingerprint,
        secret_id,
        struct.pack("<Q", page_tokens),
        *(None if text is None else text.encode() for text in scope),
    ]
    context = hashlib.blake2b(encode(fields), key=secret, digest_size=32, person=b"kvc-context").digest()
    sip_key, parent = context[:16], context[16:]
    keys = []
    for page in range(len(tokens) // page_tokens):
        identity = (extras or {}).get(page)
        message = parent + struct.pack("<BBHI", 1, identity is not None, 0, page_tokens)
        if identity is not None:
            message += hashlib.blake2b(identity, key=secret, digest_size=16, person=b"kvc-extra").digest()
        for token in tokens[page * page_tokens : (page + 1) * page_tokens]:
            message += struct.pack("<I", token)
        parent = siphash_2_4_128(sip_key, message)
        keys.append(parent)
    return keys

"""One derivation of page keys for the whole project.

A page key is 128 bits and depends on everything that may make two pages differ (rule R1): format version,
fingerprint, the fleet's secret, page size, scope, all tokens before the page, its own tokens, and extra
identity such as media digests.

Construction::

    context  = BLAKE2b-256(key = secret, format | fingerprint | secret id | page tokens | scope fields)
               every field tagged and length-prefixed; gives the SipHash key (16 B) and the root parent (16 B)
    page key = SipHash-2-4-128(parent 16 B | header 8 B | extra digest 16 B, if any | tokens as u32 LE)
    header   = kind u8 | has extra u8 | 0 u16 | token count u32

The encoding is injective: the header fixes the length of what follows. A tenant who picks prompts but does
not know the secret sees a pseudo-random function, so finding two prompts with one key needs about 2^64
keys of one scope *and* a way to see them; keys are never shown to tenants. SipHash costs some 60 ns a page,
so that a prompt of 131,072 tokens hashes in about half a millisecond.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.model import Scope
from kvcontract.pool.siphash import hash_pages

KEY_FORMAT = 1
"""Version of the derivation; part of every key."""

PageKeys: TypeAlias = npt.NDArray[np.uint64]
"""Keys of consecutive pages, uint64 [pages, 2]: bytes 0-7 and 8-15 of the digest, little endian."""

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]
"""Any integer sequence; int32, uint32 and int64 arrays are read in place."""

MAX_TOKEN_ID = 2**32 - 1
_PAGE, _PARTIAL = 1, 2  # kinds of name
_MIN_SECRET_BYTES, _MAX_SECRET_BYTES = 16, 64
_NAMED_FAULTS = 8
_CONTEXT, _EXTRA, _PARTIAL_EXTRA, _SECRET_ID = b"kvc-context", b"kvc-extra", b"kvc-partial", b"kvc-secret-id"
_SCOPE_TAG = b"kvc-scope-tag"


@dataclass(frozen=True, slots=True, repr=False)
class FleetSecret:
    """The secret that all members of a fleet derive their keys with; 16 to 64 bytes.

    Raises:
        UsageFault: fewer than 16 or more than 64 bytes.
    """

    value: bytes

    def __post_init__(self) -> None:
        if not _MIN_SECRET_BYTES <= len(self.value) <= _MAX_SECRET_BYTES:
            raise UsageFault(
                f"a fleet secret of {len(self.value)} bytes;"
                f" allowed are {_MIN_SECRET_BYTES} to {_MAX_SECRET_BYTES}"
            )

    @classmethod
    def random(cls) -> FleetSecret:
        """A new secret of 32 random bytes."""
        return cls(secrets.token_bytes(32))

    @classmethod
    def of_file(cls, path: Path, *, create: bool | FleetSecret = False) -> FleetSecret:
        """The secret that a file holds as hex digits; only its owner may read or write it.

        Args:
            path: of the file.
            create: make one where there is none, with this or a random secret; of several who try at once,
                one does.

        Raises:
            UsageFault: there is no such file, others may read or write it, or it holds something else.
        """
        try:
            if create and not path.exists():
                made = create if isinstance(create, FleetSecret) else cls.random()
                _write_once(path, made.value.hex() + "\n")
            with path.open(encoding="ascii") as file:
                mode, text = os.fstat(file.fileno()).st_mode, file.read(4 * _MAX_SECRET_BYTES)
            value = bytes.fromhex(text)
        except (OSError, ValueError) as error:
            raise UsageFault(f"{path} holds no fleet secret: {error}") from None
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise UsageFault(
                f"{path} holds a fleet secret and has mode {stat.S_IMODE(mode):04o};"
                f" only its owner may read it: chmod 600 {path}"
            )
        return cls(value)

    @property
    def id(self) -> str:
        """Public name of the secret, 16 hex digits; tells secrets apart without revealing one."""
        return hashlib.blake2b(key=self.value, digest_size=8, person=_SECRET_ID).hexdigest()

    def __repr__(self) -> str:
        return f"FleetSecret(id={self.id})"


def _write_once(path: Path, text: str) -> None:
    """Make a file of mode 0600, whole and durable, unless somebody else has made it."""
    temporary = path.with_name(f"{path.name}-{secrets.token_hex(8)}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w", encoding="ascii") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink()
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class Keyer:
    """Derives the keys of one model's pages.

    The device index uses one keyer per page size, records one per record size: the page size is in the keys.

    Args:
        fingerprint: identity of the model's required groups.
        secret: the fleet's secret.
        page_tokens: tokens of a page.

    Raises:
        UsageFault: `page_tokens` is below 1.
    """

    def __init__(self, fingerprint: bytes, secret: FleetSecret, page_tokens: int) -> None:
        if not 1 <= page_tokens <= MAX_TOKEN_ID:
            raise UsageFault(f"page_tokens is {page_tokens}; allowed is 1 or more")
        self.fingerprint = bytes(fingerprint)
        self.page_tokens = page_tokens
        self.secret_id = secret.id
        self._secret = secret

    def chain(
        self,
        tokens: TokenIds,
        scope: Scope,
        *,
        extras: Mapping[int, bytes] | None = None,
        parent: npt.NDArray[np.uint64] | None = None,
    ) -> PageKeys:
        """Keys of the full pages of `tokens`; a partial last page is left out.

        Args:
            tokens: token ids, from a page boundary on.
            scope: who may share the pages.
            extras: extra identity of single pages, by number of the page within `tokens`.
            parent: key [2] of the page before `tokens`; None: they start the sequence.

        Returns:
            uint64 [len(tokens) // page_tokens, 2].

        Raises:
            UsageFault: a token id is negative or above 2^32 - 1 (D5), or an extra names no full page.
        """
        words, step, count = _as_words(tokens)
        out = np.empty((count // self.page_tokens, 2), np.uint64)
        flags, digests = self._extras(extras, len(out))
        hash_pages(words, step, self.page_tokens, _PAGE, self._state(scope, parent), flags, digests, out)
        return out

    def extend(
        self,
        parent: npt.NDArray[np.uint64],
        tokens: TokenIds,
        scope: Scope,
        *,
        extras: Mapping[int, bytes] | None = None,
    ) -> PageKeys:
        """Keys of the full pages of `tokens` that follow the page named `parent` (uint64 [2])."""
        return self.chain(tokens, scope, extras=extras, parent=parent)

    def partial(
        self,
        parent: npt.NDArray[np.uint64] | None,
        tokens: TokenIds,
        scope: Scope,
        *,
        committed_tokens: int,
        anchor: int | None,
        extra: bytes | None = None,
    ) -> npt.NDArray[np.uint64]:
        """Name of an incomplete last page; never equal to the name of a natural page (D7).

        Args:
            parent: key of the page before it; None: it is the first.
            tokens: its tokens, 1 to page_tokens of them.
            scope: who may share it.
            committed_tokens: length of the whole sequence whose state is complete.
            anchor: the token sampled after it, if any.
            extra: extra identity, such as a media digest.

        Returns:
            uint64 [2].

        Raises:
            UsageFault: a token or the anchor is out of range (D5), or the lengths disagree.
        """
        words, step, count = _as_words(tokens)
        if not 1 <= count <= self.page_tokens:
            raise UsageFault(f"a partial page has 1 to {self.page_tokens} tokens, this has {count}")
        token_array([] if anchor is None else [anchor])
        if committed_tokens % self.page_tokens != count % self.page_tokens:
            raise UsageFault(f"{count} tokens cannot end a sequence of {committed_tokens}")
        encoded = _encode(
            struct.pack("<Q", committed_tokens),
            None if anchor is None else struct.pack("<Q", anchor),
            extra,
        )
        out = np.empty((1, 2), np.uint64)
        flags, digests = self._extras({0: _PARTIAL_EXTRA + encoded}, 1)
        hash_pages(words, step, count, _PARTIAL, self._state(scope, parent), flags, digests, out)
        return out.reshape(2)

    def scope_tag(self, scope: Scope) -> str:
        """Public name of a scope for events: empty for the open one, else 16 hex digits that hide it (D4)."""
        fields = (scope.lora, scope.lora_revision, scope.salt)
        if fields == (None, None, None):
            return ""
        encoded = _encode(*(None if text is None else _utf8(text) for text in fields))
        key = self._secret.value
        return hashlib.blake2b(encoded, key=key, digest_size=8, person=_SCOPE_TAG).hexdigest()

    def _state(self, scope: Scope, parent: npt.NDArray[np.uint64] | None) -> npt.NDArray[np.uint64]:
        """SipHash key of a scope and parent of the first page, uint64 [4]."""
        encoded = _encode(
            struct.pack("<I", KEY_FORMAT),
            self.fingerprint,
            bytes.fromhex(self.secret_id),
            struct.pack("<Q", self.page_tokens),
            *(
                None if text is None else _utf8(text)
                for text in (scope.lora, scope.lora_revision, scope.salt)
            ),
        )
        digest = hashlib.blake2b(encoded, key=self._secret.value, digest_size=32, person=_CONTEXT).digest()
        state = np.frombuffer(digest, "<u8").astype(np.uint64)
        if parent is not None:
            state[2:] = parent
        return state

    def _extras(
        self, extras: Mapping[int, bytes] | None, pages: int
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint64]]:
        """Which pages have extra identity, uint8 [pages] or [0], and its digests, uint64 [pages, 2]."""
        if not extras:
            return np.zeros(0, np.uint8), np.zeros((0, 2), np.uint64)
        wrong = sorted(page for page in extras if not 0 <= page < pages)
        if wrong:
            raise UsageFault(f"extras name pages {wrong[:_NAMED_FAULTS]}; there are {pages} full pages")
        flags = np.zeros(pages, np.uint8)
        digests = np.zeros((pages, 2), np.uint64)
        for page, identity in extras.items():
            raw = hashlib.blake2b(identity, key=self._secret.value, digest_size=16, person=_EXTRA).digest()
            flags[page] = 1
            digests[page] = np.frombuffer(raw, "<u8")
        return flags, digests


def token_array(tokens: TokenIds) -> npt.NDArray[np.integer[Any]]:
    """The tokens as a one-dimensional integer array, checked (D5); arrays are not copied.

    Raises:
        UsageFault: not a flat integer sequence, or ids outside 0 .. 2^32 - 1; names the positions.
    """
    if isinstance(tokens, np.ndarray):
        _check_array(tokens)
        return tokens
    if isinstance(tokens, str | bytes | bytearray | memoryview) or not isinstance(tokens, Sequence):
        raise UsageFault(f"token ids are a flat integer sequence, not a {type(tokens).__name__}")
    try:
        made = np.frombuffer(array("q", tokens), np.int64)
    except OverflowError:
        _refuse_ids(enumerate(tokens))
    except TypeError as error:
        raise UsageFault(f"token ids are integers: {error}") from None
    truths = [at for at in np.flatnonzero(made <= 1).tolist() if isinstance(tokens[at], bool)]
    if truths:
        raise UsageFault(f"token ids are integers, not booleans; found some at {truths[:_NAMED_FAULTS]}")
    _check_array(made)
    return made


def _check_array(tokens: npt.NDArray[Any]) -> None:
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise UsageFault(f"token ids are a flat integer sequence, not {tokens.dtype} {list(tokens.shape)}")
    if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) > MAX_TOKEN_ID):
        bad = np.flatnonzero((tokens < 0) | (tokens > MAX_TOKEN_ID))
        _refuse_ids(zip(bad.tolist(), tokens[bad].tolist(), strict=True))


def _refuse_ids(ids: Iterable[tuple[int, int]]) -> NoReturn:
    bad = [f"{token} at position {at}" for at, token in ids if not 0 <= token <= MAX_TOKEN_ID]
    more = f" and {len(bad) - _NAMED_FAULTS} more" if len(bad) > _NAMED_FAULTS else ""
    raise UsageFault(f"token ids lie in 0 .. {MAX_TOKEN_ID}; found {', '.join(bad[:_NAMED_FAULTS])}{more}")


def _as_words(tokens: TokenIds) -> tuple[npt.NDArray[np.uint32], int, int]:
    """Tokens as 32-bit words: (words, words per token, token count), in place where the layout allows."""
    checked = token_array(tokens)
    width = checked.dtype.itemsize
    if width not in (4, 8) or sys.byteorder != "little" or not checked.dtype.isnative:
        checked = checked.astype(np.uint32)
        width = 4
    if not (checked.flags.c_contiguous and checked.flags.writeable):
        checked = checked.copy()  # kernels are compiled for writable contiguous arrays only
    return checked.view(np.uint32), width // 4, len(checked)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _encode(*fields: bytes | None) -> bytes:
    """Injective: each field carries its number, whether it is present, and its length (D2)."""
    parts = []
    for number, value in enumerate(fields):
        parts.append(struct.pack("<BBQ", number, value is not None, len(value or b"")))
        parts.append(value or b"")
    return b"".join(parts)

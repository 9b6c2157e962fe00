"""A tier that is wrong on purpose, in one way at a time, about one record."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np

from kvcontract.core.pending import Pending
from kvcontract.tiers.base import Buffers, Capabilities, Code, Codes, Lease, Op, RecordKeys, Rows, key_bytes
from kvcontract.tiers.dram import DramTier
from kvcontract.tiers.frame import FrameHeader, decode, encode

_HEADER_BYTE: Final = 40  # inside the record key

LENDING: Final = frozenset({"borrow", "reserve"})

Piece = tuple[int, int]


class DamagedTier:
    """A DRAM tier, and one thing that is wrong with what it hands out.

    Args:
        inner: holds the records, which stay whole.
        damage: ``kind``; ``part``, the number of the part whose records it is about; and ``page``, the place
            in the first look-up of the record that is meant.  None: nothing is wrong.
        claims: capabilities that are stated beside those of the inner tier.
    """

    def __init__(self, inner: DramTier, damage: dict[str, Any] | None, claims: dict[str, Any]) -> None:
        self._inner = inner
        self._damage = damage
        self._claims = claims
        self._target: bytes | None = None
        self._asked: WeakKeyDictionary[Lease, list[bytes]] = WeakKeyDictionary()
        self._held: list[Callable[[], None]] = []

    def __getattr__(self, name: str) -> Any:
        if name in LENDING:  # what is lent is read where it lies, past everything that is damaged here
            raise AttributeError(name)
        return getattr(self._inner, name)

    @property
    def capabilities(self) -> Capabilities:
        """Those of the inner tier, and what else it claims."""
        return replace(self._inner.capabilities, **self._claims)

    @property
    def _kind(self) -> str | None:
        return None if self._damage is None else str(self._damage["kind"])

    def mend(self) -> None:
        """Be whole from now on, and answer what was not answered."""
        self._damage = None
        held, self._held = self._held, []
        for settle in held:
            settle()

    def lookup(self, keys: RecordKeys, deadline: float) -> Pending[Lease]:
        """The inner answer, unless look-ups are what is damaged."""
        answer, names = self._inner.lookup(keys, deadline), key_bytes(keys)
        if self._damage is None or not len(keys) or keys["part"][0] != self._damage["part"]:
            return answer
        kind = self._kind
        if kind == "lookup raises":
            answer.on_done(Lease.release)
            raise OSError("the tier is gone")
        if self._target is None and len(names) > self._damage["page"]:
            self._target = names[self._damage["page"]]
        if kind == "lookup is silent":
            late: Pending[Lease] = Pending()
            self._held.append(lambda: answer.on_done(late.settle))
            return late
        return answer.map(lambda lease: self._leased(lease, names))

    def _leased(self, lease: Lease, names: list[bytes]) -> Lease:
        change = {"presence too long": 1, "presence too short": -1}.get(str(self._kind), 0)
        if change:
            present = np.ones(len(names) + change, np.bool_)
            lease = Lease(lease.tier, present, receipt=lease.receipt, release=lease.release)
        self._asked[lease] = names
        return lease

    def load(self, lease: Lease, rows: Rows, buffers: Buffers, deadline: float) -> Op:
        """The inner records, of which one is damaged on its way."""
        names = self._asked.get(lease)
        if names is None or self._kind is None:
            return self._inner.load(lease, rows, buffers, deadline)
        if self._kind == "load raises":
            raise OSError("the tier is gone")
        if self._kind == "load is silent":
            late: Op = Pending()
            failed = np.full(len(rows), Code.FAILED, np.uint8)
            self._held.append(lambda: late.settle(failed))
            return late
        wanted = [names[row] for row in rows.tolist()]
        op = self._inner.load(lease, rows, buffers, math.inf)
        if self._target not in wanted:
            return op
        at, kind = wanted.index(self._target), str(self._kind)
        return op.map(lambda codes: _damaged(kind, at, buffers.pieces(), codes.copy()))


def _damaged(kind: str, at: int, records: list[list[Piece]], codes: Codes) -> Codes:
    """Change record `at` where it landed, or its code."""
    match kind:
        case "record is lost":
            codes[at] = Code.MISS
        case "load fails":
            codes[at] = Code.FAILED
        case "payload bit flipped":
            _flip(records[at][-1], -1)
        case "header byte flipped":
            _flip(records[at][0], _HEADER_BYTE)
        case "two records swapped":
            for one, other in zip(records[at], records[at + 1], strict=True):
                mine, theirs = ctypes.string_at(*one), ctypes.string_at(*other)
                ctypes.memmove(one[0], theirs, len(theirs))
                ctypes.memmove(other[0], mine, len(mine))
        case "record of another model":
            _sign_as_another(records[at][0])
    return codes


def _flip(piece: Piece, at: int) -> None:
    address, size = piece
    spot = (ctypes.c_uint8 * size).from_address(address)
    spot[at % size] ^= 1


def _sign_as_another(piece: Piece) -> None:
    """A frame whose every sum is right, of a record that another model wrote."""
    address, size = piece
    header = decode(ctypes.string_at(address, size))
    if isinstance(header, FrameHeader):
        other = bytes(byte ^ 1 for byte in header.fingerprint)
        sizes, sums = zip(*header.segments, strict=True)
        ctypes.memmove(address, encode(other, header.key, sizes, sums), size)

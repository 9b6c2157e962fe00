"""What a row must hold: a pure function of the tokens up to it, so that any page can be judged by itself.

The model behind the store's checks is no more than this: whoever computed a prefix, on whatever page, through
whichever tier it came, its rows hold these bytes.  A wrong row is told by whose value was found in its place.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvcontract.contract.dtypes import DTYPE_BITS
from kvcontract.contract.layout import with_page_tokens
from kvcontract.contract.model import TOKEN_AXIS, KvModel

Image = NDArray[np.uint8]

POISON: Final = 0xA5
"""What device memory is overwritten with once nothing in it is needed."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """One field's part of a row: bytes [first, end), written at every `per`-th token."""

    what: str
    first: int
    end: int
    per: int


@dataclass(frozen=True, slots=True)
class _Made:
    """A row that was asked for: of which token, in which scope."""

    at: int
    whose: str
    row: Image


class Content:
    """The rows of one declaration.

    Args:
        model: the declaration; paged groups.

    Attributes:
        row_bytes: of one token over all arenas, fields side by side in declared order.
    """

    def __init__(self, model: KvModel) -> None:
        self._pieces: list[_Piece] = []
        end = 0
        for arena in model.arenas:
            for field in arena.fields:
                elements = math.prod(size for axis, size in field.axes.items() if axis != TOKEN_AXIS)
                first, end = end, end + elements * DTYPE_BITS[field.dtype] // 8
                where = arena.name if arena.layer is None else f"layer {arena.layer}"
                self._pieces.append(_Piece(f"{where} {field.name}", first, end, arena.tokens_per_row))
        self.row_bytes = end
        self._made: dict[bytes, _Made] = {}

    def rows(self, tokens: Sequence[int], first: int = 0, end: int | None = None, whose: str = "") -> Image:
        """uint8[end - first, row_bytes]: what tokens first .. end leave; `whose` names the scope."""
        states = _states(tokens[:end], whose)
        found = [self._row(state, at, whose) for at, state in enumerate(states) if at >= first]
        return np.stack(found) if found else np.zeros((0, self.row_bytes), np.uint8)

    def _row(self, state: bytes, at: int, whose: str) -> Image:
        if state not in self._made:
            generator = np.random.Generator(np.random.PCG64(int.from_bytes(state, "little")))
            self._made[state] = _Made(at, whose, np.frombuffer(generator.bytes(self.row_bytes), np.uint8))
        return self._made[state].row

    def wrong(self, found: Image, tokens: Sequence[int], first: int = 0, whose: str = "") -> str | None:
        """What is wrong with rows first, first + 1, ... of these tokens, decoded; None if nothing is."""
        wanted = self.rows(tokens, first, first + len(found), whose)
        for at, (row, right) in enumerate(zip(found, wanted, strict=True), first):
            for piece in self._pieces:
                mine = slice(piece.first, piece.end)
                if (at + 1) % piece.per == 0 and not np.array_equal(row[mine], right[mine]):
                    what = self._decode(row[mine], piece, set(_states(tokens, whose)))
                    return f"token {at}, {piece.what}: found {what}"
        return None

    def _decode(self, found: Image, at: _Piece, own: set[bytes]) -> str:
        if (found == POISON).all():
            return "the poison that device memory was overwritten with"
        for state, made in self._made.items():
            for piece in (at, *self._pieces):
                if np.array_equal(made.row[piece.first : piece.end], found):
                    place = "" if piece is at else f", {piece.what}"
                    prompt = "this prompt" if state in own else f"another prompt in scope ({made.whose})"
                    return f"the value of token {made.at}{place} of {prompt}"
        return "bytes that belong nowhere: " + found[:8].tobytes().hex(" ")


def _states(tokens: Sequence[int], whose: str) -> Iterator[bytes]:
    """A digest of all tokens so far, after each."""
    state = hashlib.blake2b(whose.encode(), digest_size=16).digest()
    for token in tokens:
        state = hashlib.blake2b(state + int(token).to_bytes(8, "little"), digest_size=16).digest()
        yield state


def trimmed(model: KvModel, page_tokens: int, limit_bytes: int, key_tokens: int | None = None) -> KvModel:
    """The declaration at other sizes of pages and records, with arenas for `limit_bytes` a token.

    At least one arena of each group stays; a conversion does not: it has clauses of its own and may round.
    """
    taken, groups, total = [], set(), 0
    for arena in model.arenas:
        size = Content(model.model_copy(update={"arenas": (arena,)})).row_bytes
        if arena.group not in groups or total + size <= limit_bytes:
            taken.append(arena)
            groups.add(arena.group)
            total += size
    names = {arena.name for arena in taken}
    left = {arena.name for arena in model.arenas} - names
    places = {(arena.group, arena.layer) for arena in taken if arena.layer is not None}
    repack = model.repack
    if repack is not None:
        kept = tuple(
            arena
            for arena in repack.arenas
            if arena.name in names or (arena.name not in left and (arena.group, arena.layer) in places)
        )
        derived = repack.conversion == "derived"
        repack = repack.model_copy(update={"arenas": kept}) if derived else None
    update = {"arenas": tuple(taken), "repack": repack}
    return with_page_tokens(model.model_copy(update=update), page_tokens, key_tokens)


def page_sizes(model: KvModel, sizes: Sequence[int]) -> tuple[int, ...]:
    """Page sizes near those asked for that hold whole rows of every arena."""
    step = math.lcm(*(arena.tokens_per_row for arena in model.arenas))
    return tuple(dict.fromkeys(-(-size // step) * step for size in sizes))

"""What a row or a state must hold: a pure function of the tokens up to it, so that each is judged by itself.

The model behind the store's checks is no more than this: whoever computed a prefix, on whatever page, through
whichever tier it came, its rows hold these bytes, and so does the slot that is rewritten at each token.  A
wrong row is told by whose value was found in its place.
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
from kvcontract.contract.layout import space_key, with_page_tokens
from kvcontract.contract.model import TOKEN_AXIS, Full, KvModel, Window

Image = NDArray[np.uint8]

POISON: Final = 0xA5
"""What device memory is overwritten with once nothing in it is needed."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """One field's part of a row, or of a state: bytes [first, end) among all, [begin, ...) in its space.

    A row is written at every `per`-th token.
    """

    what: str
    space: str
    first: int
    end: int
    begin: int
    per: int

    @property
    def inside(self) -> slice:
        """Where it lies in what one space keeps."""
        return slice(self.begin, self.begin + self.end - self.first)


@dataclass(frozen=True, slots=True)
class _Made:
    """A row or state that was asked for: after which token, in which scope."""

    at: int
    whose: str
    bytes_: Image


class Content:
    """The rows and states of one declaration.

    Args:
        model: the declaration.

    Attributes:
        row_bytes: of one token over all paged arenas, fields side by side in declared order.
        state_bytes: of one request over all bounded arenas, likewise.
        windows: keys of the paged spaces beside the full one.
    """

    def __init__(self, model: KvModel) -> None:
        groups = {group.name: group for group in model.groups}
        ends = {"paged": 0, "bounded": 0}
        sizes: dict[str, int] = {}
        self._pieces: list[_Piece] = []
        self._parts: list[_Piece] = []
        for arena in model.arenas:
            group = groups[arena.group]
            key = space_key(group)
            for field in arena.fields:
                elements = math.prod(size for axis, size in field.axes.items() if axis != TOKEN_AXIS)
                size = elements * DTYPE_BITS[field.dtype] // 8
                first, begin = ends[group.kind], sizes.get(key, 0)
                ends[group.kind], sizes[key] = first + size, begin + size
                where = arena.name if arena.layer is None else f"layer {arena.layer}"
                pieces = self._pieces if group.kind == "paged" else self._parts
                what = f"{where} {field.name}"
                pieces.append(_Piece(what, key, first, first + size, begin, arena.tokens_per_row))
        self.row_bytes, self.state_bytes = ends["paged"], ends["bounded"]
        self.windows = tuple(dict.fromkeys(p.space for p in self._pieces if p.space != Full().key))
        self._rows: dict[bytes, _Made] = {}
        self._states: dict[bytes, _Made] = {}

    def rows(self, tokens: Sequence[int], first: int = 0, end: int | None = None, whose: str = "") -> Image:
        """uint8[end - first, row_bytes]: what tokens first .. end leave; `whose` names the scope."""
        states = _digests(tokens[:end], whose)
        found = [
            _made(self._rows, state, at, whose, self.row_bytes)
            for at, state in enumerate(states)
            if at >= first
        ]
        return np.stack(found) if found else np.zeros((0, self.row_bytes), np.uint8)

    def state(self, tokens: Sequence[int], end: int, whose: str = "") -> Image:
        """uint8[state_bytes]: what is rewritten at each token, after tokens 0 .. end - 1."""
        *_, last = _digests(tokens[:end], whose)
        return _made(self._states, last, end - 1, whose, self.state_bytes)

    def wrong(
        self,
        found: Image,
        tokens: Sequence[int],
        first: int = 0,
        whose: str = "",
        space: str = Full().key,
    ) -> str | None:
        """What is wrong with rows first, first + 1, ... of these tokens, decoded; None if nothing is.

        Args:
            found: uint8[n, bytes of a row in the space].
            tokens: whose rows they are.
            first: position of the first.
            whose: names the scope.
            space: key of the paged space they are of.
        """
        wanted = self.rows(tokens, first, first + len(found), whose)
        pieces = [piece for piece in self._pieces if piece.space == space]
        for at, (row, right) in enumerate(zip(found, wanted, strict=True), first):
            for piece in pieces:
                mine = row[piece.inside]
                if (at + 1) % piece.per == 0 and not np.array_equal(mine, right[piece.first : piece.end]):
                    what = self._decode(mine, piece, set(_digests(tokens, whose)))
                    return f"token {at}, {piece.what}: found {what}"
        return None

    def wrong_state(self, found: Image, tokens: Sequence[int], end: int, whose: str = "") -> str | None:
        """What is wrong with a state after `end` tokens, decoded; None if nothing is."""
        wanted = self.state(tokens, end, whose)
        for piece in self._parts:
            mine = found[piece.first : piece.end]
            if not np.array_equal(mine, wanted[piece.first : piece.end]):
                what = self._decode(mine, piece, set(_digests(tokens, whose)))
                return f"the state after {end} tokens, {piece.what}: found {what}"
        return None

    def _decode(self, found: Image, at: _Piece, own: set[bytes]) -> str:
        if (found == POISON).all():
            return "the poison that device memory was overwritten with"
        for name, made, pieces in (
            ("the value of", self._rows, self._pieces),
            ("the state after", self._states, self._parts),
        ):
            for state, item in made.items():
                for piece in (at, *pieces) if at in pieces else pieces:
                    if np.array_equal(item.bytes_[piece.first : piece.end], found):
                        place = "" if piece is at else f", {piece.what}"
                        prompt = "this prompt" if state in own else f"another prompt in scope ({item.whose})"
                        return f"{name} token {item.at}{place} of {prompt}"
        return "bytes that belong nowhere: " + found[:8].tobytes().hex(" ")


def _made(kept: dict[bytes, _Made], state: bytes, at: int, whose: str, size: int) -> Image:
    if state not in kept:
        # Rows and states of one position differ, whatever their sizes.
        generator = np.random.Generator(np.random.PCG64([int.from_bytes(state, "little"), size]))
        kept[state] = _Made(at, whose, np.frombuffer(generator.bytes(size), np.uint8))
    return kept[state].bytes_


def _digests(tokens: Sequence[int], whose: str) -> Iterator[bytes]:
    """A digest of all tokens so far, after each."""
    state = hashlib.blake2b(whose.encode(), digest_size=16).digest()
    for token in tokens:
        state = hashlib.blake2b(state + int(token).to_bytes(8, "little"), digest_size=16).digest()
        yield state


def trimmed(
    model: KvModel,
    page_tokens: int,
    limit_bytes: int,
    key_tokens: int | None = None,
    boundary_tokens: int | None = None,
) -> KvModel:
    """The declaration at other sizes of pages and records, with arenas for `limit_bytes` a token.

    As much is left of what a slot keeps.  At least one arena of each group stays, two of a bounded one; a
    conversion does not: it has clauses of its own and may round.  What is read back, and where a state may be
    taken, is cut to a few pages.

    Args:
        model: the declaration.
        page_tokens: tokens of a page.
        limit_bytes: see above.
        key_tokens: of a record; None: a page.
        boundary_tokens: states may be taken at multiples of this; None: of a page.
    """
    model = _near(model, page_tokens, boundary_tokens or page_tokens)
    least = {group.name: 2 if group.kind == "bounded" else 1 for group in model.groups}
    taken, total = [], 0
    for arena in model.arenas:
        content = Content(model.model_copy(update={"arenas": (arena,)}))
        size = content.row_bytes + content.state_bytes
        if least[arena.group] > 0 or total + size <= limit_bytes:
            taken.append(arena)
            least[arena.group] -= 1
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


def _near(model: KvModel, page_tokens: int, boundary_tokens: int) -> KvModel:
    """The same kinds of groups over a few pages: windows and chunks, each as different as it was."""
    reaches = sorted({group.reach.key for group in model.groups if not isinstance(group.reach, Full)})
    groups = []
    for group in model.groups:
        reach = group.reach
        if not isinstance(reach, Full):
            few = page_tokens + page_tokens // 2 + 2 + reaches.index(reach.key)
            tokens = min(reach.tokens, few if isinstance(reach, Window) else few + page_tokens)
            reach = reach.model_copy(update={"tokens": tokens})
        cut = {} if group.boundary_tokens is None else {"boundary_tokens": boundary_tokens}
        groups.append(group.model_copy(update={"reach": reach, **cut}))
    return model.model_copy(update={"groups": tuple(groups)})


def page_sizes(model: KvModel, sizes: Sequence[int]) -> tuple[int, ...]:
    """Page sizes near those asked for that hold whole rows of every arena."""
    step = math.lcm(*(arena.tokens_per_row for arena in model.arenas))
    return tuple(dict.fromkeys(-(-size // step) * step for size in sizes))


def never_restored(model: KvModel) -> KvModel:
    """The same declaration with its last group never restored, so that no prefix can be reused."""
    *others, last = model.groups
    return model.model_copy(update={"groups": (*others, last.model_copy(update={"restore": "never"}))})

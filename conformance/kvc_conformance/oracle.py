"""Position-coded data, and where every byte of it must lie: slow, obvious, sharing no code with the runtime.

Every element of every field gets a serial number.  Bytes are written out in memory order by walking the
declaration, never by multiplying strides.  Where an element is too narrow for its number, several passes
carry one digit each, so that a wrong byte *decodes to where it came from*.

A digit is not written as it is but spread over all bits by an odd factor, and every pass runs once more with
all bits inverted: each bit of each element is 0 once and 1 once, so that one who loses a sign, or the last
bit, is found out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvc_conformance.nan import NAN_BITS, is_nan
from kvcontract.contract.dtypes import DTYPE_BITS
from kvcontract.contract.errors import InternalFault
from kvcontract.contract.model import Arena, Field, KvModel

Serials = NDArray[np.int64]
Image = NDArray[np.uint8]

PADDING = -1
"""Serial number of a byte that belongs to no element."""

FieldName = tuple[str, str]

ODD: Final = 0x9E3779B97F4A7C15
"""The factor that spreads a digit: odd, so that it can be undone at every width."""


@dataclass(frozen=True, slots=True)
class Located:
    """Where an element is, in the author's terms."""

    arena: str
    field: str
    layer: int | None
    unit: str
    block: int
    at: dict[str, int]

    def __str__(self) -> str:
        layer = "" if self.layer is None else f"layer {self.layer} "
        spot = " ".join(f"{axis} {index}" for axis, index in self.at.items())
        return f"{layer}{self.field.upper()} {self.unit} {self.block} {spot}"


@dataclass(frozen=True, slots=True)
class _Entry:
    arena: Arena
    field: Field
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    width: int
    first: int


class Fill:
    """Serial numbers for some blocks of a model's device arenas.

    Args:
        model: the declaration.
        blocks: how many blocks of each space are filled.
    """

    def __init__(self, model: KvModel, blocks: int) -> None:
        self.model = model
        self.blocks = blocks
        self._entries: dict[FieldName, _Entry] = {}
        self._paged = {group.name for group in model.groups if group.kind == "paged"}
        count = 1  # so that untouched zeros are nobody's value
        for arena in model.arenas:
            rows = model.page_tokens // arena.tokens_per_row if arena.group in self._paged else None
            for field in arena.fields:
                axes, shape, width = _shape(field, rows)
                entry = _Entry(arena, field, axes, shape, width, count)
                self._entries[arena.name, field.name] = entry
                count += blocks * _count(shape)
        self.count = count
        self._first = np.array([entry.first for entry in self._entries.values()])
        self._bits = np.array([_code_bits(entry.field) for entry in self._entries.values()], np.uint64)

    @property
    def digits(self) -> int:
        """Passes after which every element of every field has told its whole number."""
        return -(-self.count.bit_length() // int(self._bits.min()))

    @property
    def passes(self) -> int:
        """The same, and each once more with all bits inverted."""
        return 2 * self.digits

    def codes(self, serials: Serials, number: int) -> NDArray[np.uint64]:
        """uint64[...]: what the elements of these numbers hold in pass `number`."""
        inverted, digit = divmod(number, self.digits)
        bits = self._bits[self.owners(serials)]
        mask = ~np.uint64(0) >> (np.uint64(64) - bits)
        shift = np.minimum(bits * np.uint64(digit), np.uint64(63))  # numbers are far below 2**63
        code = ((serials.astype(np.uint64) >> shift & mask) * np.uint64(ODD)) & mask
        found: NDArray[np.uint64] = code ^ mask if inverted else code
        return found

    def image(self, name: FieldName, serials: Serials, number: int) -> Image:
        """uint8[..., width]: elements of a field as they lie in memory, little endian."""
        return _little_endian(self.codes(serials, number), self.width(name))

    def serials(self, name: FieldName) -> Serials:
        """int64[blocks, *axes]: the numbers of one field, `token` where the field has it."""
        entry = self._entries[name]
        span = self.blocks * _count(entry.shape)
        return np.arange(entry.first, entry.first + span).reshape(self.blocks, *entry.shape)

    def is_paged(self, arena: Arena) -> bool:
        """Whether it has rows of tokens, or slots."""
        return arena.group in self._paged

    def fields(self) -> Iterator[FieldName]:
        """Every (arena, field), in declared order."""
        yield from self._entries

    def group(self, name: FieldName) -> str:
        """The group of a field."""
        return self._entries[name].arena.group

    def width(self, name: FieldName) -> int:
        """Bytes of an element."""
        return self._entries[name].width

    def where(self, serial: int) -> Located | None:
        """Whose number it is; None if nobody's."""
        entry = self.entry(serial)
        if entry is None:
            return None
        block, rest = divmod(serial - entry.first, _count(entry.shape))
        spot = np.unravel_index(rest, entry.shape)
        at = {axis: int(index) for axis, index in zip(entry.axes, spot, strict=True)}
        unit = "page" if entry.arena.group in self._paged else "slot"
        return Located(entry.arena.name, entry.field.name, entry.arena.layer, unit, block, at)

    def entry(self, serial: int) -> _Entry | None:
        """The field whose number it is; None if nobody's."""
        if not 0 < serial < self.count:
            return None
        return list(self._entries.values())[int(self.owners(np.array(serial)))]

    def owners(self, serials: Serials) -> NDArray[np.int64]:
        """int64[...]: for each number of an element, that of its field, see `field`."""
        found: NDArray[np.int64] = np.searchsorted(self._first, serials, side="right") - 1
        return found

    def field(self, number: int) -> Field:
        """The field of a number, in declared order."""
        return list(self._entries.values())[number].field

    def decode(self, codes: list[int], bits: int) -> int:
        """The number that codes of all passes tell; 0, nobody's, where they contradict one another."""
        mask = (1 << bits) - 1
        undo = pow(ODD, -1, 1 << bits)
        plain, inverted = codes[: self.digits], codes[self.digits :]
        if any(one ^ other != mask for one, other in zip(plain, inverted, strict=True)):
            return 0
        return sum(((code * undo) & mask) << (bits * digit) for digit, code in enumerate(plain))


def _code_bits(field: Field) -> int:
    """Bits that a number may be spread over: all of an element's, but a bool is 0 or 1."""
    return 1 if field.dtype == "bool" else max(8, DTYPE_BITS[field.dtype])


def _little_endian(codes: NDArray[np.uint64], width: int) -> Image:
    parts = [(codes >> np.uint64(8 * byte)) & np.uint64(255) for byte in range(width)]
    return np.stack(parts, axis=-1).astype(np.uint8)


@dataclass(frozen=True, slots=True)
class Map:
    """Which element each byte of some memory belongs to.

    Attributes:
        serial: int64[bytes], `PADDING` for none.
        byte: uint8[bytes], which byte of the element.
        width: uint8[bytes], bytes of the element.
    """

    serial: Serials
    byte: Image
    width: Image

    def expected(self, fill: Fill, number: int) -> Image:
        """uint8[bytes] of pass `number`; padding is 0 here and nobody's business."""
        out = np.zeros(len(self.serial), np.uint8)
        mine = self.content
        shift = self.byte[mine].astype(np.uint64) * np.uint64(8)
        out[mine] = (fill.codes(self.serial[mine], number) >> shift & np.uint64(255)).astype(np.uint8)
        return out

    def only(self, fill: Fill, groups: Collection[str]) -> Map:
        """The same, what belongs to other groups being padding."""
        taken = [number for number, name in enumerate(fill.fields()) if fill.group(name) in groups]
        kept = np.isin(fill.owners(self.serial), taken)
        return Map(np.where(kept, self.serial, PADDING), self.byte, self.width)

    @property
    def content(self) -> NDArray[np.bool_]:
        """bool[bytes]: what belongs to some element."""
        content: NDArray[np.bool_] = self.serial != PADDING
        return content


def device_map(fill: Fill, groups: Collection[str], block: int, worker: int = 0, tp: int = 1) -> Map:
    """One page-first block of a worker: arenas in declared order, aligned; padding at the end.

    Args:
        fill: whose numbers they are.
        groups: all that share its range of block ids.
        block: of that range.
        worker: whose.
        tp: of so many.
    """
    arenas = _of(fill.model.arenas, groups)
    chunks: list[Map] = []
    length = 0
    for arena in arenas:
        gap = -length % arena.align_bytes
        held = {field.name: _held(fill, arena, field, block, worker, tp) for field in arena.fields}
        chunks += [_padding(gap), _arena_map(arena, held)]
        length += gap + len(chunks[-1].serial)
    steps = [step for arena in arenas for step in (arena.stride_multiple_bytes, arena.align_bytes)]
    return _join([*chunks, _padding(-length % int(np.lcm.reduce(steps)))])


def side_by_side_map(fill: Fill, groups: Collection[str], block: int) -> Map:
    """Blocks of arenas that are bound one by one (layer-first), concatenated, each with its own padding."""
    chunks: list[Map] = []
    for arena in _of(fill.model.arenas, groups):
        laid = _arena_map(arena, {f.name: fill.serials((arena.name, f.name))[block] for f in arena.fields})
        multiple = int(np.lcm(arena.stride_multiple_bytes, arena.align_bytes))
        chunks += [laid, _padding(-len(laid.serial) % multiple)]
    return _join(chunks)


def content_map(fill: Fill, names: Sequence[FieldName]) -> Map:
    """The fields of one block, one after another, without any padding."""
    return _join([_elements(fill.serials(name)[0], fill.width(name)) for name in names])


def _of(arenas: Sequence[Arena], groups: Collection[str]) -> list[Arena]:
    return [arena for arena in arenas if arena.group in groups]


def _held(fill: Fill, arena: Arena, field: Field, block: int, worker: int, tp: int) -> Serials:
    return cut(fill.serials((arena.name, field.name))[block], field, worker, tp)


def cut(numbers: Serials, field: Field, worker: int, tp: int) -> Serials:
    """The slice of [*axes] that one of `tp` equal owners of the cut axis has."""
    if field.shard_axis is None:
        return numbers
    axes = _axes(field, "token" in field.axes or numbers.ndim > len(field.axes))
    slices: list[Serials] = np.split(numbers, tp, axis=axes.index(field.shard_axis))
    return slices[worker]


def wire_map(fill: Fill, groups: Collection[str], blocks: Sequence[int], shard: int, shards: int) -> Map:
    """One record's payload: dense, in the wire form's order; a cut field's slice, the rest in shard 0.

    The rows of its pages, which lie in `blocks`, follow one another; a slot is a record of its own.
    """
    model = fill.model
    arenas = model.arenas if model.repack is None else model.repack.arenas
    chunks = []
    for arena in _of(arenas, groups):
        taken: dict[str, Serials] = {}
        for field in arena.fields:
            if field.shard_axis is None and shard:
                continue
            taken[field.name] = cut(_stored(fill, arena, field, blocks), field, shard, shards)
        if taken:
            kept = arena.model_copy(update={"fields": tuple(f for f in arena.fields if f.name in taken)})
            chunks.append(_arena_map(kept, taken))
    return _join(chunks)


def _stored(fill: Fill, arena: Arena, field: Field, blocks: Sequence[int]) -> Serials:
    """[*axes]: the numbers of the elements that one field on the wire holds, whatever holds them here."""
    want = _axes(field, fill.is_paged(arena))
    joint = [axis for axis in want if "|" in axis]
    inner = tuple(axis for axis in want if axis not in joint)
    names = joint[0].split("|") if joint else [field.name]
    found = [_turned(*_held_here(fill, arena, name, blocks), inner) for name in names]
    return np.stack(found, axis=want.index(joint[0])) if joint else found[0]


def _held_here(fill: Fill, wire: Arena, name: str, blocks: Sequence[int]) -> tuple[Serials, tuple[str, ...]]:
    """Numbers and axes of a field of the device, which may be one of several that are joined in one."""
    arenas = fill.model.arenas
    near = [a for a in arenas if (a.group, a.layer) == (wire.group, wire.layer) and wire.layer is not None]
    for arena in (*(a for a in arenas if a.name == wire.name), *near):
        for field in arena.fields:
            axes = _axes(field, fill.is_paged(arena))
            pages = [fill.serials((arena.name, field.name))[block] for block in blocks]
            numbers = np.concatenate(pages, axes.index("token")) if "token" in axes else pages[0]
            joint = [axis for axis in axes if "|" in axis]
            names = joint[0].split("|") if joint else [field.name]
            if name in names:
                rest = tuple(axis for axis in axes if axis not in joint)
                return (
                    (np.take(numbers, names.index(name), axes.index(joint[0])), rest)
                    if joint
                    else (numbers, rest)
                )
    raise InternalFault(f"{wire.name}.{name} is nowhere on the device")


def _arena_map(arena: Arena, numbers: dict[str, Serials]) -> Map:
    """Walk one block in memory order."""
    if arena.arrangement == "planes":
        return _join([_elements(numbers[f.name], _width(f)) for f in arena.fields])
    one, first = arena.fields[0], next(iter(numbers.values()))
    if "token" not in one.axes and first.ndim == len(one.axes):  # a slot: all fields of its one row
        return _join([_elements(numbers[field.name], _width(field)) for field in arena.fields])
    rows = first.shape[0]
    walk = [
        _elements(numbers[field.name][row], _width(field)) for row in range(rows) for field in arena.fields
    ]
    return _join(walk)


def _elements(numbers: Serials, width: int) -> Map:
    flat = numbers.reshape(-1)
    return Map(
        np.repeat(flat, width),
        np.tile(np.arange(width, dtype=np.uint8), len(flat)),
        np.full(len(flat) * width, width, np.uint8),
    )


def _padding(count: int) -> Map:
    return Map(np.full(count, PADDING), np.zeros(count, np.uint8), np.ones(count, np.uint8))


def _join(maps: list[Map]) -> Map:
    return Map(
        np.concatenate([item.serial for item in maps]),
        np.concatenate([item.byte for item in maps]),
        np.concatenate([item.width for item in maps]),
    )


def _axes(field: Field, paged: bool) -> tuple[str, ...]:
    return tuple(field.axes) if "token" in field.axes or not paged else ("token", *field.axes)


def _shape(field: Field, rows: int | None) -> tuple[tuple[str, ...], tuple[int, ...], int]:
    axes = _axes(field, rows is not None)
    shape = [rows if axis == "token" and rows else field.axes[axis] for axis in axes]
    bits = DTYPE_BITS[field.dtype]
    if bits < 8:  # noqa: PLR2004 - two or more elements share a byte: the last axis counts bytes
        shape[-1] = shape[-1] * bits // 8
    return axes, tuple(shape), _width(field)


def _width(field: Field) -> int:
    """Bytes of an element, or of two that share one."""
    return max(1, DTYPE_BITS[field.dtype] // 8)


def _turned(numbers: Serials, have: tuple[str, ...], want: tuple[str, ...]) -> Serials:
    return np.transpose(numbers, [have.index(axis) for axis in want])


def _count(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape))


def compare(found: list[Image], where: Map, fill: Fill, *, nan_is_nan: bool = False) -> str | None:
    """Compare memory with what must lie there, over all passes.

    Args:
        found: per pass, uint8[bytes].
        where: which element each byte belongs to.
        fill: whose numbers they are.
        nan_is_nan: a NaN may come back as another NaN: what computes with values need not keep its payload.

    Returns:
        None if every content byte is right, else the first difference, decoded, and how many there are.
    """
    wrong = np.zeros(len(where.serial), np.bool_)
    for number, image in enumerate(found):
        if len(image) != len(where.serial):
            return f"{len(image):,} B were found where {len(where.serial):,} B belong"
        expected = where.expected(fill, number)
        differs = (image != expected) & where.content
        if nan_is_nan and differs.any():
            differs = _but_nan(differs, image, expected, where, fill)
        wrong |= differs
    if not wrong.any():
        return None
    first = int(np.flatnonzero(wrong)[0])
    elements = len(np.unique(where.serial[wrong]))
    return f"{_told(found, first, where, fill)} ({elements:,} element(s) of the page are wrong)"


def _but_nan(
    differs: NDArray[np.bool_], image: Image, expected: Image, where: Map, fill: Fill
) -> NDArray[np.bool_]:
    """What differs, without the elements that were NaN and still are."""
    bytes_at = np.flatnonzero(differs)
    starts = np.unique(bytes_at - where.byte[bytes_at])
    left = differs.copy()
    owners = fill.owners(where.serial[starts])
    for owner in np.unique(owners).tolist():
        field = fill.field(owner)
        nan = NAN_BITS.get(field.dtype)
        if nan is not None:
            mine = starts[owners == owner][:, None] + np.arange(_width(field))
            left[mine[is_nan(image[mine], nan) & is_nan(expected[mine], nan)]] = False
    return left


def _number(image: Image, start: int, width: int) -> int:
    return int.from_bytes(image[start : start + width].tobytes(), "little")


def _told(found: list[Image], first: int, where: Map, fill: Fill) -> str:
    """What lies where the first difference is, and what belongs there."""
    serial, width = int(where.serial[first]), int(where.width[first])
    start = first - int(where.byte[first])
    entry = fill.entry(serial)
    bits = 8 * width if entry is None else _code_bits(entry.field)
    codes = [_number(image, start, width) for image in found]
    seen, belongs = fill.where(fill.decode(codes, bits)), fill.where(serial)
    if seen is not None:
        return f"found the value of {seen}\nwhere {belongs} belongs"
    wanted = [int(fill.codes(np.array([serial]), number)[0]) for number in range(len(found))]
    kept = sum(code == want for code, want in zip(codes, wanted, strict=True))
    what = "found a value that belongs nowhere"
    if kept:
        got, want = next((code, want) for code, want in zip(codes, wanted, strict=True) if code != want)
        what = f"found a value that belongs nowhere: 0x{want:0{2 * width}x} became 0x{got:0{2 * width}x}"
    return f"{what}\nwhere {belongs} belongs"

"""What a plugin says: the declaration objects of the contract.

Everything here is data: frozen, closed (unknown names are errors) and strict (no coercion), with JSON in
and out.  pydantic judges the *shape* of a declaration; its *meaning* is judged afterwards by
`kvcontract.contract.check`, over the whole object, so that an author sees every finding at once.

Two things are never stated: bytes, which follow from fields (`kvcontract.contract.layout`), and the degree
of tensor parallelism, which a declaration must not depend on.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Final, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, GetPydanticSchema, WithJsonSchema
from pydantic import Field as Constraint
from pydantic_core import core_schema

CONTRACT_REVISION: Final = 1
"""Revision of the contract that this package serves; it moves apart from the package's version."""

TOKEN_AXIS: Final = "token"  # noqa: S105 - an axis, not a secret
"""Name of the axis over a block's rows; outermost unless a field of `Arena.planes` places it, with size 1."""


class Declared(BaseModel):
    """Base of every declaration object; remembers the author's line that constructed it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def model_post_init(self, _context: object, /) -> None:
        """Record who constructed this."""
        # In __dict__ beside the fields, like a cached property: neither compared, hashed nor serialised.
        self.__dict__["_where"] = _author_line()

    @property
    def where(self) -> str | None:
        """``file:line`` of the author's constructor call; None for an object read from JSON."""
        return cast("str | None", self.__dict__.get("_where"))


def _author_line() -> str | None:
    frame = sys._getframe(2)  # noqa: SLF001 - inspect.stack() reads source files; this must stay cheap
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if frame.f_code.co_name.startswith("model_validate"):
            return None
        if not module.startswith(("kvcontract.contract", "pydantic")):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment] # the loop's condition handles the outermost frame
    return None


class Axes(Mapping[str, int]):
    """Named axes in memory order, outermost first: immutable, hashable, and equal only in equal order."""

    __slots__ = ("_items",)

    def __init__(self, items: Iterable[tuple[str, int]]) -> None:
        self._items = dict(items)

    def __getitem__(self, name: str) -> int:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Axes) and tuple(self.items()) == tuple(other.items())

    def __hash__(self) -> int:
        return hash(tuple(self.items()))

    def __repr__(self) -> str:
        return f"{{{', '.join(f'{name!r}: {size}' for name, size in self.items())}}}"


def _to_axes(value: object) -> Axes:
    items = value.items() if isinstance(value, Mapping) else value
    if not isinstance(items, Iterable):
        raise ValueError(f"axes are an ordered mapping of name to size, not {value!r}")  # noqa: TRY004 - pydantic's
    pairs: list[Any] = list(items)
    names = [pair[0] for pair in pairs if isinstance(pair, tuple | list) and len(pair) == 2]  # noqa: PLR2004
    sizes = [pair[1] for pair in pairs if isinstance(pair, tuple | list) and len(pair) == 2]  # noqa: PLR2004
    if len(names) != len(pairs) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"axes are an ordered mapping of name to size, not {value!r}")
    if not all(type(size) is int and size >= 1 for size in sizes):
        raise ValueError(f"every axis has a size of at least 1, not {value!r}")
    if len(set(names)) != len(names):
        raise ValueError(f"an axis is named twice: {value!r}")
    return Axes(zip(names, sizes, strict=True))


def _axes_schema(_source: object, _handler: object) -> core_schema.CoreSchema:
    return core_schema.no_info_plain_validator_function(
        _to_axes,
        serialization=core_schema.plain_serializer_function_ser_schema(
            lambda axes: [list(pair) for pair in axes.items()]
        ),
    )


AxesField = Annotated[
    Mapping[str, int],
    # pydantic would copy a Mapping into a dict, whose equality forgets the order.
    GetPydanticSchema(_axes_schema),
    WithJsonSchema(
        {
            "type": "array",
            "description": "pairs of axis name and global size, outermost first",
            "items": {
                "type": "array",
                "prefixItems": [{"type": "string"}, {"type": "integer", "minimum": 1}],
            },
        }
    ),
]


class WeightIdentity(Declared):
    """Which weights computed the bytes; equal geometry under other weights is other content.

    Attributes:
        kind: ``digest`` of the weight files, ``revision`` of an immutable release, or ``unresolved``:
            known by configuration alone, so no persistent or shared tier may be used (D6).
        value: the digest or revision; None when unresolved.
        config: digest of the configuration keys that change a number (rope, head counts, ...).
    """

    kind: Literal["digest", "revision", "unresolved"]
    value: str | None = None
    config: str = ""

    @property
    def resolved(self) -> bool:
        """Whether bytes under this identity may outlive the process that computed them."""
        return self.kind != "unresolved"


class Full(Declared):
    """Every earlier token is read: full attention."""

    kind: Literal["full"] = "full"

    @property
    def key(self) -> str:
        """Name of the block-id space that groups of this reach share."""
        return "full"

    def needed(self, boundary: int) -> tuple[tuple[int, int], ...]:
        """Token ranges [first, end) that must still be held at a boundary."""
        return ((0, boundary),) if boundary else ()

    def dead(self, page: int, page_tokens: int, frontier: int) -> bool:
        """Whether no later step can read a page, given `frontier` committed tokens."""
        del page, page_tokens, frontier
        return False


class Window(Declared):
    """The last `tokens` tokens are read, the current one included, and the first `sink_tokens`."""

    kind: Literal["window"] = "window"
    tokens: Annotated[int, Constraint(ge=1)]
    sink_tokens: Annotated[int, Constraint(ge=0)] = 0

    @property
    def key(self) -> str:
        """Name of the block-id space that groups of this reach share."""
        return f"window-{self.tokens}" + (f"-sink-{self.sink_tokens}" if self.sink_tokens else "")

    def needed(self, boundary: int) -> tuple[tuple[int, int], ...]:
        """Token ranges [first, end) that must still be held at a boundary."""
        first = max(0, boundary - (self.tokens - 1))
        sink = min(self.sink_tokens, first)
        return tuple(span for span in ((0, sink), (first, boundary)) if span[0] < span[1])

    def dead(self, page: int, page_tokens: int, frontier: int) -> bool:
        """Whether no later step can read a page, given `frontier` committed tokens."""
        behind = (page + 1) * page_tokens + self.tokens - 1 <= frontier
        return behind and page * page_tokens >= self.sink_tokens


class Chunk(Declared):
    """Tokens of the current chunk of `tokens` tokens are read: chunked attention."""

    kind: Literal["chunk"] = "chunk"
    tokens: Annotated[int, Constraint(ge=1)]

    @property
    def key(self) -> str:
        """Name of the block-id space that groups of this reach share."""
        return f"chunk-{self.tokens}"

    def needed(self, boundary: int) -> tuple[tuple[int, int], ...]:
        """Token ranges [first, end) that must still be held at a boundary."""
        first = boundary // self.tokens * self.tokens
        return ((first, boundary),) if first < boundary else ()

    def dead(self, page: int, page_tokens: int, frontier: int) -> bool:
        """Whether no later step can read a page, given `frontier` committed tokens."""
        return (page + 1) * page_tokens <= frontier // self.tokens * self.tokens


Reach = Annotated[Full | Window | Chunk, Constraint(discriminator="kind")]


class Group(Declared):
    """State of one kind, found, saved and restored under one rule.

    Attributes:
        name: unique within the model.
        kind: ``paged`` grows with tokens; ``bounded`` is a fixed budget rewritten at each token;
            ``static`` is written once (cross-attention; reserved).
        reach: which past tokens must still be held (paged groups).
        restore: ``stored``: saved, and required for a hit; ``recomputed``: the executor rebuilds it from
            tokens; ``never``: prefix caching is off while the group is present.
        optional: a missing artefact does not void a checkpoint.
        lookahead_tokens: row t depends on the tokens up to t + lookahead; those rows are outside equality.
        weights: the group's own weights (a drafter's); None means the model's.
        boundary_tokens: bounded groups: state may be taken at multiples of this many tokens.
        snapshot_dtype: bounded groups: a narrower snapshot, which is lossy.
        snapshot_bound: the largest relative error of such a snapshot; stated if and only if there is one.
    """

    name: str
    kind: Literal["paged", "bounded", "static"] = "paged"
    reach: Reach = Full()
    restore: Literal["stored", "recomputed", "never"] = "stored"
    optional: bool = False
    lookahead_tokens: Annotated[int, Constraint(ge=0)] = 0
    weights: WeightIdentity | None = None
    boundary_tokens: Annotated[int, Constraint(ge=1)] | None = None
    snapshot_dtype: str | None = None
    snapshot_bound: Annotated[float, Constraint(gt=0, lt=1)] | None = None

    @property
    def checkpointable(self) -> bool:
        """Whether a checkpoint can hold the group at all."""
        return self.restore != "never"


class StaticScale(Declared):
    """A quantisation scale that is part of the launch, not of the cache; hence part of the identity.

    Attributes:
        digest: of the scale's bytes.
    """

    digest: str


class Field(Declared):
    """One tensor inside an arena.

    Attributes:
        name: unique within the arena.
        dtype: a key of `DTYPE_BITS`.
        axes: one row's axes in memory order with their *global* sizes (before any sharding).  One named
            ``k|v``, of size 2, says that the field is two, ``k`` and ``v``, side by side along it.
        shard_axis: the axis that tensor parallelism cuts; None is replicated.
        scale: the field that holds this field's scales, or a static scale.
    """

    name: str
    dtype: str
    axes: AxesField
    shard_axis: str | None = None
    scale: str | StaticScale | None = None


class Arena(Declared):
    """The fields that one layer keeps for one group; one page of it is a *block*.

    Construct with `Arena.rows` (interleaved: all fields of a row side by side) or `Arena.planes`
    (one field after another); offsets and strides follow.

    Attributes:
        name: unique within the model.
        group: name of the group it belongs to.
        layer: index of the layer that owns it; None when several share it.
        fields: the tensors, in memory order.
        arrangement: how the fields lie.
        tokens_per_row: tokens that one row stands for (compressed KV).
        stride_multiple_bytes: the distance between blocks must be a multiple of this.
        align_bytes: a block starts at a multiple of this.
    """

    name: str
    group: str
    fields: tuple[Field, ...]
    arrangement: Literal["rows", "planes"]
    layer: Annotated[int, Constraint(ge=0)] | None = None
    tokens_per_row: Annotated[int, Constraint(ge=1)] = 1
    stride_multiple_bytes: Annotated[int, Constraint(ge=1)] = 1
    align_bytes: Annotated[int, Constraint(ge=1)] = 1

    @classmethod
    def rows(cls, *, name: str, group: str, fields: tuple[Field, ...], **constraints: Any) -> Self:
        """An arena of interleaved rows: each token's fields lie side by side."""
        return cls(name=name, group=group, fields=fields, arrangement="rows", **constraints)

    @classmethod
    def planes(cls, *, name: str, group: str, fields: tuple[Field, ...], **constraints: Any) -> Self:
        """An arena of planes: all of a block's rows of one field, then those of the next."""
        return cls(name=name, group=group, fields=fields, arrangement="planes", **constraints)


class Conversion(Declared):
    """A pair of callables, named as ``module:name``, that change numbers between device and wire.

    Each is called as ``fn(src, dst)`` with dicts ``{"arena/field": Tensor[rows, ...]}``; it writes every
    element of `dst`, never `src`, and allocates nothing that outlives the call.

    Attributes:
        to_wire: from what is executed on to what is stored.
        from_wire: back.
    """

    to_wire: str
    from_wire: str


class Repack(Declared):
    """How stored bytes differ from executing bytes; without one they are the same.

    Attributes:
        arenas: the wire form, stated per `key_tokens`; fields keep their names, and their arenas' names or
            group and layer.
        conversion: ``derived`` from the two field lists (re-slice, permute, join or split, widen), or
            callables.
        version: raised whenever the callables write other bytes.
        lossless: whether values survive both ways.
        bound: the largest relative error, stated if and only if they do not.
    """

    arenas: tuple[Arena, ...]
    conversion: Literal["derived"] | Conversion = "derived"
    version: Annotated[int, Constraint(ge=1)] = 1
    lossless: bool = True
    bound: float | None = None


class Scope(Declared):
    """Who may share: requests meet only in equal scopes (D2: None is absent, ``""`` is a value).

    Attributes:
        lora: adapter name.
        lora_revision: revision or digest of the adapter.
        salt: the tenant's secret; never shown (D4).
    """

    lora: str | None = None
    lora_revision: str | None = None
    salt: Annotated[str | None, Constraint(repr=False)] = None

    model_config = ConfigDict(hide_input_in_errors=True)  # D4: the salt may be what was refused


class KvModel(Declared):
    """What a model keeps in its KV cache, as one declaration.

    Attributes:
        contract: revision of the contract it was written for.
        name: the model family's name, equal to the plugin's entry point.
        weights: which weights compute the bytes.
        numerics: precision class of the stored numbers; same shape with other numerics is other content.
        page_tokens: tokens of one page, common to all paged groups.
        page_tokens_allowed: page sizes that are gated; empty means any.
        page_tokens_reason: why only those.
        key_tokens: granularity of stored records, a multiple of `page_tokens`; None means `page_tokens`.
            Engines of different page sizes share records of one granularity.
        groups: the kinds of state.
        arenas: the bytes, in wire order.
        repack: how stored bytes differ from executing ones.
    """

    contract: int
    name: str
    weights: WeightIdentity
    numerics: str
    page_tokens: Annotated[int, Constraint(ge=1)]
    groups: tuple[Group, ...]
    arenas: tuple[Arena, ...]
    page_tokens_allowed: tuple[Annotated[int, Constraint(ge=1)], ...] = ()
    page_tokens_reason: str = ""
    key_tokens: Annotated[int, Constraint(ge=1)] | None = None
    repack: Repack | None = None

    @property
    def record_tokens(self) -> int:
        """Tokens of one stored record."""
        return self.page_tokens if self.key_tokens is None else self.key_tokens

    @property
    def record_pages(self) -> int:
        """Pages that one stored record spans."""
        return self.record_tokens // self.page_tokens

    @property
    def prefix_caching(self) -> bool:
        """Whether a prefix can be reused at all: False while a group is present that is never restored."""
        return all(group.checkpointable for group in self.groups)

    def group(self, name: str) -> Group:
        """The group of that name; KeyError if there is none."""
        return {group.name: group for group in self.groups}[name]

    def canonical_json(self) -> str:
        """The declaration as JSON with fields in declared order: equal objects give equal text."""
        return self.model_dump_json()

    @property
    def digest(self) -> str:
        """128-bit hexadecimal digest of the canonical JSON."""
        return hashlib.blake2b(self.canonical_json().encode(), digest_size=16).hexdigest()

"""What a simulated world computes on: token streams, their page keys, and what each row of them must hold.

All of it is a pure function of the declaration, made once and shared by every seed.  Streams branch from one
another, so that prefixes are shared in part; a request of a stream samples the stream's next tokens, so that
another one's prompt can hit what the first has decoded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvc_conformance.content import POISON, Content, trimmed
from kvcontract.contract.dtypes import DTYPE_BITS
from kvcontract.contract.errors import UsageFault
from kvcontract.contract.layout import held, layout, tp_faults
from kvcontract.contract.model import TOKEN_AXIS, Arena, Field, KvModel, Scope, WeightIdentity
from kvcontract.contract.wire import fingerprint, parts, wire_record
from kvcontract.memory.binding import Binding
from kvcontract.pool.index import Keys
from kvcontract.pool.keys import FleetSecret, Keyer

SPACE: Final = "full"
SECRET: Final = FleetSecret(bytes(range(32)))
SCOPES: Final = (Scope(), Scope(salt="a tenant"))

PARENTS: Final = ((0, 0), (0, 3), (2, 0), (0, 1))
"""Per stream: another one, and how many of that one's pages it begins with."""

STREAM_PAGES: Final = 7
"""Complete pages of a stream; some tokens follow."""

DEGREES: Final = (1, 2)
"""Degrees of tensor parallelism that worlds have."""

MOST_RECORD_PAGES: Final = 3
"""Of a longer record a stream would have none, or one."""

LEAST_ROW_BYTES: Final = 48
_TOKEN_IDS: Final = 1000
_NAMED: Final = WeightIdentity(kind="digest", value="0" * 32)
_UNITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Rows = NDArray[Any]
NO_KEYS: Final[Keys] = np.zeros((0, 2), np.uint64)


def simulated(model: KvModel) -> KvModel:
    """A declaration as it is simulated: small pages, few arenas of each group, stored as they are.

    Raises:
        UsageFault: it has groups that are not paged with full reach.
    """
    odd = [group.name for group in model.groups if group.kind != "paged" or group.reach.key != SPACE]
    if odd:
        raise UsageFault(
            f"{model.name}: group(s) {', '.join(odd)} cannot be simulated: this version does"
            " paged groups that reach every token"
        )
    rows = math.lcm(*(arena.tokens_per_row for arena in model.arenas))
    named = model.weights if model.weights.resolved else _NAMED
    plain = model.model_copy(update={"repack": None, "weights": named})
    page, step = max(2, rows), min(MOST_RECORD_PAGES, model.record_pages)
    return trimmed(plain, page, LEAST_ROW_BYTES, step * page if step > 1 else None)


class Prompts:
    """Streams of one declaration.

    Args:
        model: the declaration, as `simulated` gives it.

    Attributes:
        page: tokens of a page.
        step: pages of a record.
        length: tokens of a stream.
        degrees: degrees of tensor parallelism that it can be cut to here.
        part: of its records.
        records: of one record, by shard.
    """

    def __init__(self, model: KvModel) -> None:
        self.model = model
        self.page, self.step = model.page_tokens, model.record_pages
        self.length = STREAM_PAGES * self.page + self.page - 1
        self.keyer = Keyer(fingerprint(model).required, SECRET, self.page)
        self.degrees = tuple(tp for tp in DEGREES if not tp_faults(model, tp))
        self.part = parts(model)[0]
        shards = self.part.shards(max(self.degrees))
        self.records = [wire_record(model, self.part, shard, shards) for shard in range(shards)]
        self._content = Content(model)
        self._tokens = [self._stream(number) for number in range(len(PARENTS))]
        self._arrays = [np.array(tokens, np.int64) for tokens in self._tokens]
        self._keys = {
            (stream, scope): self.keyer.chain(self._tokens[stream][: STREAM_PAGES * self.page], SCOPES[scope])
            for stream in range(len(PARENTS))
            for scope in range(len(SCOPES))
        }
        keyer = Keyer(fingerprint(model).required, SECRET, model.record_tokens)
        self._where = {
            key.tobytes(): (stream, scope, number)
            for stream, scope in self._keys
            for number, key in enumerate(keyer.chain(self._tokens[stream], SCOPES[scope]))
        }
        self.image = functools.cache(self._image)
        self.space = functools.cache(lambda worker, tp: layout(model, worker, tp).space(SPACE))

    def _stream(self, number: int) -> list[int]:
        parent, pages = PARENTS[number]
        shared = self._stream(parent)[: pages * self.page] if pages else []
        rng = np.random.default_rng([7, number])
        own: list[int] = rng.integers(0, _TOKEN_IDS, self.length - len(shared)).tolist()
        return shared + own

    def tokens(self, stream: int, count: int) -> NDArray[np.int64]:
        """The first tokens of a stream."""
        return self._arrays[stream][:count]

    def token(self, stream: int, position: int) -> int:
        """One token of a stream."""
        return self._tokens[stream][position]

    def keys(self, stream: int, scope: int) -> Keys:
        """uint64[pages, 2], of all complete pages of a stream."""
        return self._keys[stream, scope]

    def chain_to(self, record: bytes) -> Keys | None:
        """The chain of pages that ends with those of a record; None if it is none of these streams'."""
        found = self._where.get(record)
        return None if found is None else self._keys[found[:2]][: (found[2] + 1) * self.step]

    def pages_of(self, record: bytes) -> Keys:
        """Keys of the pages of a record, uint64[step, 2]; none if it is none of these streams'."""
        chain = self.chain_to(record)
        return NO_KEYS if chain is None else chain[-self.step :]

    def _image(self, stream: int, scope: int, worker: int, tp: int) -> tuple[Rows, ...]:
        """Per field, the rows of a whole stream that a worker holds: [rows, *axes], units of an element."""
        content = self._content.rows(self._tokens[stream], whose=self.keyer.scope_tag(SCOPES[scope]))
        found, end = [], 0
        for arena in self.model.arenas:
            for field in arena.fields:
                shape, share = _shape(field, worker, tp)
                size = max(1, DTYPE_BITS[field.dtype] // 8)
                first, end = end, end + math.prod(shape) * size
                rows = content[arena.tokens_per_row - 1 :: arena.tokens_per_row, first:end]
                whole = np.ascontiguousarray(rows).view(f"<i{size}" if size > 1 else np.uint8)
                found.append(whole.reshape(len(rows), *shape)[(slice(None), *share)])
        return tuple(found)


def _shape(field: Field, worker: int, tp: int) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    """Size of every axis but the token's, in whole elements, and what a worker has of each."""
    axes = [(axis, size) for axis, size in field.axes.items() if axis != TOKEN_AXIS]
    share = tuple(
        slice(*held(size, worker, tp)) if axis == field.shard_axis else slice(0, size) for axis, size in axes
    )
    shape = [size for _, size in axes]
    bits = DTYPE_BITS[field.dtype]
    if bits < 8:  # noqa: PLR2004 - bits of a byte: packed along the last axis
        shape[-1] = shape[-1] * bits // 8
        share = (*share[:-1], slice(0, shape[-1]))
    return tuple(shape), share


class Memory:
    """The memory of one worker, written and judged a row at a time.

    Args:
        prompts: what is computed.
        worker: which.
        tp: of how many.
        blocks: pages of the pool.
    """

    def __init__(self, prompts: Prompts, worker: int, tp: int, blocks: int) -> None:
        self.binding = Binding.allocate(prompts.space(worker, tp), blocks)
        self._prompts, self._worker, self._tp = prompts, worker, tp
        self._targets = [
            self._target(arena, field) for arena in prompts.model.arenas for field in arena.fields
        ]

    def _target(self, arena: Arena, field: Field) -> tuple[Rows, int, int]:
        view = self.binding.views[arena.name, field.name]
        held_field = next(
            item
            for laid in self.binding.space.arenas
            if laid.name == arena.name
            for item in laid.fields
            if item.name == field.name
        )
        numbers = view.view(_UNITS[view.element_size()]).numpy()
        per = arena.tokens_per_row
        moved = np.moveaxis(numbers, 1 + held_field.axes.index(TOKEN_AXIS), 1)
        return moved, per, self._prompts.page // per

    def write(self, pages: Sequence[int], stream: int, scope: int, start: int, end: int) -> None:
        """Write the rows of tokens start .. end of a stream; `pages` are the request's, from its first."""
        size = self._prompts.page
        images = self._prompts.image(stream, scope, self._worker, self._tp)
        for (target, per, rows), image in zip(self._targets, images, strict=True):
            for page in range(start // size, -(-end // size)):
                first, last = max(start, page * size) // per, min(end, page * size + size) // per
                target[pages[page], first - page * rows : last - page * rows] = image[first:last]

    def spoil(self, pages: Sequence[int], start: int, end: int) -> None:
        """Write rows that are nobody's where tokens start .. end would be: a step that came to nothing."""
        size = self._prompts.page
        for target, per, rows in self._targets:
            for page in range(start // size, -(-end // size)):
                first, last = max(start, page * size) // per, min(end, page * size + size) // per
                target[pages[page], first - page * rows : last - page * rows] = POISON

    def right(self, pages: Sequence[int], stream: int, scope: int, tokens: int) -> bool:
        """Whether the first tokens of a stream lie on these pages."""
        count = -(-tokens // self._prompts.page)
        images = self._prompts.image(stream, scope, self._worker, self._tp)
        for (target, per, rows), image in zip(self._targets, images, strict=True):
            found = target[list(pages[:count])].reshape(count * rows, *image.shape[1:])
            whole = tokens // per
            if not np.array_equal(found[:whole], image[:whole]):
                return False
        return True

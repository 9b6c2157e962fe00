"""What a simulated world computes on: token streams, their page keys, and what they leave in each space.

All of it is a pure function of the declaration, made once and shared by every seed.  Streams branch from one
another, so that prefixes are shared in part; a request of a stream samples the stream's next tokens, so that
another one's prompt can hit what the first has decoded.
"""

from __future__ import annotations

import functools
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvc_conformance.sim.memory import Bytes, Images
from kvc_conformance.sim.spaces import granule_tokens, spaces_of
from kvcontract.contract.layout import tp_faults
from kvcontract.contract.model import Full, KvModel, Scope
from kvcontract.contract.wire import fingerprint
from kvcontract.pool.index import Keys
from kvcontract.pool.keys import FleetSecret, Keyer

SPACE: Final = Full().key
SECRET: Final = FleetSecret(bytes(range(32)))
SCOPES: Final = (Scope(), Scope(salt="a tenant"))

PARENTS: Final = ((0, 0), (0, 3), (2, 0), (0, 1))
"""Per stream: another one, and how many of that one's pages it begins with."""

STREAM_PAGES: Final = 7
"""Complete pages of a stream; some tokens follow."""

DEGREES: Final = (1, 2)
"""Degrees of tensor parallelism that worlds have."""

NAME_BYTES: Final = 17
"""Of a record's key, what tells its page and its part, whatever its shard."""

_PAGE_KEY_BYTES: Final = 16
_TOKEN_IDS: Final = 1000

NO_KEYS: Final[Keys] = np.zeros((0, 2), np.uint64)


class Prompts:
    """Streams of one declaration.

    Args:
        model: the declaration, as `simulated` gives it.

    Attributes:
        page: tokens of a page.
        step: pages of a record of full pages.
        granule: somebody can go on from multiples of so many tokens alone.
        length: tokens of a stream.
        degrees: degrees of tensor parallelism that it can be cut to here.
        spaces: by key, the full pages' first.
        beside: the others.
        by_part: by id of the part.
        images: what the streams leave.
        named: uint64[n, 2], the keys of all pages of all streams.
        names: stream, scope and number of each.
    """

    def __init__(self, model: KvModel) -> None:
        self.model = model
        self.page, self.step = model.page_tokens, model.record_pages
        self.granule = granule_tokens(model)
        self.length = STREAM_PAGES * self.page + self.page - 1
        self.keyer = Keyer(fingerprint(model).required, SECRET, self.page)
        self.degrees = tuple(tp for tp in DEGREES if not tp_faults(model, tp))
        self.spaces = {space.key: space for space in spaces_of(model, max(self.degrees))}
        self.beside = tuple(space for key, space in self.spaces.items() if key != SPACE)
        self.by_part = {space.part.id: space for space in self.spaces.values()}
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
        self.images = Images(model, self._tokens, [self.keyer.scope_tag(scope) for scope in SCOPES])
        every = np.concatenate(list(self._keys.values()))
        _, first = np.unique(every, axis=0, return_index=True)
        self.named = every[first]
        self.picture = functools.cache(self._picture)
        self.names = [(*list(self._keys)[at // STREAM_PAGES], at % STREAM_PAGES) for at in first.tolist()]

    def _stream(self, number: int) -> list[int]:
        parent, pages = PARENTS[number]
        shared = self._stream(parent)[: pages * self.page] if pages else []
        rng = np.random.default_rng([7, number])
        own: list[int] = rng.integers(0, _TOKEN_IDS, self.length - len(shared)).tolist()
        return shared + own

    def _picture(self, key: str, worker: int, tp: int) -> Bytes:
        """What a worker has in one space under each of the names: uint8[n, bytes]."""
        page, paged = self.page, self.spaces[key].group is None
        return np.stack(
            [
                self.images.of(stream, scope, key, worker, tp)[number if paged else number * page + page - 1]
                for stream, scope, number in self.names
            ]
        )

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
        found = self._where.get(record[:_PAGE_KEY_BYTES])
        return None if found is None else self._keys[found[:2]][: (found[2] + 1) * self.step]

    def pages_of(self, record: bytes) -> Keys:
        """Keys of the blocks of a record, uint64[n, 2]; none if it is none of these streams'."""
        chain = self.chain_to(record)
        return NO_KEYS if chain is None else chain[-self.by_part[record[_PAGE_KEY_BYTES]].record_pages :]

"""What a request says: its tokens so far, and the names of its pages, derived as they become complete.

Tiers may keep records of another length than a page: a second chain, derived only where somebody asks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvcontract.contract.model import Scope
from kvcontract.pool.events import Content
from kvcontract.pool.index import Keys
from kvcontract.pool.keys import Keyer
from kvcontract.pool.media import NO_MEDIA, Media

Tokens = npt.NDArray[np.int64]


class _Chain:
    """Keys of the leading stretches of a sequence, all as long as a page of `keyer`."""

    def __init__(
        self, keyer: Keyer, scope: Scope, media: Media, capacity: int, known: Keys | None = None
    ) -> None:
        self.keyer = keyer
        self._scope, self._media = scope, media
        self._keys: Keys = np.empty((-(-capacity // keyer.page_tokens), 2), np.uint64)
        self.known = 0 if known is None else len(known)
        if known is not None:
            self._keys[: len(known)] = known

    def keys(self, tokens: npt.NDArray[np.integer[Any]], count: int) -> Keys:
        """The first `count` keys, uint64 [count, 2]; `tokens` reach at least as far."""
        first, size = self.known, self.keyer.page_tokens
        if count > first:
            extras = self._media.extras(size, count - first, first=first)
            parent = self._keys[first - 1] if first else None
            fresh = tokens[first * size : count * size]
            self._keys[first:count] = self.keyer.chain(fresh, self._scope, extras=extras, parent=parent)
            self.known = count
        return self._keys[:count]


class TokenSequence:
    """Tokens of one request and keys of its pages.

    Args:
        keyer: derives the keys.
        scope: who may share the pages.
        prompt: checked token ids.
        capacity: most tokens it may ever have.
        media: of the prompt.
        keys: of its first pages, where they are known already; uint64 [n, 2].
    """

    def __init__(
        self,
        keyer: Keyer,
        scope: Scope,
        prompt: npt.NDArray[np.integer[Any]],
        capacity: int,
        media: Media = NO_MEDIA,
        keys: Keys | None = None,
    ) -> None:
        self.scope = scope
        self.media = media
        self._keyer = keyer
        self._tokens: Tokens = np.empty(capacity, np.int64)
        self._tokens[: len(prompt)] = prompt
        self._length = len(prompt)
        self._chain = _Chain(keyer, scope, media, capacity, keys)
        self._records: _Chain | None = None
        # The array as it was given: hashed in place, where its own copy may be twice as wide.
        self._chain.keys(prompt, len(prompt) // keyer.page_tokens)

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> Tokens:
        """All tokens, int64."""
        return self._tokens[: self._length]

    def append(self, tokens: list[int]) -> None:
        """Tokens that were sampled."""
        self._tokens[self._length : self._length + len(tokens)] = tokens
        self._length += len(tokens)

    def keys(self, pages: int) -> Keys:
        """Keys of the first `pages` pages, all complete: uint64 [pages, 2]."""
        return self._chain.keys(self._tokens, pages)

    def record_keys(self, keyer: Keyer, tokens: int) -> Keys:
        """Keys of the records that the first `tokens` tokens make up, by another keyer: uint64 [n, 2]."""
        if keyer.page_tokens == self._keyer.page_tokens:
            return self.keys(tokens // keyer.page_tokens)
        if self._records is None or self._records.keyer is not keyer:
            self._records = _Chain(keyer, self.scope, self.media, len(self._tokens))
        return self._records.keys(self._tokens, tokens // keyer.page_tokens)

    def partial_key(self, tokens: int, anchor: int | None) -> Keys:
        """Name of the partial page that ends a prefix of `tokens` tokens, uint64 [2] (D7)."""
        size = self._keyer.page_tokens
        full = tokens // size
        return self._keyer.partial(
            self.keys(full)[-1] if full else None,
            self._tokens[full * size : tokens],
            self.scope,
            committed_tokens=tokens,
            anchor=anchor,
            extra=self.media.extras(size, 1, first=full).get(0),
        )

    def content(self, first: int, last: int) -> Content:
        """What pages `first` to `last` hold, for events."""
        size = self._keyer.page_tokens
        extras = self.media.extras(size, last - first, first=first)
        return Content(self._tokens[first * size : last * size], self._keyer.scope_tag(self.scope), extras)

    def branch(self, last_token: int | None) -> TokenSequence:
        """A copy that goes its own way, with another last token if one is given."""
        tokens = self.tokens.copy()
        if last_token is not None:
            tokens[-1] = last_token
        known = self.keys(min(self._chain.known, (len(tokens) - 1) // self._keyer.page_tokens))
        return TokenSequence(self._keyer, self.scope, tokens, len(self._tokens), self.media, known)

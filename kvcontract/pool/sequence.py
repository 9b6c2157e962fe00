"""What a request says: its tokens so far, and the names of its pages, derived as they become complete."""

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
        self._keys: Keys = np.empty((-(-capacity // keyer.page_tokens), 2), np.uint64)
        self._keyed = 0 if keys is None else len(keys)
        if keys is not None:
            self._keys[: len(keys)] = keys
        # The array as it was given: hashed in place, where its own copy may be twice as wide.
        size = keyer.page_tokens
        self._extend_keys(prompt[self._keyed * size : len(prompt) // size * size])

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
        size = self._keyer.page_tokens
        if pages > self._keyed:
            self._extend_keys(self._tokens[self._keyed * size : pages * size])
        return self._keys[:pages]

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
        known = self._keys[: min(self._keyed, (len(tokens) - 1) // self._keyer.page_tokens)]
        return TokenSequence(self._keyer, self.scope, tokens, len(self._tokens), self.media, known)

    def _extend_keys(self, fresh: npt.NDArray[np.integer[Any]]) -> None:
        first, size = self._keyed, self._keyer.page_tokens
        extras = self.media.extras(size, len(fresh) // size, first=first)
        parent = self._keys[first - 1] if first else None
        made = self._keyer.chain(fresh, self.scope, extras=extras, parent=parent)
        self._keys[first : first + len(made)] = made
        self._keyed = first + len(made)

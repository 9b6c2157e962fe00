"""Media in a prompt: content that the token ids do not tell.

An image or a sound stands in a prompt as a run of placeholder tokens, equal for every image.  Its digest
makes the difference: it enters the key of each page that the item touches, with where the page lies inside
the item.  An uncut item is computed in one piece, so neither a chunk nor a registered prefix ends inside it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kvcontract.contract.errors import UsageFault

_MIN_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One item of a prompt.

    Attributes:
        digest: of its content, 16 bytes or more.
        start: position of its first placeholder token.
        tokens: how many there are.
        uncut: whether it is computed in one piece.
    """

    digest: bytes
    start: int
    tokens: int
    uncut: bool = True

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.start + self.tokens


class Media:
    """The items of one prompt, in order.

    Args:
        items: of the prompt.
        prompt_tokens: its length.

    Raises:
        UsageFault: items without a digest, outside the prompt, or overlapping; all are named.
    """

    def __init__(self, items: Sequence[MediaItem], prompt_tokens: int) -> None:
        self.items = tuple(sorted(items, key=lambda item: item.start))
        faults = []
        last = 0
        for item in self.items:
            where = f"item at {item.start}, {item.tokens} tokens"
            if len(item.digest) < _MIN_DIGEST_BYTES:
                faults.append(f"{where}: a digest of {len(item.digest)} bytes; allowed are 16 or more")
            if item.tokens < 1 or item.start < 0 or item.end > prompt_tokens:
                faults.append(f"{where}: not within the prompt of {prompt_tokens} tokens")
            if item.start < last:
                faults.append(f"{where}: overlaps the item before it")
            last = max(last, item.end)
        if faults:
            raise UsageFault("; ".join(faults))

    def extras(self, page_tokens: int, pages: int, *, first: int = 0) -> dict[int, bytes]:
        """Extra identity of `pages` pages from page `first` on, by number of the page among them."""
        found: dict[int, bytes] = {}
        for item in self.items:
            pages_of_item = range(item.start // page_tokens, -(-item.end // page_tokens))
            for page in pages_of_item:
                if first <= page < first + pages:
                    at = page * page_tokens - item.start  # below 0: it starts inside the page
                    entry = struct.pack("<qQQ", at, item.tokens, len(item.digest)) + item.digest
                    found[page - first] = found.get(page - first, b"") + entry
        return found

    def floor(self, tokens: int) -> int:
        """Largest legal end of a chunk at or before `tokens`."""
        for item in self.items:
            if item.uncut and item.start < tokens < item.end:
                return item.start
        return tokens

    def ceil(self, tokens: int) -> int:
        """Smallest legal end of a chunk at or after `tokens`."""
        for item in self.items:
            if item.uncut and item.start < tokens < item.end:
                return item.end
        return tokens

    def floor_pages(self, tokens: int, page_tokens: int) -> int:
        """Full pages of the longest prefix of `tokens` that is a whole number of pages and cuts no item."""
        pages = tokens // page_tokens
        while pages and (legal := self.floor(pages * page_tokens)) != pages * page_tokens:
            pages = legal // page_tokens
        return pages


NO_MEDIA = Media((), 0)

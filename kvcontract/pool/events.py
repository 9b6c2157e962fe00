"""What the index tells routers: pages stored, pages removed, everything cleared (I7).

The pool writes to the log inside its gate, from the very calls that change the index, so that replaying the
stream gives the index: no state is told twice, and none is missed. A batch is a few arrays, never an object
a page. Names of partial pages are left out: no other request can be matched by them.

A pool without a log spends nothing on this.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvcontract.contract.errors import UsageFault
from kvcontract.pool.index import Keys

DEVICE: Final = "device"
"""The medium of a pool's events."""

EVICTED: Final = "evicted"
"""Made way for a draw or a restore."""
RELEASED: Final = "released"
"""Nobody uses it any more and it was not to be kept: retention is off, or the page was marked (B12, B13)."""
UNREACHABLE: Final = "unreachable"
"""A page before it in its chain is gone (B14)."""
RETENTION_OFF: Final = "retention off"
"""The cache was drained because retention was switched off."""
OVERFLOW: Final = "overflow"
"""Nobody took the events in time: what was not taken is lost, and the stream starts anew."""

_NO_EXTRAS: Final[Mapping[int, bytes]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """What a run of pages holds, for routers that hash for themselves.

    Attributes:
        token_ids: integers [pages * page_tokens].
        scope: tag of the scope, `Keyer.scope_tag`; empty for the open one.
        extras: extra identity by number of the page in the run.
    """

    token_ids: npt.NDArray[np.integer[Any]]
    scope: str = ""
    extras: Mapping[int, bytes] = field(default_factory=lambda: _NO_EXTRAS)


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """Pages became findable.

    Attributes:
        epoch: how often the index had been cleared before.
        keys: uint64 [n, 2].
        parents: uint64 [n, 2], key of the page before each; zeros where a sequence starts.
        token_ids: int64 [n, page_tokens].
        scope: tag of their scope; empty for the open one.
        extras: extra identity by row.
        medium: where they lie.
    """

    epoch: int
    keys: Keys
    parents: Keys
    token_ids: npt.NDArray[np.int64]
    scope: str
    extras: Mapping[int, bytes]
    medium: str = DEVICE


@dataclass(frozen=True, slots=True, eq=False)
class Removed:
    """Pages are findable no more.

    Attributes:
        epoch: how often the index had been cleared before.
        keys: uint64 [n, 2].
        reason: why.
        medium: where they lay.
    """

    epoch: int
    keys: Keys
    reason: str
    medium: str = DEVICE


@dataclass(frozen=True, slots=True, eq=False)
class Cleared:
    """Nothing that was stored in an earlier epoch is findable any more.

    Attributes:
        epoch: the one that begins.
        reason: why.
        medium: where.
    """

    epoch: int
    reason: str
    medium: str = DEVICE


Event: TypeAlias = Stored | Removed | Cleared


class EventLog:
    """Events of one pool, in the order of the index's changes, until somebody takes them.

    Args:
        max_batches: most batches kept for a reader; beyond it all of them are dropped, and the stream says so
            by `Cleared` with reason `OVERFLOW`. A replay then knows of fewer pages than there are.

    Raises:
        UsageFault: `max_batches` is below 2.
    """

    def __init__(self, *, max_batches: int = 1 << 16) -> None:
        if max_batches < 2:  # noqa: PLR2004 - one that says what was lost, one that is new
            raise UsageFault(f"a log of {max_batches} batches; allowed is 2 or more")
        self._max_batches = max_batches
        self._lock = threading.Lock()
        self._batches: list[Event] = []
        self._epoch = 0

    def take(self) -> list[Event]:
        """Everything since the last call, oldest first; from any thread."""
        with self._lock:
            batches, self._batches = self._batches, []
        return batches

    # For the pool, inside its gate

    def stored(self, keys: Keys, parents: Keys, content: Content, rows: npt.NDArray[np.bool_]) -> None:
        """Those `rows` of a run became findable."""
        tokens = content.token_ids.reshape(len(rows), -1)
        extras = content.extras
        if not rows.all():
            number = np.cumsum(rows) - 1
            extras = {int(number[row]): identity for row, identity in extras.items() if rows[row]}
            keys, parents, tokens = keys[rows], parents[rows], tokens[rows]
        # Copies: the caller's arrays are its own to overwrite.
        self._add(
            Stored(self._epoch, keys.copy(), parents.copy(), tokens.astype(np.int64), content.scope, extras)
        )

    def removed(self, keys: Keys, reason: str) -> None:
        """These are findable no more."""
        self._add(Removed(self._epoch, keys, reason))

    def cleared(self, reason: str) -> None:
        """Nothing is findable any more."""
        self._epoch += 1
        self._add(Cleared(self._epoch, reason))

    def _add(self, event: Event) -> None:
        with self._lock:
            if len(self._batches) >= self._max_batches:
                self._epoch += 1
                self._batches = [Cleared(self._epoch, OVERFLOW)]
                event = replace(event, epoch=self._epoch)
            self._batches.append(event)


def replay(events: Iterable[Event]) -> dict[bytes, tuple[bytes, bytes]]:
    """What a reader knows after some events: key -> (parent key, token ids as int64), all as bytes."""
    known: dict[bytes, tuple[bytes, bytes]] = {}
    for event in events:
        match event:
            case Stored():
                rows = zip(event.keys, event.parents, event.token_ids, strict=True)
                known |= {key.tobytes(): (parent.tobytes(), ids.tobytes()) for key, parent, ids in rows}
            case Removed():
                for key in event.keys:
                    known.pop(key.tobytes(), None)
            case Cleared():
                known.clear()
    return known

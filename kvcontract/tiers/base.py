"""What a tier is: a place for records below the device, spoken to in keys, addresses and codes.

Rules that every tier keeps:

* nothing raises on the caller's thread: a failure is a code of the record it befell (R4);
* every operation settles exactly once (R8), whether or not somebody still waits for it;
* nothing is findable before all its bytes are complete, nothing reusable while a copy can touch it (R3);
* a batch does what its records would do one by one (H1).

Deadlines are absolute times on the clock that a tier is built with.  No torch here: memory is address and
length.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from itertools import pairwise
from types import TracebackType
from typing import Any, Final, Literal, Protocol, Self, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvcontract.contract.errors import UsageFault
from kvcontract.core.lane import Urgency
from kvcontract.core.pending import Pending, report_uncaught

Clock = Callable[[], float]
Level = Literal["landed", "visible", "durable"]
Rows = NDArray[np.integer[Any]]
Codes = NDArray[np.uint8]

HANDOFF_TTL_S: Final = 60.0
"""How long a handoff record cannot be evicted unless it is released earlier; never refreshed."""


class Code(IntEnum):
    """How one record of an operation ended; the worst of several is the largest."""

    OK = 0
    MISS = 1
    SHED = 2
    FULL = 3
    TOO_LARGE = 4
    EXPIRED = 5
    REFUSED = 6
    SHORT = 7
    CORRUPT = 8
    FAILED = 9


CODE_MEANING: Final[Mapping[Code, str]] = {
    Code.OK: "done",
    Code.MISS: "the tier does not have the record",
    Code.SHED: "not tried, to keep more urgent work going; try again later",
    Code.FULL: "no room, and nothing may be evicted",
    Code.TOO_LARGE: "larger than the tier takes",
    Code.EXPIRED: "the deadline or the lease ended first",
    Code.REFUSED: "the tier is closed, or the request makes no sense",
    Code.SHORT: "the record has another length than asked for",
    Code.CORRUPT: "the bytes are not those that were saved",
    Code.FAILED: "an unexpected error, kept in the tier's or worker's faults",
}


class SaveClass(Enum):
    """Why a record is saved, which decides what it may wait for."""

    HANDOFF = "handoff"
    CACHEABLE = "cacheable"
    WRITE_BACK = "write_back"

    @property
    def urgency(self) -> Urgency:
        """What its copies go before, and what before them."""
        return Urgency[self.name]


RECORD_KEY: Final = np.dtype([("page_key", "<u8", (2,)), ("part", "u1"), ("shard", "<u2"), ("shards", "<u2")])
"""21 packed bytes: ``page_key[16] | part u8 | shard u16 | shards u16``, little endian."""

RECORD_KEY_BYTES: Final = RECORD_KEY.itemsize

RecordKeys: TypeAlias = NDArray[np.void]
"""Record keys [n] of dtype `RECORD_KEY`."""


def record_keys(page_keys: NDArray[np.uint64], part: int, shard: int, shards: int) -> RecordKeys:
    """Keys of the records that hold one part and shard of some pages.

    Args:
        page_keys: uint64[n, 2].
        part: id of the part, below 256.
        shard: below `shards`.
        shards: how many the part is cut into, below 65,536.

    Raises:
        UsageFault: a number does not fit its field; all are named.
    """
    faults = []
    if page_keys.ndim != 2 or page_keys.shape[1] != 2:  # noqa: PLR2004 - two words of 8 bytes
        faults.append(f"page_keys of shape {page_keys.shape}; expected [n, 2]")
    if not 0 <= part < 2**8:
        faults.append(f"part {part}; expected 0 to 255")
    if not 0 <= shard < shards < 2**16:
        faults.append(f"shard {shard} of {shards}; expected shard < shards < 65,536")
    if faults:
        raise UsageFault("; ".join(faults))
    keys = np.empty(len(page_keys), RECORD_KEY)
    keys["page_key"], keys["part"], keys["shard"], keys["shards"] = page_keys, part, shard, shards
    return keys


def key_bytes(keys: RecordKeys) -> list[bytes]:
    """Each key as 21 bytes: hashable, equal exactly for equal keys.

    Raises:
        UsageFault: they are not record keys.
    """
    if keys.dtype != RECORD_KEY:
        raise UsageFault(f"keys of dtype {keys.dtype}; expected those of record_keys()")
    packed, size = keys.tobytes(), RECORD_KEY_BYTES
    return [packed[at : at + size] for at in range(0, len(packed), size)]


@dataclass(frozen=True, slots=True)
class Buffers:
    """Memory of `n` records, each in one or more pieces.

    Attributes:
        address: int64[m], where each piece begins.
        length_bytes: int64[m].
        first: int64[n + 1]; record i has the pieces first[i] up to first[i + 1].
        keepalive: what owns the memory; held for as long as the operation runs.
    """

    address: NDArray[np.int64]
    length_bytes: NDArray[np.int64]
    first: NDArray[np.int64]
    keepalive: tuple[object, ...] = ()

    @classmethod
    def of(cls, arrays: Sequence[NDArray[np.uint8]]) -> Buffers:
        """One contiguous array a record; handy where speed does not matter."""
        return cls(
            np.array([array.ctypes.data for array in arrays], np.int64),
            np.array([array.nbytes for array in arrays], np.int64),
            np.arange(len(arrays) + 1, dtype=np.int64),
            tuple(arrays),
        )

    def __len__(self) -> int:
        return len(self.first) - 1

    def record_bytes(self) -> NDArray[np.int64]:
        """int64[n], total length of each record."""
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.length_bytes)])
        lengths: NDArray[np.int64] = np.diff(ends[self.first])
        return lengths

    def pieces(self) -> list[list[tuple[int, int]]]:
        """Per record, its (address, length) pairs as plain integers."""
        flat = list(zip(self.address.tolist(), self.length_bytes.tolist(), strict=True))
        first = self.first.tolist()
        return [flat[start:end] for start, end in pairwise(first)]

    def take(self, rows: Rows) -> Buffers:
        """The buffers of some records, in the order given."""
        counts = np.diff(self.first)[rows]
        first = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        picks = np.arange(first[-1]) + np.repeat(self.first[:-1][rows] - first[:-1], counts)
        return Buffers(self.address[picks], self.length_bytes[picks], first, self.keepalive)


Op: TypeAlias = Pending[Codes]
"""An operation on n records: settles once with u8[n] of `Code`."""


class Lease:
    """The right to load some records: until it is released, what is present is not evicted.

    Use it as a context, so that no branch can forget it (A6)::

        with lease:
            ...

    Attributes:
        present: bool[n], per key asked for; not a prefix count.
        receipt: whatever the tier needs to find the records again; nobody else's business.
        pending: settles when keys that are absent may have come; None where the tier cannot tell.
        failed: the look-up failed: nothing is known, so nothing is present.
    """

    __slots__ = ("__weakref__", "_lock", "_release", "failed", "pending", "present", "receipt", "tier")

    def __init__(
        self,
        tier: str,
        present: NDArray[np.bool_],
        *,
        receipt: object = None,
        release: Callable[[], object] | None = None,
        pending: Pending[None] | None = None,
        failed: bool = False,
    ) -> None:
        """Make a lease.

        Args:
            tier: name of the tier that gives it.
            present: bool[n].
            receipt: the tier's own.
            release: called once; None for a lease that holds nothing.  The garbage collector may be the one
                who calls, in the middle of anything: it must take no lock.
            pending: see the class.
            failed: see the class.
        """
        self.failed = failed
        self.tier = tier
        self.present = present
        self.receipt = receipt
        self.pending = pending
        self._release = release
        self._lock = threading.Lock()

    @classmethod
    def nothing(cls, tier: str, count: int, *, failed: bool = False) -> Lease:
        """A lease on `count` keys of which none is present; what a failed lookup settles with."""
        return cls(tier, np.zeros(count, np.bool_), failed=failed)

    @property
    def active(self) -> bool:
        """Whether it still holds anything."""
        return self._release is not None

    def release(self) -> None:
        """Give the records back; doing so again does nothing."""
        with self._lock:
            release, self._release = self._release, None
        if release is not None:
            release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        release = getattr(self, "_release", None)  # a lease whose construction failed has none
        if release is None:
            return
        self._release = None
        try:
            release()
        finally:
            records = int(np.sum(self.present))
            warnings.warn(
                f"a lease of tier {self.tier!r} on {records} records was dropped unreleased",
                ResourceWarning,
                source=self,
                stacklevel=1,
            )


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a tier can do; checked against what a store needs when it is built (H10).

    Attributes:
        persistent: records survive the process.
        shared: other processes see them.
        scopes: keys of different scopes may be kept together.
        zero_copy: records are written from, and read into, the memory given, without staging.
        max_record_bytes: largest record taken, frame included; None is any.
        handoff_release: ``early`` if `release_handoff` frees at once, ``ttl`` if only time does.
    """

    persistent: bool
    shared: bool
    scopes: bool = True
    zero_copy: bool = False
    max_record_bytes: int | None = None
    handoff_release: Literal["early", "ttl"] = "early"


class Tier(Protocol):
    """A place for records.  No method raises for what befalls records; see the module's rules."""

    @property
    def name(self) -> str:
        """Unique within a store; labels statistics."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        ...

    def lookup(self, keys: RecordKeys, deadline: float) -> Pending[Lease]:
        """Ask which records are there, and keep those from eviction.

        Settles with a lease in any case; one with nothing present if the lookup failed, which is counted.
        Whoever gives up waiting leaves `pending.on_done(Lease.release)` behind (A2).
        """
        ...

    def load(self, lease: Lease, rows: Rows, buffers: Buffers, deadline: float) -> Op:
        """Read records into memory; the operation keeps its own hold on them until it settles (A3).

        Args:
            lease: from `lookup` of this tier.
            rows: int[n], which of the lease's keys.
            buffers: of n records, as long as the records are.
            deadline: no further record is begun after it (A9).
        """
        ...

    def save(
        self,
        keys: RecordKeys,
        buffers: Buffers,
        cls: SaveClass,
        deadline: float,
        *,
        handoff: str | None = None,
    ) -> Op:
        """Write records; one that is there already is OK and not written again (H2).

        Args:
            keys: of n records.
            buffers: of n records; read until the operation settles.
            cls: why.
            deadline: no further record is begun after it (A9).
            handoff: with `SaveClass.HANDOFF`, the id under which `release_handoff` gives them free.
        """
        ...

    def discard(self, lease: Lease, rows: Rows) -> None:
        """Forget records that a reader found damaged, unless they were replaced since (E7, H3)."""
        ...

    def flush(self, level: Level, deadline: float) -> Pending[bool]:
        """Settle once every save submitted before has settled; True if in time and to that level (C8)."""
        ...

    def release_handoff(self, lease_id: str) -> None:
        """Let the records of a handoff be evicted; unknown and repeated ids do nothing."""
        ...

    def stats(self) -> dict[str, int]:
        """Counters and gauges; gauges return to 0 when idle, apart from what is stored (R8)."""
        ...

    def close(self, deadline: float) -> bool:
        """Take no more work and wait for what runs; False if something still runs, which is then leaked."""
        ...


@runtime_checkable
class TellsLosses(Protocol):
    """A tier that says what it no longer has; of others, what was stored is believed for a while (C3)."""

    def on_loss(self, callback: Callable[[RecordKeys, str], object]) -> Callable[[], None]:
        """Call back soon after records can be found no more, and say why; from any thread, no lock held.

        Reasons are ``evicted`` and ``quarantined``; what `Resets.reset` forgets is not told.

        Returns:
            A function that ends it.
        """
        ...


@runtime_checkable
class Resets(Protocol):
    """A tier that can forget everything."""

    def reset(self, deadline: float) -> Pending[bool]:
        """Forget every record; True once none can be found.  Who reads one goes on reading what was there."""
        ...


def guarded(count: int, body: Callable[[Codes], object], on_fault: Callable[[Exception], object]) -> Codes:
    """Run the body of an operation so that it has codes whatever happens.

    Args:
        count: records of the operation.
        body: fills the codes it is given, which start as FAILED.
        on_fault: told of an exception; what was not filled stays FAILED.
    """
    codes = np.full(count, Code.FAILED, np.uint8)
    try:
        body(codes)
    except Exception as error:  # noqa: BLE001 - kept by the owner; the caller gets codes (R4)
        try:
            on_fault(error)
        except Exception as second:  # noqa: BLE001 - not even this may cost the operation its terminal
            report_uncaught(second)
    return codes

"""What probes on tiers share: the tiers of a child, and how arrays become keys and buffers."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from kvc_conformance.child import Session
from kvcontract.tiers.base import RECORD_KEY, Buffers, Lease, Op, RecordKeys, SaveClass, Tier

Arrays = Mapping[str, NDArray[Any]]
Arguments = dict[str, Any]

SETTLE_S: Final = 30.0
POISON: Final = 0xEE
GAP_BYTES: Final = 64
"""Between the records of a load, so that a byte too many shows."""


class MovingClock:
    """The monotonic clock, and what it was moved on by."""

    ahead_s = 0.0

    def __call__(self) -> float:
        """The time."""
        return time.monotonic() + self.ahead_s


@dataclass(slots=True)
class Made:
    """One tier and what its probes keep between calls."""

    tier: Tier
    clock: MovingClock
    leases: dict[str, Lease] = field(default_factory=dict)
    told: list[tuple[RecordKeys, str]] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def deadline(self, arguments: Arguments) -> float:
        """``in_s`` from now; none is never."""
        within = arguments.get("in_s")
        return math.inf if within is None else self.clock() + within


def made_of(session: Session, arguments: Arguments) -> Made:
    """The tier that a probe is about."""
    made: Made = session.objects[arguments["tier"]]
    return made


def keys_of(array: NDArray[Any]) -> RecordKeys:
    """Record keys of uint8[n, 21]."""
    return cast("RecordKeys", np.ascontiguousarray(array).view(RECORD_KEY).reshape(-1))


def buffers_of(flat: NDArray[np.uint8], lengths: list[int], pieces: int, gap: int = 0) -> Buffers:
    """Records laid out in `flat`, each cut into pieces."""
    address, sizes, first, at = [], [], [0], flat.ctypes.data
    for length in lengths:
        cuts = [length * number // pieces for number in range(pieces + 1)]
        address += [at + cut for cut in cuts[:-1]]
        sizes += [end - start for start, end in pairwise(cuts)]
        first.append(len(address))
        at += length + gap
    return Buffers(np.array(address, np.int64), np.array(sizes, np.int64), np.array(first, np.int64), (flat,))


def codes_of(op: Op) -> dict[str, Any]:
    """What an operation settles with, as plain JSON."""
    try:
        codes = op.wait(SETTLE_S)
    except TimeoutError:
        return {"settled": False, "codes": []}
    return {"settled": True, "codes": np.asarray(codes).astype(int).tolist()}


def begin_save(made: Made, arguments: Arguments, arrays: Arrays) -> tuple[Op, NDArray[np.uint8]]:
    """Begin a save; the memory that it reads is returned too."""
    content = arrays["content"].copy()
    buffers = buffers_of(content, arguments["lengths"], arguments.get("pieces", 1))
    handoff = arguments.get("handoff")
    cls = SaveClass.CACHEABLE if handoff is None else SaveClass.HANDOFF
    op = made.tier.save(keys_of(arrays["keys"]), buffers, cls, made.deadline(arguments), handoff=handoff)
    return op, content


def present_of(lease: Any) -> list[bool] | None:
    """What a lease says is present."""
    return np.asarray(lease.present).astype(bool).tolist() if isinstance(lease, Lease) else None


def waited(pending: Any) -> Any:
    """What an operation settles with; None if it does not."""
    try:
        return pending.wait(SETTLE_S)
    except TimeoutError:
        return None

"""Probes that use a tier hard: readers against writers, saves until the end, calls that make no sense."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from kvc_conformance.channel import Message
from kvc_conformance.child import Session
from kvc_conformance.probes.tier_made import (
    POISON,
    SETTLE_S,
    Arguments,
    Arrays,
    Made,
    begin_save,
    buffers_of,
    codes_of,
    keys_of,
    made_of,
    waited,
)
from kvcontract.core.pending import Pending
from kvcontract.tiers.base import Code, Lease, RecordKeys, SaveClass


def hammer(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Save records one after another while threads look them up and load them as fast as they can.

    Returns ``seen``: for each thing that a load reported as OK, the row and a digest of the bytes, with how
    often; and ``loads``.
    """
    made, lengths, stop = made_of(session, arguments), arguments["lengths"], threading.Event()
    keys, lock = keys_of(arrays["keys"]), threading.Lock()
    seen: dict[tuple[int, str], int] = {}
    current, failures = [0], list[BaseException]()

    def read() -> None:
        try:
            while not stop.is_set():
                row = current[0]
                with made.tier.lookup(keys[row : row + 1], math.inf).wait(SETTLE_S) as lease:
                    if not lease.present[0]:
                        continue
                    memory = np.full(lengths[row], POISON, np.uint8)
                    op = made.tier.load(
                        lease, np.array([0]), buffers_of(memory, [memory.nbytes], 1), math.inf
                    )
                    [code] = op.wait(SETTLE_S).tolist()
                if code == Code.OK:
                    found = row, hashlib.blake2b(memory.data).hexdigest()
                    with lock:
                        seen[found] = seen.get(found, 0) + 1
        except BaseException as error:  # noqa: BLE001 - told to the parent
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(arguments["threads"])]
    for thread in threads:
        thread.start()
    at, codes = 0, []
    for row, length in enumerate(lengths):
        current[0] = row
        one = {"keys": arrays["keys"][row : row + 1], "content": arrays["content"][at : at + length]}
        codes += codes_of(begin_save(made, {"lengths": [length]}, one)[0])["codes"]
        at += length
    stop.set()
    for thread in threads:
        thread.join(SETTLE_S)
    if failures:
        raise failures[0]
    body = [[row, digest, count] for (row, digest), count in seen.items()]
    return Message({"codes": codes, "seen": body})


def storm(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Save the records round and round in a thread, until the tier is closed or the process is killed."""
    made, lengths = made_of(session, arguments), arguments["lengths"]
    ends = np.cumsum([0, *lengths])

    def save_on() -> None:
        rng = np.random.default_rng(arguments["seed"])
        while not made.stop.is_set():
            rows = rng.permutation(len(lengths))[: 1 + int(rng.integers(4))]
            parts = [arrays["content"][ends[row] : ends[row + 1]] for row in rows]
            sizes = [part.nbytes for part in parts]
            one = {"keys": arrays["keys"][rows], "content": np.concatenate(parts)}
            codes_of(begin_save(made, {"lengths": sizes}, one)[0])
            if rng.random() < arguments["forget"]:
                lease = waited(made.tier.lookup(keys_of(arrays["keys"]), math.inf))
                if isinstance(lease, Lease):
                    with lease:
                        made.tier.discard(lease, np.flatnonzero(lease.present)[:2])

    thread = threading.Thread(target=save_on, daemon=True)
    made.threads.append(thread)
    thread.start()
    return Message({})


def misuse(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Call every verb with what makes no sense; the first record is there, the second is not.

    Returns ``tried``: per attempt its ``name``, what it ``raised``, whether it ``settled``, its ``codes``,
    how often a callback was ``called``; and ``escaped``: what no thread caught meanwhile.
    """
    made, length = made_of(session, arguments), arguments["lengths"][0]
    escaped: list[str] = []
    before = threading.excepthook
    threading.excepthook = lambda args: escaped.append(f"{args.exc_type.__name__}: {args.exc_value}")
    try:
        tried = [_try(name, call) for name, call in _attempts(made, keys_of(arrays["keys"]), length).items()]
    finally:
        threading.excepthook = before
    return Message({"tried": tried, "escaped": escaped})


def _try(name: str, call: Callable[[], Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "raised": None, "settled": True, "codes": None, "called": 1}
    try:
        answer = call()
    except Exception as error:  # noqa: BLE001 - what is asked for
        return {**found, "raised": f"{type(error).__name__}: {error}"}
    if not isinstance(answer, Pending):
        return {**found, "settled": answer is None}
    calls: list[Any] = []
    answer.on_done(calls.append)
    value = waited(answer)
    found |= {"settled": answer.done, "called": len(calls)}
    if isinstance(value, Lease):
        found["codes"] = [int(here) for here in np.asarray(value.present).tolist()]
        value.release()
    elif isinstance(value, np.ndarray):
        found["codes"] = value.astype(int).tolist()
    return found


def _attempts(made: Made, keys: RecordKeys, length: int) -> dict[str, Callable[[], Any]]:
    tier, memory = made.tier, np.full(4 * length + 64, POISON, np.uint8)
    lease = made.leases["misused"]
    ended = tier.lookup(keys, math.inf).wait(SETTLE_S)
    ended.release()
    foreign = Lease("somebody else's", np.ones(len(keys), np.bool_), receipt=object())

    def load(of: Lease, rows: list[int], sizes: list[int]) -> Callable[[], Any]:
        return lambda: tier.load(of, np.array(rows, np.int64), buffers_of(memory, sizes, 1), math.inf)

    def save(count: int, sizes: list[int]) -> Callable[[], Any]:
        given = keys[:count]
        return lambda: tier.save(given, buffers_of(memory, sizes, 1), SaveClass.CACHEABLE, math.inf)

    return {
        "load: row beyond the keys": load(lease, [len(keys)], [length]),
        "load: row below 0": load(lease, [-1], [length]),
        "load: absent record": load(lease, [1], [length]),
        "load: too short": load(lease, [0], [length - 1]),
        "load: too long": load(lease, [0], [length + 1]),
        "load: fewer buffers than rows": load(lease, [0, 0], [length]),
        "load: more buffers than rows": load(lease, [0], [length, length]),
        "load: no rows": load(lease, [], []),
        "load: released lease": load(ended, [0], [length]),
        "load: lease of another tier": load(foreign, [0], [length]),
        "load: lease on nothing": load(Lease.nothing(tier.name, 2), [0], [length]),
        "save: fewer buffers than keys": save(2, [length]),
        "save: more buffers than keys": save(1, [length, length]),
        "save: no records": save(0, []),
        "lookup: no keys": lambda: tier.lookup(keys[:0], math.inf),
        "lookup: no record keys": lambda: tier.lookup(cast("RecordKeys", np.zeros((2, 2), np.uint8)), 0.0),
        "discard: rows beyond the keys": lambda: tier.discard(lease, np.array([len(keys), -7])),
        "discard: lease of another tier": lambda: tier.discard(foreign, np.array([0])),
        "discard: absent record": lambda: tier.discard(lease, np.array([1])),
        "release_handoff: unknown": lambda: tier.release_handoff("nobody's"),
        "release_handoff: empty": lambda: tier.release_handoff(""),
        "flush: deadline long past": lambda: tier.flush("durable", -1.0),
    }

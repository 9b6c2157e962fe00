"""Probes on a tier: thin calls of its verbs, each waited for; nothing is judged here.

Every probe takes ``tier``, the name of one that lives in the child.  Keys travel as uint8[n, 21], records as
one flat array of bytes with their ``lengths``.  An operation that does not settle comes back as
``"settled": false``.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np

from kvc_conformance.channel import Message
from kvc_conformance.child import Session
from kvc_conformance.probes.tier_made import (
    GAP_BYTES,
    POISON,
    SETTLE_S,
    Arguments,
    Arrays,
    Made,
    MovingClock,
    begin_save,
    buffers_of,
    codes_of,
    keys_of,
    made_of,
    present_of,
    waited,
)
from kvcontract.contract.tier_context import TierContext
from kvcontract.tiers.base import (
    RECORD_KEY,
    Capabilities,
    Code,
    Lease,
    Level,
    Resets,
    SaveClass,
    TellsLosses,
    Tier,
)
from kvcontract.tiers.opening import opener


def load_plugin(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Import the plugin, and no more.  Returns ``built_in``."""
    del arguments, arrays
    return Message({"built_in": _opener(session)[1]})


def _opener(session: Session) -> tuple[Callable[[TierContext], Tier], bool]:
    job = session.job
    if "opener" not in session.objects:
        file = None if job["file"] is None else Path(job["file"])
        made, plugin = opener(job["name"], job["plugin_options"], file)
        if plugin is not None:
            home = Path(plugin.module.__file__ or "")
            job["homes"] = [str(home if job["file"] else home.parent)]
        session.objects["opener"] = made, plugin is None
    found: tuple[Callable[[TierContext], Tier], bool] = session.objects["opener"]
    return found


def build(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Open the tier over ``directory`` with ``capacity_bytes`` and ``handoff_ttl_s``.

    Returns what it says of itself, and ``lacks``: what of the protocol it does not have.
    """
    del arrays
    clock = MovingClock()
    ctx = TierContext(
        directory=Path(arguments["directory"]),
        capacity_bytes=arguments["capacity_bytes"],
        clock=clock,
        handoff_ttl_s=arguments.get("handoff_ttl_s", 60.0),
        meta={"max_tp": 8},
        options=session.job["plugin_options"],
    )
    tier = _opener(session)[0](ctx)
    session.objects[arguments["tier"]] = Made(tier, clock)
    lacks = [
        verb
        for verb in ("lookup", "load", "save", "discard", "flush", "release_handoff", "stats", "close")
        if not callable(getattr(tier, verb, None))
    ]
    name, can = getattr(tier, "name", None), getattr(tier, "capabilities", None)
    lacks += ["name"] * (not isinstance(name, str) or not name)
    lacks += ["capabilities"] * (not isinstance(can, Capabilities))
    return Message({"lacks": lacks, **(_said(tier) if not lacks else {})})


def _said(tier: Tier) -> dict[str, Any]:
    can = tier.capabilities
    return {
        "name": tier.name,
        "persistent": bool(can.persistent),
        "shared": bool(can.shared),
        "max_record_bytes": can.max_record_bytes,
        "handoff_release": can.handoff_release,
        "tells_losses": isinstance(tier, TellsLosses),
        "resets": isinstance(tier, Resets),
    }


def save(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Save records.  Returns their ``codes``, and whether the memory they came from is ``unchanged``."""
    made = made_of(session, arguments)
    op, content = begin_save(made, arguments, arrays)
    body = codes_of(op)
    return Message({**body, "unchanged": bool(np.array_equal(content, arrays["content"]))})


def save_and_flush(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Save each record in an operation of its own, without waiting, then flush to ``level`` and look.

    Returns ``flushed`` (what flush settled with) and ``done``: how many saves had settled by then.
    """
    made, lengths, at, ops = made_of(session, arguments), arguments["lengths"], 0, []
    for row, length in enumerate(lengths):
        one = {"keys": arrays["keys"][row : row + 1], "content": arrays["content"][at : at + length]}
        ops.append(begin_save(made, {"lengths": [length]}, one))
        at += length
    pending = made.tier.flush(cast("Level", arguments["level"]), made.deadline(arguments))
    flushed = waited(pending)
    done = sum(op.done for op, _ in ops)
    return Message({"flushed": flushed, "done": done, "codes": [codes_of(op)["codes"] for op, _ in ops]})


def save_and_close(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Begin saves, close at once, then try every verb.

    Returns ``closed``, ``done`` (saves that had settled by then) and what each verb came to ``after``.
    """
    made, keys = made_of(session, arguments), keys_of(arrays["keys"])
    lease = waited(made.tier.lookup(keys, math.inf))
    op, content = begin_save(made, arguments, arrays)
    closed = made.tier.close(made.clock() + SETTLE_S)
    done = op.done
    buffers = buffers_of(content, arguments["lengths"], 1)
    late = made.tier.save(keys, buffers, SaveClass.CACHEABLE, math.inf)
    found = waited(made.tier.lookup(keys, math.inf))
    after = {"save": codes_of(late)["codes"], "present": present_of(found)}
    if isinstance(lease, Lease):
        after["load"] = codes_of(made.tier.load(lease, np.arange(len(keys)), buffers, math.inf))["codes"]
        lease.release()
    again = made.tier.close(made.clock() + SETTLE_S)
    return Message({"closed": closed, "again": again, "done": done, "after": after})


def lookup(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Look keys up and keep the lease as ``id``.  Returns ``present``; null if nothing settled."""
    made = made_of(session, arguments)
    lease = waited(made.tier.lookup(keys_of(arrays["keys"]), made.deadline(arguments)))
    if isinstance(lease, Lease):
        made.leases[arguments["id"]] = lease
    return Message({"present": present_of(lease), "failed": bool(getattr(lease, "failed", False))})


def load(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Load ``rows`` of the lease ``id`` into poisoned memory; with ``release``, give it back meanwhile.

    Returns ``codes``; arrays: ``memory``, the records with a gap of poison behind each.
    """
    del arrays
    made, lengths = made_of(session, arguments), arguments["lengths"]
    memory = np.full(sum(lengths) + GAP_BYTES * len(lengths), POISON, np.uint8)
    buffers = buffers_of(memory, lengths, arguments.get("pieces", 1), GAP_BYTES)
    lease = made.leases[arguments["id"]]
    op = made.tier.load(lease, np.array(arguments["rows"], np.int64), buffers, made.deadline(arguments))
    if arguments.get("release"):
        made.leases.pop(arguments["id"]).release()
    return Message(codes_of(op), {"memory": memory})


def release(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Give the lease ``id`` back: ``how`` is by ``release``, or by ``drop``, which loses it."""
    del arrays
    made = made_of(session, arguments)
    lease = made.leases.pop(arguments["id"])
    if arguments.get("how") != "drop":
        lease.release()
    del lease
    gc.collect()
    return Message({})


def late_lookup(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Look keys up as one who gives up at once: whatever comes is released by the settlement (A2)."""
    made = made_of(session, arguments)
    pending = made.tier.lookup(keys_of(arrays["keys"]), math.inf)
    pending.on_done(Lease.release)
    return Message({"settled": waited(pending) is not None})


def crowd(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Save one content under key after key, one at a time.

    With ``lease`` each is leased as soon as it is there, and the first code that is not OK ends it.
    Returns ``codes``; the leases are kept as ``id``.
    """
    made, content = made_of(session, arguments), arrays["content"].copy()
    buffers, codes = buffers_of(content, [content.nbytes], 1), list[int]()
    handoff = arguments.get("handoff")
    cls = SaveClass.CACHEABLE if handoff is None else SaveClass.HANDOFF
    for row in range(len(arrays["keys"])):
        keys = keys_of(arrays["keys"][row : row + 1])
        op = made.tier.save(keys, buffers, cls, math.inf, handoff=handoff)
        codes += codes_of(op)["codes"] or [int(Code.FAILED)]
        if arguments.get("lease"):
            lease = waited(made.tier.lookup(keys, math.inf))
            if isinstance(lease, Lease):
                made.leases[f"{arguments['id']}-{row}"] = lease
        if (arguments.get("lease") or handoff is not None) and codes[-1] != Code.OK:
            break
    return Message({"codes": codes})


def release_all(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Give every lease back whose id begins with ``id``."""
    del arrays
    made = made_of(session, arguments)
    for name in [name for name in made.leases if name.startswith(arguments["id"])]:
        made.leases.pop(name).release()
    return Message({})


def discard(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Discard ``rows`` of the lease ``id``."""
    del arrays
    made = made_of(session, arguments)
    made.tier.discard(made.leases[arguments["id"]], np.array(arguments["rows"], np.int64))
    return Message({})


def flush(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Flush to ``level``.  Returns ``flushed``; null if nothing settled."""
    del arrays
    made = made_of(session, arguments)
    return Message({"flushed": waited(made.tier.flush(arguments["level"], made.deadline(arguments)))})


def release_handoff(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Release the handoff ``handoff``."""
    del arrays
    made_of(session, arguments).tier.release_handoff(arguments["handoff"])
    return Message({})


def advance(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Move the tier's clock on by ``seconds``."""
    del arrays
    made_of(session, arguments).clock.ahead_s += arguments["seconds"]
    return Message({})


def stats(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """The tier's figures."""
    del arrays
    found = made_of(session, arguments).tier.stats()
    return Message({"stats": {str(name): int(value) for name, value in found.items()}})


def reset(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Forget everything.  Returns ``reset``; null if nothing settled."""
    del arrays
    made = made_of(session, arguments)
    return Message({"reset": waited(cast("Resets", made.tier).reset(made.deadline(arguments)))})


def listen(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Keep what the tier tells of losses from now on."""
    del arrays
    made = made_of(session, arguments)
    cast("TellsLosses", made.tier).on_loss(lambda keys, why: made.told.append((keys.copy(), why)))
    return Message({})


def told(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """What the tier has told so far: arrays ``keys``, and ``reasons``, one a key."""
    del arrays
    told = list(made_of(session, arguments).told)
    keys = [np.frombuffer(keys.tobytes(), np.uint8) for keys, _ in told]
    flat = np.concatenate(keys) if keys else np.zeros(0, np.uint8)
    reasons = [why for keys, why in told for _ in range(len(keys))]
    return Message({"reasons": reasons}, {"keys": flat.reshape(-1, RECORD_KEY.itemsize)})


def close(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Close the tier and forget it.  Returns ``closed``."""
    del arrays
    made: Made = session.objects.pop(arguments["tier"])
    for lease in made.leases.values():
        lease.release()
    made.stop.set()
    for thread in made.threads:
        thread.join(SETTLE_S)
    return Message({"closed": made.tier.close(made.clock() + SETTLE_S) is True})

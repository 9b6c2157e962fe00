"""A seeded schedule: which of all that may go on in a world goes on next."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import count
from random import Random
from typing import Any, Final

from kvc_conformance.sim.node import Node
from kvc_conformance.sim.prompts import PARENTS, SCOPES
from kvc_conformance.sim.world import Action, World
from kvcontract.tiers.fault import FAULTS_OF

MOST_OPEN: Final = 5
MOST_LIVE: Final = 3
FAULTY: Final = 0.16
FAULTY_OF_MANY: Final = 0.05
"""Shares of answers that something befalls; of those to look-ups, where there are several for a boundary."""

IN_ORDER: Final = 0.6
"""Share of answers that come to the oldest call."""

STALE_LOADS: Final = 0.08
"""Share of loads that come too late, where states are among what is loaded."""

ALIKE: Final = (0, 0, 0, 1, 1, 2, 3)
"""Streams of prompts, where few boundaries lie that one could go on from."""

FULL_HIT: Final = 0.2
FULL_PAGES: Final = 0.5
OTHER_SCOPE: Final = 0.2
"""Shares of resolves; of full hits, those that may cover the prompt."""

HANDED_OFF: Final = 0.15
SEALED_AGAIN: Final = 0.3
REVERTED: Final = 0.06
"""Shares of seals, seals, and steps."""

PROMPT_END: Final = 0.8
BRANCHES: Final = 0.7
DECODING: Final = 0.6
INTERIOR: Final = 0.25
"""Shares of requests: where they are wanted to leave checkpoints, and how."""

WHOLE: Final = 0.7
TAKEN: Final = 0.9
BREAKING: Final = 0.06
"""Shares of steps: they end where there could be a checkpoint; it is taken at once; a copy of it fails."""

ALWAYS: Final[Mapping[str, float]] = {
    "wait": 0.7,
    "pin": 0.15,
    "drain": 1.2,
    "sleep": 0.08,
    "die": 0.04,
    "evict": 0.15,
    "crash": 0.07,
    "close": 0.04,
}
"""Weights of what can happen at any moment."""

DRAIN_BESIDE: Final = 0.8
"""Likewise, where nobody who runs keeps what others could go on from."""

PLAIN_DEADLINES_S: Final = (0.02, 2.0, 15.0, 15.0, 15.0)
FULL_DEADLINES_S: Final = (0.02, 0.2, 0.6)


class Schedule:
    """Draws actions.

    Args:
        rng: all randomness comes from it.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._ids = count()
        self._handoffs: list[str] = []

    def draw(self, world: World) -> Action:
        """One of the actions that fit the moment, as data."""
        rng = self._rng
        number = rng.randrange(len(world.nodes))
        node = world.nodes[number]
        weights = self._weights(world, node)
        kind = rng.choices(list(weights), list(weights.values()))[0]
        action: Action = {"do": kind, "node": number}
        getattr(self, f"_{kind}", _nothing)(action, world, node)
        return action

    def _weights(self, world: World, node: Node) -> dict[str, float]:
        calls = sum(len(front.ready(world.now)) for front in node.fronts if front.calls)
        weights = {**ALWAYS, **_of_callers(node)}
        if world.prompts.beside:
            weights["drain"] = DRAIN_BESIDE
        if self._handoffs:
            weights["release_handoff"] = 0.2
        if calls:
            weights["answer"] = 10.0 * math.sqrt(calls)
        if node.jobs:
            weights["lane"] = 10.0
        if not math.isinf(world.next_s):
            weights["tick"] = 0.05 if calls or node.jobs else 1.5
        weights["switch"] = 0.12 if node.cache and node.keep else 1.0
        weights["freeze"] = 0.7 if any(front.frozen for front in node.fronts) else 0.08
        return weights

    # What an action needs to know

    def _resolve(self, action: Action, world: World, node: Node) -> None:
        rng = self._rng
        full = rng.random() < FULL_HIT
        deadline = rng.choice(FULL_DEADLINES_S if full else PLAIN_DEADLINES_S)
        action |= {
            "id": next(self._ids),
            "rank": rng.randrange(len(node.pools)),
            "stream": rng.choice(ALIKE) if world.prompts.beside else rng.randrange(len(PARENTS)),
            "scope": int(rng.random() < OTHER_SCOPE) % len(SCOPES),
            "tokens": rng.randint(1, world.prompts.length - 1),
            "policy": {
                "deadline_s": deadline,
                "full_hit": full,
                "full_pages": full and rng.random() < FULL_PAGES,
            },
        }

    def _cancel(self, action: Action, world: World, node: Node) -> None:
        del world
        opened = [number for number, asked in node.asked.items() if not asked.task.done()]
        action |= {"id": self._rng.choice(opened), "how": self._rng.choice(("token", "token", "task"))}

    def _drop(self, action: Action, world: World, node: Node) -> None:
        del world
        action["id"] = self._rng.choice(_ready(node))

    def _begin(self, action: Action, world: World, node: Node) -> None:
        action |= {"id": self._rng.choice(_ready(node)), "new": self._rng.randint(1, 6)}
        if world.prompts.beside:
            action["checkpoints"] = self._checkpoints(world)

    def _checkpoints(self, world: World) -> dict[str, Any]:
        rng, length = self._rng, world.prompts.length
        return {
            "prompt_end": rng.random() < PROMPT_END,
            "branches": rng.random() < BRANCHES,
            "stops": sorted(rng.sample(range(1, length), rng.randint(0, 2))),
            "every": rng.choice((None, 1, 1, 1, 4)),
            "decoding": rng.random() < DECODING,
            "interior": rng.random() < INTERIOR,
        }

    def _step(self, action: Action, world: World, node: Node) -> None:
        running = [number for number, live in node.live.items() if not live.req.preempted]
        size, revert = self._rng.randint(1, 9), self._rng.random() < REVERTED
        action |= {"id": self._rng.choice(running), "size": size, "revert": revert}
        if world.prompts.beside:
            if self._rng.random() < WHOLE:
                live, granule = node.live[action["id"]], world.prompts.granule
                action["size"] = granule * self._rng.randint(1, 3) - live.req.committed_tokens % granule
            action["checkpoint"] = self._rng.random() < TAKEN
            action["breaking"] = self._rng.randrange(2) if self._rng.random() < BREAKING else None

    def _preempt(self, action: Action, world: World, node: Node) -> None:
        del world
        action["id"] = self._rng.choice(list(node.live))

    _resume = _release = _preempt

    def _seal(self, action: Action, world: World, node: Node) -> None:
        self._preempt(action, world, node)
        action |= {"handoff": self._handoff(action["id"]), "again": self._rng.random() < SEALED_AGAIN}

    def _retire(self, action: Action, world: World, node: Node) -> None:
        self._preempt(action, world, node)
        action["handoff"] = self._handoff(action["id"])

    def _handoff(self, request: int) -> str | None:
        if self._rng.random() >= HANDED_OFF:
            return None
        name = f"request {request}"
        if name not in self._handoffs:
            self._handoffs.append(name)
        return name

    def _wait(self, action: Action, world: World, node: Node) -> None:
        del world
        kinds = ["landed", "landed", "visible", "durable", "durable", "loads", "reset"]
        kinds += ["loads"] * (2 * any(call.verb == "load" for front in node.fronts for call in front.calls))
        kinds += ["handoff"] * bool(self._handoffs)
        kind = self._rng.choice(kinds)
        action |= {"id": next(self._ids), "for": kind, "deadline_s": self._rng.choice((0.01, 1.0, 20.0))}
        if kind == "handoff":
            action["handoff"] = self._rng.choice(self._handoffs)

    def _leave(self, action: Action, world: World, node: Node) -> None:
        del world
        action["id"] = self._rng.choice(list(node.waited))

    def _release_handoff(self, action: Action, world: World, node: Node) -> None:
        del world, node
        action["handoff"] = self._rng.choice(self._handoffs)

    def _pin(self, action: Action, world: World, node: Node) -> None:
        rng = self._rng
        action |= {
            "id": next(self._ids),
            "rank": rng.randrange(len(node.pools)),
            "stream": rng.randrange(len(PARENTS)),
            "scope": 0,
            "tokens": rng.randint(1, world.prompts.length - 1),
            "ttl_s": rng.choice((0.5, 30.0)),
        }

    def _unpin(self, action: Action, world: World, node: Node) -> None:
        del world
        action["id"] = self._rng.choice(list(node.pins))

    def _switch(self, action: Action, world: World, node: Node) -> None:
        del world
        off = [what for what, on in (("cache", node.cache), ("keep", node.keep)) if not on]
        what = off[0] if off else self._rng.choice(("cache", "keep"))
        action |= {"what": what, "on": bool(off)}

    def _answer(self, action: Action, world: World, node: Node) -> None:
        rng = self._rng
        tiers = [number for number, front in enumerate(node.fronts) if front.ready(world.now)]
        tier = rng.choice(tiers)
        ready = node.fronts[tier].ready(world.now)
        at = 0 if rng.random() < IN_ORDER else rng.randrange(len(ready))
        fault = None
        many = (
            world.prompts.beside and ready[at].verb == "lookup"
        )  # one for each part: so few go well together
        if rng.random() < (FAULTY_OF_MANY if many else FAULTY):
            kinds = [str(kind) for kind in FAULTS_OF[ready[at].verb]]
            fault = rng.choice([*kinds, *kinds, "stale", "delay", "delay"])
        elif world.prompts.beside and ready[at].verb == "load" and rng.random() < STALE_LOADS:
            fault = "stale"
        action |= {"tier": tier, "call": at, "fault": fault, "at": rng.randrange(8)}
        if fault == "delay":
            action["delay_s"] = rng.choice((0.03, 0.3, 20.0))

    def _sleep(self, action: Action, world: World, node: Node) -> None:
        del world, node
        action["seconds"] = self._rng.choice((0.05, 3.0, 70.0))

    def _freeze(self, action: Action, world: World, node: Node) -> None:
        del world
        tier = self._rng.randrange(len(node.fronts))
        action |= {"tier": tier, "on": not node.fronts[tier].frozen}

    def _die(self, action: Action, world: World, node: Node) -> None:
        del world
        action["tier"] = self._rng.randrange(len(node.fronts))

    def _evict(self, action: Action, world: World, node: Node) -> None:
        self._die(action, world, node)
        action["at"] = self._rng.randrange(64)

    def _crash(self, action: Action, world: World, node: Node) -> None:
        del world, node
        action["mask"] = self._rng.randrange(1 << 16)

    def _close(self, action: Action, world: World, node: Node) -> None:
        del world, node
        action["deadline_s"] = self._rng.choice((0.5, 10.0))


def _of_callers(node: Node) -> dict[str, float]:
    """Weights of what callers may do with what they have of a process."""
    asked, live, weights = node.asked.values(), len(node.live), {}
    opened = sum(not item.task.done() for item in asked)
    ready = sum(item.prefix is not None for item in asked)
    running = sum(not item.req.preempted for item in node.live.values())
    if len(asked) < MOST_OPEN:
        weights["resolve"] = 3.0
    if opened:
        weights["cancel"] = 0.25 * opened
    if ready:
        weights["drop"] = 0.35 * ready
    if ready and live < MOST_LIVE:
        weights["begin"] = 2.5
    if running:
        weights |= {"step": 2.5 * running, "preempt": 0.1 * running, "seal": 0.6 * running}
    if live:
        weights |= {"retire": 0.8 * live, "release": 0.08 * live}
    if live > running:
        weights["resume"] = 1.5 * (live - running)
    if node.waited:
        weights["leave"] = 0.3 * len(node.waited)
    if node.pins:
        weights["unpin"] = 0.2 * len(node.pins)
    return weights


def _ready(node: Node) -> list[int]:
    return [number for number, asked in node.asked.items() if asked.prefix is not None]


def _nothing(action: Action, world: World, node: Node) -> None:
    """The action says all."""
    del action, world, node

"""What befalls a simulated world: answers and their faults, time, losses, crashes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kvc_conformance.sim.front import Front
from kvc_conformance.sim.node import Node, relayed
from kvc_conformance.sim.watch import SLACK_S
from kvcontract.contract.errors import UsageFault
from kvcontract.core.lane import ManualLane
from kvcontract.tiers.base import key_bytes
from kvcontract.tiers.fault import FAULTS_OF, Fault, FaultKind

if TYPE_CHECKING:
    from kvc_conformance.sim.world import Action, World

_MASK_BITS: Final = 16


def answer(world: World, action: Action) -> bool:
    """A tier answers one of its calls, maybe with a fault."""
    node, front = _front(world, action)
    ready = front.ready(world.now)
    if not ready:
        return False
    call, fault = ready[action["call"] % len(ready)], action["fault"]
    if fault == "stale":
        if math.isinf(call.deadline):
            return False
        world.judge.fault(f"stale {call.verb}")
        world.loop.advance(call.deadline + 2 * SLACK_S)
        if call in front.calls:
            world.answer(node, front, call, None)
    elif fault == "delay":
        world.judge.fault(f"delay {call.verb}")
        front.late[call] = world.now + action["delay_s"]
    else:
        chosen = None if fault is None else Fault(FaultKind(fault), action["at"])
        if chosen is not None and chosen.kind not in FAULTS_OF[call.verb]:
            return False  # in a trace that was cut down, another call may stand at this place
        if chosen is not None:
            world.judge.fault(f"{fault} {call.verb}")
        elif call is not ready[0]:
            world.judge.fault(f"overtake {call.verb}")
        world.answer(node, front, call, chosen)
    return True


def lane(world: World, action: Action) -> bool:
    """Run the next copy of a process."""
    node = world.node(action)
    return isinstance(node.lane, ManualLane) and node.lane.step()


def tick(world: World, _: Action) -> bool:
    """Move time to the next thing that is due."""
    ahead = world.next_s
    if math.isinf(ahead):
        return False
    world.loop.advance(ahead)
    return True


def sleep(world: World, action: Action) -> bool:
    """Move time on."""
    world.loop.advance(world.now + action["seconds"])
    return True


def freeze(world: World, action: Action) -> bool:
    """A tier stops, or goes on, answering one process."""
    _, front = _front(world, action)
    if front.frozen == action["on"]:
        return False
    front.frozen = action["on"]
    if front.frozen:
        world.judge.fault("freeze")
    return True


def die(world: World, action: Action) -> bool:
    """The place behind a tier dies, with all it has, and comes back empty."""
    _, front = _front(world, action)
    world.judge.fault("die")
    front.inner.untold = True
    for node in world.nodes:
        for item in node.fronts:
            if item.inner is front.inner:
                item.late.clear()
                for call in item.calls:
                    world.watch(node, item, call, Fault(FaultKind.FAIL))
                item.lose()
    return True


def evict(world: World, action: Action) -> bool:
    """A tier drops one record behind everybody's back."""
    _, front = _front(world, action)
    kept = sorted(front.inner.kept)
    if not kept:
        return False
    world.judge.fault("evict")
    front.inner.drop([kept[action["at"] % len(kept)]])
    return True


def crash(world: World, action: Action) -> bool:
    """A process dies and starts again: what was in flight lands or does not, what was unflushed may go."""
    node, mask = world.node(action), action["mask"]
    world.judge.fault("crash")
    for front in node.fronts:
        calls, front.calls = front.calls, []
        if not front.inner.setting.shared:
            continue
        for at, call in enumerate(calls):
            if call.verb == "save" and call.buffers is not None and _bit(mask, at):
                if relayed(call):
                    front.inner.doubtful.update(node.tainted.intersection(key_bytes(call.keys)))
                front.inner.save(call.keys, call.buffers, call.cls, math.inf, handoff=call.handoff)
        unflushed = sorted(front.inner.kept - front.inner.durable)
        front.inner.drop([name for at, name in enumerate(unflushed) if _bit(mask, at + 1)])
    world.replace(node)
    return True


def close(world: World, action: Action) -> bool:
    """A process closes its store, and opens another."""
    node = world.node(action)
    for live in node.live.values():
        with live.req:
            pass
    node.live.clear()
    task = world.loop.create_task(node.store.aclose(action["deadline_s"]))
    end = world.now + action["deadline_s"]
    world.loop.settle()
    while not task.done() and world.now <= end:
        if not world.serve(node):
            world.loop.advance(min(end + SLACK_S, world.next_s))
    world.judge.holds("C10", ok=task.done(), text="close did not end by its deadline")
    if not task.done():
        return True
    report = task.result()
    world.judge.reached("close drained" if report.drained else "close leaked")
    late = [asked for asked in node.asked.values() if not asked.task.done()]
    world.judge.holds("C10", ok=not late, text=f"{len(late)} resolves outlived their store")
    more = world.loop.create_task(node.store.resolve_prefix("0", world.prompts.tokens(0, 3)))
    world.loop.settle()
    refused = more.done() and isinstance(more.exception(), UsageFault)
    world.judge.holds("C10", ok=refused, text="a closed store took new work")
    world.replace(node)
    return True


def _front(world: World, action: Action) -> tuple[Node, Front]:
    node = world.node(action)
    return node, node.fronts[action["tier"] % len(node.fronts)]


def _bit(mask: int, at: int) -> bool:
    return bool(mask >> at % _MASK_BITS & 1)


VERBS: Final[dict[str, Callable[[World, Any], bool]]] = {
    item.__name__: item for item in (answer, lane, tick, sleep, freeze, die, evict, crash, close)
}

"""What callers do in a simulated world: resolve, admit, run, seal, retire, wait at barriers, turn switches.

Each function does one action, and says whether it fitted the moment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kvc_conformance.sim import beside
from kvc_conformance.sim.node import Asked, Live, Saved, Waited
from kvc_conformance.sim.prompts import SCOPES
from kvcontract.core.pending import Pending
from kvcontract.pool.checkpoints import NO_CHECKPOINTS, CheckpointPolicy, Checkpoints
from kvcontract.pool.handles import Later
from kvcontract.pool.request import RequestKv, admit
from kvcontract.store.policy import CancelToken, ResolvePolicy
from kvcontract.store.saves import SealReport
from kvcontract.tiers.base import SaveClass

if TYPE_CHECKING:
    from kvc_conformance.sim.node import Node
    from kvc_conformance.sim.world import Action, World


def resolve(world: World, action: Action) -> bool:
    """Ask for a prefix."""
    node, policy = world.node(action), ResolvePolicy(**action["policy"])
    if action["id"] in node.asked or action["id"] in node.live:
        return False
    rank, stream, scope = action["rank"] % len(node.pools), action["stream"], action["scope"]
    count, token = min(action["tokens"], world.prompts.length - 1), CancelToken()
    tokens = world.prompts.tokens(stream, count)
    work = node.store.resolve_prefix(str(rank), tokens, SCOPES[scope], policy, cancel=token)
    node.asked[action["id"]] = Asked(
        rank=rank,
        stream=stream,
        scope=scope,
        count=count,
        policy=policy,
        deadline=world.now + policy.deadline_s,
        begun=world.step,
        token=token,
        task=world.loop.create_task(work),
        cached=node.cache,
    )
    return True


def cancel(world: World, action: Action) -> bool:
    """End a resolve early, by its token or its task."""
    asked = world.node(action).asked.get(action["id"])
    if asked is None or asked.task.done():
        return False
    asked.cancelled = True
    if action["how"] == "token":
        asked.token.cancel()
    else:
        asked.task.cancel()
    return True


def drop(world: World, action: Action) -> bool:
    """Give a prefix back unconsumed."""
    node = world.node(action)
    asked = node.asked.get(action["id"])
    if asked is None or asked.prefix is None:
        return False
    asked.prefix.release()
    del node.asked[action["id"]]
    return True


def begin(world: World, action: Action) -> bool:
    """Admit the request of a resolve."""
    node = world.node(action)
    asked = node.asked.get(action["id"])
    if asked is None or asked.prefix is None:
        return False
    whole = asked.prefix.hit_tokens == asked.count  # then another engine has sampled the token after it
    answer = admit(
        node.pools[asked.rank],
        prompt_tokens=world.prompts.tokens(asked.stream, asked.count),
        max_new_tokens=max(1, min(action["new"], world.prompts.length - asked.count)),
        keyer=node.store.keyer,
        scope=SCOPES[asked.scope],
        prefix=asked.prefix,
        anchor=world.prompts.token(asked.stream, asked.count) if whole else None,
        checkpoints=_checkpoints(world, asked, action.get("checkpoints")),
    )
    if isinstance(answer, Later):
        world.judge.reached("admission later")
        return True
    if isinstance(answer, RequestKv):
        world.judge.reached("admission ok")
        node.live[action["id"]] = Live(asked.rank, asked.stream, asked.scope, answer, world.step)
    else:
        world.judge.reached("admission never")
        asked.prefix.release()
    del node.asked[action["id"]]
    return True


def _checkpoints(world: World, asked: Asked, wanted: dict[str, Any] | None) -> Checkpoints:
    """Where a request is wanted to leave states, as an engine would ask."""
    if wanted is None or not world.prompts.beside:
        return NO_CHECKPOINTS
    policy = CheckpointPolicy(wanted["prompt_end"], wanted["branches"], wanted["every"], wanted["decoding"])
    branches = [*wanted["stops"], *(() if asked.prefix is None else asked.prefix.branches)]
    return policy.of(world.prompts.granule, asked.count, branches, interior=wanted["interior"])


def step(world: World, action: Action) -> bool:
    """Run one step of a request; maybe it comes to nothing."""
    node = world.node(action)
    live = node.live.get(action["id"])
    if live is None or live.req.preempted or (live.req.finished and not live.req.prefilling):
        return False
    world.check_rows(node, live)
    req = live.req
    chunk = req.schedule_prefill(action["size"]) if req.prefilling else req.schedule_decode()
    pages = req.pages.tolist()
    world.judge.holds("B21", ok=0 not in pages, text=f"a request was given page 0: {pages}")
    beside.scheduled(world, chunk)
    node.run(live, chunk, fails=action["revert"])
    if action["revert"]:
        req.revert(chunk)
        if req.beside.slots and not req.finished:
            req.preempt()  # what a step that has begun has done to a state cannot be undone
        world.judge.reached("step reverted")
        return True
    known = len(req.tokens)
    req.apply_prefill(chunk, world.prompts.token(live.stream, known) if chunk.emits else None)
    world.judge.reached("step ok")
    if action.get("checkpoint", True):
        beside.checkpoint(world, node, live, action.get("breaking"))
    return True


def preempt(world: World, action: Action) -> bool:
    """Take a request's pages; it goes on later."""
    live = world.node(action).live.get(action["id"])
    if live is None or live.req.preempted or live.req.finished:
        return False
    live.req.preempt()
    world.judge.reached("request preempted")
    return True


def resume(world: World, action: Action) -> bool:
    """Go on with what is resident."""
    live = world.node(action).live.get(action["id"])
    if live is None or not live.req.preempted:
        return False
    answer = live.req.resume()
    world.judge.reached("resume ok" if answer is None else "resume later")
    return True


def seal(world: World, action: Action) -> bool:
    """Save what is complete; with `again`, at once once more, which must do nothing (C9)."""
    node = world.node(action)
    live = node.live.get(action["id"])
    if live is None or live.req.preempted:
        return False
    handoff = action["handoff"]
    cls = SaveClass.CACHEABLE if handoff is None else SaveClass.HANDOFF
    report = node.store.seal(live.req, cls, handoff=handoff)
    _watch(world, node, report, handoff=handoff is not None)
    if action["again"] and handoff is None:
        before = sum(len(front.calls) for front in node.fronts) + node.jobs
        again = node.store.seal(live.req)
        calls = sum(len(front.calls) for front in node.fronts) + node.jobs - before
        if not calls:
            world.judge.holds("C9", ok=again.done, text="a seal with nothing new did not end at once")
        elif not report.done:  # what is under way is not saved again; shed pages may be
            shed = node.store.stats().counters.get("pages_not_saved_shed", 0)
            world.judge.holds("C9", ok=bool(shed), text="a second seal with nothing new saved something")
        _watch(world, node, again, handoff=False)
    return True


def retire(world: World, action: Action) -> bool:
    """Save the rest and let go."""
    node = world.node(action)
    live = node.live.pop(action["id"], None)
    if live is None:
        return False
    if live.req.preempted:
        live.req.release()
        world.judge.reached("request released")
        return True
    world.check_rows(node, live)
    handoff, owed, rooms = action["handoff"], world.owed(node, live), beside.rooms(live.req)
    cls = SaveClass.CACHEABLE if handoff is None else SaveClass.HANDOFF
    report = node.store.retire(live.req, cls, handoff=handoff)
    world.judge.holds("C6", ok=live.req.released, text="retire left the request unreleased")
    world.judge.reached("request retired")
    if node.cache and handoff is None:
        world.owe(node, owed | dict(beside.owed(node, live.req, rooms)), report)
    _watch(world, node, report, handoff=handoff is not None)
    return True


def release(world: World, action: Action) -> bool:
    """Let go without saving."""
    node = world.node(action)
    live = node.live.pop(action["id"], None)
    if live is None:
        return False
    if not live.req.preempted:
        world.check_rows(node, live)
    live.req.release()
    world.judge.reached("request released")
    return True


def _watch(world: World, node: Node, report: Pending[SealReport], *, handoff: bool) -> None:
    """Judge what a save comes to."""
    node.saves = [item for item in node.saves if not item.report.done]
    node.saves.append(Saved(report))

    def ended(value: SealReport) -> None:
        if not value.pages:
            return
        world.judge.reached("save ok" if value.saved == value.pages else "save failed")
        world.judge.counts.terminals["save shed"] += "shed" in value.failed
        if handoff:
            world.judge.holds("C5", ok="shed" not in value.failed, text=f"a handoff was shed: {value}")
        told = value.saved + sum(value.failed.values())
        world.judge.holds("R8", ok=told == value.pages, text=f"a save of {value.pages} pages told {value}")

    report.on_done(ended)


# Barriers and switches


def wait(world: World, action: Action) -> bool:
    """Wait for saves, loads, a handoff, or the moment for a reset."""
    node, kind, deadline_s = world.node(action), action["for"], action["deadline_s"]
    if action["id"] in node.waited:
        return False
    if kind == "loads":
        work: Any = node.store.flush_loads(deadline_s)
    elif kind == "reset":
        work = node.store.areset(deadline_s=deadline_s)
    elif kind == "handoff":
        work = node.store.aflush_handoff(action["handoff"], deadline_s)
    else:
        work = node.store.flush_saves(kind, deadline_s)
    durable = {front.name: front.acknowledged.copy() for front in node.fronts} if kind == "durable" else {}
    node.waited[action["id"]] = Waited(
        kind=kind,
        task=world.loop.create_task(work),
        deadline=world.now + deadline_s,
        begun=world.step,
        saves=tuple(item for item in node.saves if not item.report.done),
        relays=node.relays(),
        acknowledged=durable,
        resets={front.name: front.resets for front in node.fronts},
    )
    return True


def leave(world: World, action: Action) -> bool:
    """Whoever waits at a barrier goes away."""
    waited = world.node(action).waited.get(action["id"])
    if waited is None or waited.task.done():
        return False
    waited.cancelled = True
    waited.task.cancel()
    return True


def release_handoff(world: World, action: Action) -> bool:
    """The other side has its copy."""
    world.node(action).store.release_handoff(action["handoff"])
    return True


def pin(world: World, action: Action) -> bool:
    """Keep what is resident of a prompt for a while."""
    node = world.node(action)
    if action["id"] in node.pins:
        return False
    rank, tokens = action["rank"] % len(node.pools), world.prompts.tokens(action["stream"], action["tokens"])
    made = node.store.pin(str(rank), tokens, SCOPES[action["scope"]], ttl_s=action["ttl_s"])
    node.pins[action["id"]] = made.id
    return True


def unpin(world: World, action: Action) -> bool:
    """End a pin."""
    node = world.node(action)
    if action["id"] not in node.pins:
        return False
    node.store.unpin(node.pins.pop(action["id"]))
    return True


def switch(world: World, action: Action) -> bool:
    """Turn prefix caching or retention on or off."""
    node, on = world.node(action), action["on"]
    if action["what"] == "cache":
        node.cache = on
        node.store.set_prefix_cache(on)
    else:
        node.keep = on
        node.store.set_retention(on)
    return True


def drain(world: World, action: Action) -> bool:
    """Drop what a device keeps."""
    node = world.node(action)
    if not (node.cache and node.keep):
        return False
    node.store.set_retention(False)
    node.store.set_retention(True)
    return True


VERBS: Final[dict[str, Callable[[World, Action], bool]]] = {
    item.__name__: item
    for item in (
        resolve,
        cancel,
        drop,
        begin,
        step,
        preempt,
        resume,
        seal,
        retire,
        release,
        wait,
        leave,
        release_handoff,
        pin,
        unpin,
        switch,
        drain,
    )
}

"""The end of a simulated world: all that is open is ended, and nothing may be left (R8)."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Final

from kvc_conformance.sim import beside
from kvc_conformance.sim.node import Asked, Node
from kvc_conformance.sim.prompts import PARENTS, SCOPES
from kvcontract.store.policy import CancelToken, ResolvePolicy

if TYPE_CHECKING:
    from kvc_conformance.sim.world import World

MOST_ROUNDS: Final = 600


def finish(world: World) -> None:
    """End all that is open, and judge what is left."""
    for node in world.nodes:
        node.store.set_prefix_cache(True)
        node.store.set_retention(True)
        node.cache = node.keep = True
        for front in node.fronts:
            front.frozen = False
        for asked in node.open:
            if asked.policy.full_hit:  # nobody will produce what it waits for
                asked.cancelled = True
                asked.token.cancel()
    world.loop.settle()
    _serve_all(world)
    for node in world.nodes:
        _let_go(world, node)
    _serve_all(world)
    for node in world.nodes:
        _idle(world, node)
        _restore(world, node)
        _idle(world, node)
    world.judge.raise_found()


def _serve_all(world: World) -> None:
    """Serve until nobody waits for anything."""
    for _ in range(MOST_ROUNDS):
        served = [world.serve(node) for node in world.nodes]
        world.look(audit=False)
        if any(served):
            continue
        waits = any(
            node.open or node.waited or any(front.calls for front in node.fronts) for node in world.nodes
        )
        if not waits or math.isinf(world.next_s):
            return
        world.loop.advance(world.next_s)
    world.judge.broken("R5", f"still something to do after {MOST_ROUNDS} rounds")


def _let_go(world: World, node: Node) -> None:
    for asked in node.asked.values():
        if asked.prefix is not None:
            asked.prefix.release()
    node.asked.clear()
    for live in node.live.values():
        if not live.req.preempted:
            world.check_rows(node, live)
            node.store.retire(live.req)
        else:
            live.req.release()
    node.live.clear()
    for pin in node.pins.values():
        node.store.unpin(pin)
    node.pins.clear()


def relays(world: World, node: Node) -> None:
    """How the relays of a process have ended; it has none any more, or is gone."""
    ended: Counter[str] = Counter()
    for name, count in node.store.stats().counters.items():
        for what in ("pages_to_relay", "pages_relayed", "pages_not_relayed"):
            ended[what] += count * name.startswith(f"{what}_")
        world.judge.counts.terminals["relay lost"] += count * name.startswith("relays_lost_")
    world.judge.counts.terminals["relay ok"] += ended["pages_relayed"]
    world.judge.counts.terminals["relay failed"] += ended["pages_not_relayed"]
    begun, left = ended["pages_to_relay"], node.store.gauges()["relays"]
    told = ended["pages_relayed"] + ended["pages_not_relayed"] + left
    world.judge.holds("R8", ok=begun == told, text=f"{begun} pages were to be relayed, {told} are told of")


def _idle(world: World, node: Node) -> None:
    judge = world.judge
    relays(world, node)
    gauges = {name: count for name, count in node.store.gauges().items() if count}
    judge.holds("R8", ok=not gauges, text=f"nothing goes on, and still: {gauges}")
    for rank, whole in enumerate(node.pools):
        whole.check_books()
        for pool in node.pools_of(rank):
            now = pool.gauges()
            left = now.held, now.pinned, now.entitled, now.requests, now.holds, now.reservations
            judge.holds("R8", ok=not any(left), text=f"nothing goes on, and still: {now}")
    beside.findable(world, node)
    for front in node.fronts:
        stats = front.stats()
        judge.holds("A6", ok=not stats["leases"], text=f"{front.name}: {stats['leases']} leases are left")
        judge.holds("R8", ok=not stats["operations"], text=f"{front.name}: operations are left")


def _restore(world: World, node: Node) -> None:
    """With nothing on the device, what tiers have comes back as it was, or not at all (R7)."""
    node.store.set_retention(False)
    node.store.set_retention(True)
    for stream in (world.step % len(PARENTS),):
        scope, rank = stream % len(SCOPES), stream % len(node.pools)
        tokens = world.prompts.tokens(stream, world.prompts.length - 1)
        policy, deadline = ResolvePolicy(deadline_s=5.0), world.now + 5.0
        work = node.store.resolve_prefix(str(rank), tokens, SCOPES[scope], policy)
        task = world.loop.create_task(work)
        asked = Asked(rank, stream, scope, len(tokens), policy, deadline, world.step, CancelToken(), task)
        node.asked[-1 - stream] = asked
        _serve_all(world)
        if asked.prefix is not None:
            hold, hit = asked.prefix.hold, asked.prefix.hit_tokens
            right = node.right(asked, [] if hold is None else hold.pages.tolist(), hit)
            world.judge.holds("R7", ok=right, text=f"stream {stream} came back from the tiers as another")
            if hit:
                beside.hit(world, node, asked, hold, hit)
            world.judge.reached("restored" if asked.prefix.hit_tokens else "not restored")
            asked.prefix.release()
        node.asked.clear()
    _serve_all(world)

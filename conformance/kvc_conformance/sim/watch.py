"""What must hold in a simulated world: after each step, of each answer, and in the end."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from kvc_conformance.sim import beside
from kvc_conformance.sim.front import Front
from kvc_conformance.sim.node import Asked, Node, Waited, part_of, record_names, relayed
from kvc_conformance.sim.prompts import SPACE
from kvcontract.contract.errors import UsageFault
from kvcontract.store.control import ResetReport
from kvcontract.store.policy import KvPrefix
from kvcontract.store.tier_policy import SAVE_DEADLINE_S
from kvcontract.tiers.base import Code, Codes, key_bytes
from kvcontract.tiers.fault import Call, Fault

if TYPE_CHECKING:
    from kvc_conformance.sim.world import World

SLACK_S: Final = 1e-6
CALLS_EVERY: Final = 2
"""Steps from one look at what tiers copy to the next: it goes on for longer than one."""

REASONS: Final = {
    "answered for": "A15",
    "lookup failed": "A10",
    "timed out": "A1",
    "full hit did not land": "A7",
    "no room": "A18",
    "corrupt": "E7",
    "what another is loading": "A16",
    "a reset was under way": "C11",
}
"""Reasons of a shorter hit that show a clause at work."""


def look(world: World, node: Node) -> None:
    """Judge one process after a step."""
    for number, asked in list(node.asked.items()):
        _look_at_resolve(world, node, number, asked)
    for number, waited in list(node.waited.items()):
        _look_at_barrier(world, node, number, waited)
    _look_at_gauges(world, node)


def _look_at_resolve(world: World, node: Node, number: int, asked: Asked) -> None:
    judge = world.judge
    if not asked.task.done():
        if asked.cancelled:
            judge.broken("A11", "a cancelled resolve did not end at once")
        judge.holds("R5", ok=world.now <= asked.deadline + SLACK_S, text="a resolve outlived its deadline")
    elif not asked.judged:
        asked.judged = True
        _answered(world, node, number, asked)


def _answered(world: World, node: Node, number: int, asked: Asked) -> None:
    judge = world.judge
    if asked.task.cancelled():
        judge.holds("A11", ok=asked.cancelled, text="a resolve was cancelled by nobody")
        judge.reached("resolve cancelled")
        del node.asked[number]
        return
    error = asked.task.exception()
    if error is not None:
        judge.holds("A24", ok=isinstance(error, UsageFault) and asked.policy.full_hit, text=repr(error))
        judge.reached("resolve refused")
        del node.asked[number]
        return
    _prefix(world, node, asked, asked.task.result())
    if asked.prefix is not None and asked.cancelled:
        asked.prefix.release()
        del node.asked[number]


def _prefix(world: World, node: Node, asked: Asked, prefix: KvPrefix) -> None:
    judge, page, hit = world.judge, world.prompts.page, prefix.hit_tokens
    pages = [] if prefix.hold is None else prefix.hold.pages.tolist()
    asked.prefix = prefix
    judge.holds("A13", ok=len(pages) * page == hit, text=f"a hit of {hit} tokens holds {len(pages)} pages")
    limit = (asked.count - (not asked.policy.full_pages)) // page * page
    judge.holds("A12", ok=hit <= limit, text=f"a hit of {hit} tokens of {asked.count}")
    judge.holds("I6", ok=sum(prefix.sources.values()) == hit, text=f"{dict(prefix.sources)} for {hit} tokens")
    if not asked.cached:
        judge.holds("B12", ok=not hit, text=f"prefix caching is off, and a resolve hit {hit} tokens")
    judge.holds("B21", ok=0 not in pages, text=f"a hit on page 0: {pages}")
    for part, clause in REASONS.items():
        judge.counts.seen[clause] += any(part in reason for reason in prefix.degraded)
    if asked.cancelled:
        judge.holds("A11", ok=hit == 0, text=f"a cancelled resolve hit {hit} tokens")
        judge.reached("resolve cancelled")
        return
    judge.reached("resolve degraded" if prefix.degraded else "resolve hit" if hit else "resolve miss")
    if hit:
        clause = "D2" if asked.scope else "R2" if node.tp > 1 else "R4"
        right = node.right(asked, pages, hit)
        judge.holds(clause, ok=right, text=f"a hit of {hit} tokens of stream {asked.stream} holds other rows")
        beside.hit(world, node, asked, prefix.hold, hit)
        early = [item for item in node.waited.values() if item.kind == "reset" and not item.task.done()]
        passed = any(item.begun < asked.begun and not item.cancelled for item in early)
        judge.holds("C11", ok=not passed, text="a resolve passed a reset that was asked for before it")


def _look_at_barrier(world: World, node: Node, number: int, waited: Waited) -> None:
    judge = world.judge
    if not waited.task.done():
        judge.holds(
            "R5", ok=world.now <= waited.deadline + SLACK_S, text=f"{waited.kind} outlived its deadline"
        )
        return
    del node.waited[number]
    if waited.task.cancelled():
        judge.reached("barrier left")
        return
    error = waited.task.exception()
    if error is not None:
        judge.broken("C8", f"{waited.kind} raised {error!r}")
        return
    value = waited.task.result()
    if isinstance(value, ResetReport):
        _reset(world, node, waited, value)
    elif waited.kind == "handoff":
        whole = not value.settled or value.saved + sum(value.failed.values()) == value.pages
        judge.holds("C7", ok=whole, text=f"a handoff whose pages are not all told of: {value}")
        judge.reached("handoff settled" if value.settled else "handoff not settled")
    else:
        judge.reached(f"{waited.kind} {'reached' if value else 'missed'}")
        if value is True and waited.kind != "loads":
            _reached(world, node, number, waited)


def _reached(world: World, node: Node, number: int, waited: Waited) -> None:
    judge, kind = world.judge, waited.kind
    open_ = sum(not item.report.done for item in waited.saves)
    judge.holds("C8", ok=not open_, text=f"{kind}, and {open_} saves from before have not settled")
    open_ = sum(not item.done for item in waited.relays)
    judge.holds("C8", ok=not open_, text=f"{kind}, and {open_} relays from before have not ended")
    flushes = ("landed", "visible", "durable")
    ahead = [
        n for n, item in node.waited.items() if n < number and item.kind in flushes and not item.task.done()
    ]
    judge.holds("C8", ok=not ahead, text=f"{kind} was told before {len(ahead)} barriers that came first")
    if kind == "durable":
        for front in node.fronts:
            if front.inner.setting.shared:
                shelf = front.inner
                told = waited.acknowledged[front.name].items()
                lost = {name for name, losses in told if shelf.losses[name] == losses} - shelf.durable
                judge.holds("C8", ok=not lost, text=f"durable, and a crash would lose {len(lost)} records")


def _reset(world: World, node: Node, waited: Waited, report: ResetReport) -> None:
    judge = world.judge
    judge.reached("reset done" if report.done else "reset not done")
    if not report.done:
        return
    node.landed.clear()
    for front in node.fronts:
        front.owed.clear()
    active = [live for live in node.live.values() if live.begun < waited.begun and not live.req.preempted]
    earlier = [asked for asked in node.asked.values() if asked.begun < waited.begun and not asked.task.done()]
    saves = [item for item in waited.saves if not item.report.done]
    relays = [item for item in waited.relays if not item.done]
    going = len(active) + len(earlier) + len(saves) + len(relays)
    judge.holds("C11", ok=not going, text=f"a reset ran while {going} things from before went on")
    left = sum(pool.gauges().cached for rank in range(len(node.pools)) for pool in node.pools_of(rank))
    judge.holds("C11", ok=not left, text=f"a reset ran, and {left} pages are still kept on the device")
    for front in node.fronts:
        asked, told = front.resets > waited.resets[front.name], front.name in report.tiers
        judge.holds(
            "C11", ok=asked or not told, text=f"{front.name} is said to have forgotten, and was not asked"
        )
        named = told or front.name in report.missed
        judge.holds("C11", ok=named, text=f"a reset ran, and nothing is said of {front.name}")


def _look_at_gauges(world: World, node: Node) -> None:
    """What must hold all the time; what costs much is only looked at where it could be otherwise."""
    judge, calls = world.judge, any(front.calls for front in node.fronts)
    for space, pools in node.watched:
        for pool in pools:
            books, entitled = pool._books, pool._owed()  # noqa: SLF001 - after every step: gauges() takes a lock
            if books.free + books.cached + books.held != books.total:
                judge.broken("R8", f"free + cached + held is not total in {space.key}: {pool.gauges()}")
            if entitled > books.free + books.cached:
                judge.broken("B5", f"promises are above what is available in {space.key}: {pool.gauges()}")
    judge.judged("R8")
    judge.judged("B5")
    if calls and world.step % CALLS_EVERY == 0:
        _look_at_calls(world, node)
    opened, gauges = node.open, Gauges(node)
    _look_at_leases(world, node, len(opened), gauges)
    if not calls and not node.jobs:
        _look_for_stuck(world, node, opened, gauges)
    if any(front.owed for front in node.fronts) and not (
        gauges["saves"] or gauges["shed"] or gauges["relays"]
    ):
        _look_at_owed(world, node)
    if node.landed:
        _look_at_landed(world, node, gauges)
    if node.landing and not gauges["loads"]:
        node.landing.clear()  # what has ended in part does not go on


def _look_at_leases(world: World, node: Node, opened: int, gauges: Gauges) -> None:
    """Who waits for no tier holds none (A2, A5)."""
    judge, leases, most = world.judge, node.leases(), 0
    waits = opened > 0 and node.waiting == opened and not gauges["loads"]
    if leases and gauges["relays"]:
        most = len(world.prompts.spaces) * sum(item.back for item in world.setting.tiers)
    if waits:
        text = f"everybody waits for room, and {leases} leases are held"
        judge.holds("A5", ok=leases <= most, text=text)
    elif not opened and (not leases or not gauges["loads"]):
        text = f"nobody resolves or loads, and {leases} leases are held"
        judge.holds("A2", ok=leases <= most, text=text)


class Gauges:
    """A store's, if somebody asks for one."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._found: dict[str, int] | None = None

    def __getitem__(self, name: str) -> int:
        if self._found is None:
            self._found = self._node.store.gauges()
        return self._found[name]


def _look_at_calls(world: World, node: Node) -> None:
    """While tiers copy, blocks are kept for it."""
    judge, saving = world.judge, node.saving()
    loading = {
        int(call.keys["part"][0])
        for front in node.fronts
        for call in front.calls
        if call.verb == "load" and not relayed(call)
    }
    for space, pools in node.watched:
        part = space.part.id
        if part in saving:
            pinned = sum(pool.gauges().pinned for pool in pools)
            text = f"{pinned} blocks of {space.key} pinned, {len(saving[part])} being saved"
            judge.holds("C1", ok=pinned >= len(saving[part]), text=text)
        if part in loading:
            kept = any(pool.gauges().reservations for pool in pools)
            text = f"a tier is loading, and no blocks of {space.key} are kept for it"
            judge.holds("A3", ok=kept, text=text)


def _look_for_stuck(world: World, node: Node, opened: list[Asked], gauges: Gauges) -> None:
    """A plain resolve that nothing keeps has ended (A7)."""
    plain = [asked for asked in opened if not asked.policy.full_hit]
    kept = len(plain) < len(opened) or any(item.kind == "reset" for item in node.waited.values())
    if not kept and not node.waiting and (not plain or not gauges["loads"]):
        world.judge.holds("A7", ok=not plain, text=f"{len(plain)} plain resolves wait for nothing")


def _look_at_owed(world: World, node: Node) -> None:
    failed = node.unasked != node.not_asked()  # saves that no tier has seen: they told so
    for front in node.fronts:
        owed, front.owed = front.owed, {}
        if front.inner.untold or failed:
            continue
        for record, shards in owed.items():
            if not front.inner.doubtful.isdisjoint(key_bytes(shards)):
                continue
            clause = "C4" if record in front.failed else "C3"
            there = front.inner.has(shards)
            front.failed.discard(record)
            text = f"a record was retired, nothing failed, and {front.name} has not got it"
            world.judge.holds(clause, ok=there, text=text)


def _look_at_landed(world: World, node: Node, gauges: Gauges) -> None:
    """What has just been loaded whole is findable, although nobody waits for it any more (A4)."""
    landed, node.landed = node.landed, []
    if gauges["loads"] or node.open or not (node.cache and node.keep):
        return  # somebody may have taken its place since
    for record in landed:
        space, chain = world.prompts.by_part[part_of(record)], world.prompts.chain_to(record)
        if chain is None:
            continue
        if space.key == SPACE:
            probed = node.pools[0].probe(chain)
            text = "a record landed whole, after the page before it, and is not findable"
            world.judge.holds("A4", ok=not len(chain) - space.record_pages <= probed < len(chain), text=text)
        else:
            there = node.sides[0][space.key].present(chain[-space.record_pages :])
            text = f"a record of {space.key} landed whole, and is not findable"
            world.judge.holds("A4", ok=bool(there.all()), text=text)


# Calls


def called(world: World, node: Node, front: Front, call: Call) -> None:
    """Judge a call that the store makes."""
    judge = world.judge
    judge.holds(
        "A9", ok=world.now <= call.deadline + SLACK_S, text=f"{call.verb} was issued after its deadline"
    )
    if call.verb == "lookup":
        limit = world.now + (front.inner.setting.load_s or math.inf)
        wanted = [min(asked.deadline, limit) for asked in node.open]
        if any(item.back for item in world.setting.tiers):
            wanted.append(world.now + SAVE_DEADLINE_S)
        known = any(math.isclose(call.deadline, deadline) for deadline in wanted)
        judge.holds("A20", ok=known, text="a look-up with a deadline that neither resolve nor relay has")
    elif call.verb == "load" and not relayed(call):
        _load_called(world, node, front, call)


def _load_called(world: World, node: Node, front: Front, call: Call) -> None:
    space = world.prompts.by_part[int(call.keys["part"][0])]
    most = len(node.pools) * node.readers[space.part.id][int(call.keys["shard"][0])]
    loading = node.loading(front)
    times = max(loading[name] for name in key_bytes(call.keys))
    world.judge.holds("A16", ok=times <= most, text=f"a record is being loaded {times} times at once")
    names = record_names(call.keys)
    if len(node.pools) > 1 or world.setting.manual:
        return  # much may happen in between
    pool = node.pool_of(0, space)
    there = [beside.found(pool, world.prompts.pages_of(record)) for record in names]
    if not int(call.keys["shard"][0]):  # the others follow
        again = sum(bool(pages.all()) for pages in there if len(pages))
        judge = world.judge
        judge.holds("A17", ok=not again, text=f"{again} records of {space.key} are loaded that are resident")
    for record, pages in zip(names, there, strict=True):
        if space.key == SPACE or not pages.any():  # what is there of a window may go before the rest has come
            node.landing.setdefault(record, 0)


def loaded(world: World, node: Node, front: Front, call: Call, fault: Fault | None, codes: Codes) -> None:
    """A load of a tier has ended."""
    if relayed(call):
        return
    late = world.now > call.deadline
    whole = fault is None and bool((np.asarray(codes) == Code.OK).all())
    world.judge.reached(f"load {'ok' if whole else 'failed'}{' late' if late else ''}")
    for name, record in zip(key_bytes(call.keys), record_names(call.keys), strict=True):
        if not whole or name in front.inner.doubtful:
            node.landing.pop(record, None)
        elif record in node.landing:
            node.landing[record] += 1
            if node.landing[record] == sum(node.readers[part_of(record)]):
                del node.landing[record]
                node.landed.append(record)

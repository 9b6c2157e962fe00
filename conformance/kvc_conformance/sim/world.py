"""A simulated world: what may happen in it, one action at a time, and what must hold after each.

An action is plain data, ``{"do": ..., ...}``: drawn from a seed, written down, and played again.  One that
does not fit the moment does nothing, so that a trace stays playable when actions are left out of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvc_conformance.sim import beside, callers, ending, nature, watch
from kvc_conformance.sim.front import Front, make_shelf
from kvc_conformance.sim.judge import Judge
from kvc_conformance.sim.loop import VirtualLoop
from kvc_conformance.sim.node import Live, Node, part_of, record_names, records_of, relayed
from kvc_conformance.sim.prompts import SPACE, Prompts
from kvc_conformance.sim.setting import AMPLE, Setting
from kvcontract.contract.errors import InternalFault
from kvcontract.core.lane import ManualLane
from kvcontract.core.pending import Pending
from kvcontract.pool.pool import BlockPool
from kvcontract.store.saves import SealReport
from kvcontract.tiers.base import Code, Codes, RecordKeys, key_bytes
from kvcontract.tiers.fault import Call, Fault, FaultKind

Action = dict[str, Any]

VERBS: Final[dict[str, Callable[[Any, Action], bool]]] = {**callers.VERBS, **nature.VERBS}

AUDIT_EVERY: Final = 35
_AUDITED_RELEASES: Final = 12


class World:
    """Stores, tiers and callers on one virtual clock.

    Args:
        prompts: what is computed.
        setting: what it is made of.

    Attributes:
        judge: what was found and counted.
        step: actions so far.
    """

    def __init__(self, prompts: Prompts, setting: Setting) -> None:
        self.prompts, self.setting = prompts, setting
        self.loop = VirtualLoop()
        self.judge = Judge()
        self.step = 0
        self._releases = 0
        self.loop.set_exception_handler(lambda _, context: self.judge.broken("R4", _told(context)))
        self.shelves = {
            item.name: make_shelf(prompts, item, self.loop.time) for item in setting.tiers if item.shared
        }
        self.nodes = [self._boot(number) for number in range(len(setting.degrees))]

    @property
    def now(self) -> float:
        """Virtual seconds."""
        return self.loop.time()

    @property
    def next_s(self) -> float:
        """When something is due; infinity if nothing is."""
        times = [self.loop.next_s]
        times += [at for node in self.nodes for front in node.fronts for at in front.late.values()]
        return min((at for at in times if at > self.now), default=math.inf)

    def node(self, action: Action) -> Node:
        """The process that an action is about."""
        number: int = action["node"]
        return self.nodes[number % len(self.nodes)]

    def apply(self, action: Action) -> bool:
        """Do one thing, let everything run that can, and judge.

        Returns:
            Whether it fitted the moment.

        Raises:
            Violation: something does not hold.
        """
        before = self.now
        if not VERBS[action["do"]](self, action):
            return False
        self.step += 1
        self.judge.counts.choices += 1
        self.loop.settle()
        alone = before == self.now and action["do"] != "die"
        self.look(audit=self.step % AUDIT_EVERY == 0, only=self.node(action) if alone else None)
        return True

    def look(self, *, audit: bool, only: Node | None = None) -> None:
        """Judge everything, or one process.

        Raises:
            Violation: something does not hold.
        """
        for node in self.nodes if only is None else (only,):
            watch.look(self, node)
            if audit:
                for pool in node.pools:
                    self._audit(pool, "R8")
                beside.findable(self, node)
        self.judge.raise_found()

    def finish(self) -> None:
        """End all that is open, and judge what is left: nothing (R8).

        Raises:
            Violation: something does not hold.
        """
        ending.finish(self)
        self.judge.raise_found()

    def discard(self) -> None:
        """Give its memory back."""
        for node in self.nodes:
            _bury(node)
        self.loop.end()
        self.loop.close()

    # Processes

    def _boot(self, number: int) -> Node:
        node = Node(number, self.prompts, self.setting, self.shelves, self.loop)
        for front in node.fronts:
            self._listen(node, front)
        for pool in node.pools:
            self._listen_to(pool)
        return node

    def _listen(self, node: Node, front: Front) -> None:
        front.on_call(lambda call: watch.called(self, node, front, call))
        front.inner.on_loss(lambda keys, _: _forgive(front, record_names(keys)))

    def _listen_to(self, pool: BlockPool) -> None:
        def came_back() -> None:
            self._releases += 1
            if self._releases % (_AUDITED_RELEASES * len(self.prompts.spaces)) == 0:
                self._audit(pool, "B4")

        pool.on_release(came_back)

    def _audit(self, pool: BlockPool, clause: str) -> None:
        try:
            pool.check_books()
        except InternalFault as fault:
            self.judge.holds(clause, ok=False, text=str(fault))
        else:
            self.judge.holds(clause, ok=True)

    def replace(self, node: Node) -> None:
        """The process is gone; another one takes its place."""
        _bury(node)
        self.loop.settle()
        self.nodes[node.number] = self._boot(node.number)

    # Tiers

    def answer(self, node: Node, front: Front, call: Call, fault: Fault | None) -> None:
        """Let a call through, and note what it does to what is known of the tier."""
        kind = None if fault is None else fault.kind
        if call.verb == "load" and relayed(call):
            names = key_bytes(call.keys)
            sound = set() if kind is not None else set(names) - front.inner.doubtful
            node.tainted = (node.tainted | set(names)) - sound
        if call.verb == "save":
            written = [name for name in key_bytes(call.keys) if name not in front.inner.kept]
            if kind in (FaultKind.LIE, FaultKind.FLIP):
                front.inner.doubtful.update(written)
            elif kind is None:
                front.inner.doubtful.difference_update(written)
            if relayed(call):
                front.inner.doubtful.update(node.tainted.intersection(written))
        self.watch(node, front, call, fault)
        front.answer(call, fault)
        front.late.pop(call, None)

    def watch(self, node: Node, front: Front, call: Call, fault: Fault | None) -> None:
        """See how a call ends."""
        if call.verb == "load":
            call.out.on_done(lambda codes: watch.loaded(self, node, front, call, fault, codes))
        elif call.verb == "save" and not call.ghost:
            call.out.on_done(lambda codes: self._saved(front, call, fault, codes))

    def _saved(self, front: Front, call: Call, fault: Fault | None, codes: Codes) -> None:
        honest = fault is None or fault.kind is not FaultKind.LIE
        names = zip(key_bytes(call.keys), record_names(call.keys), codes.tolist(), strict=True)
        for name, record, code in names:
            if code == Code.OK:
                if honest:
                    front.acknowledged[name] = front.inner.losses[name]
            else:
                front.owed.pop(record, None)
                front.failed.add(record)

    def serve(self, node: Node) -> bool:
        """Answer everything that waits, run every copy; whether there was anything."""
        served = False
        if isinstance(node.lane, ManualLane):
            while node.lane.step():
                served = True
        for front in node.fronts:
            for call in front.ready(self.now):
                if call in front.calls:
                    self.answer(node, front, call, None)
                    served = True
        self.loop.settle()
        # Who looked for a boundary may have had to do with a lower one since, and taken blocks of the other.
        pages = self.prompts.spaces[SPACE].part.id
        node.landed = [record for record in node.landed if part_of(record) == pages]
        return served

    # Requests

    def check_rows(self, node: Node, live: Live) -> None:
        """The rows of a request are those of its tokens (R3, R4)."""
        ok = node.right(live, live.req.pages.tolist(), live.req.committed_tokens)
        self.judge.holds(
            "R3", ok=ok, text=f"rows of a running request of stream {live.stream} are not its own"
        )
        if self.prompts.beside:
            beside.rows(self, node, live)

    def owed(self, node: Node, live: Live) -> dict[bytes, RecordKeys]:
        """Records of full pages that a request which retires now is to leave in every tier."""
        space, keys = self.prompts.spaces[SPACE], live.req.record_keys(node.store.record_keyer)
        if not len(keys):
            return {}
        columns, records = len(space.records), records_of(space, keys)
        return {
            name: records[at * columns : (at + 1) * columns]
            for at, name in enumerate(record_names(records[::columns]))
        }

    def owe(self, node: Node, owed: dict[bytes, RecordKeys], report: Pending[SealReport]) -> None:
        """What was retired has to be in every tier once its saves have landed, or to be told (C3, C4)."""
        fronts = [front for front in node.fronts if _accountable(front)]
        if not any(front.owed for front in fronts):
            node.unasked = node.not_asked()
        for front in fronts:
            for name, records in owed.items():
                if front.inner.doubtful.isdisjoint(key_bytes(records)):
                    front.owed[name] = records

        def told(value: SealReport) -> None:
            if value.failed:
                for front in fronts:
                    front.owed.clear()

        report.on_done(told)


def _accountable(front: Front) -> bool:
    """Whether what is stored there stays there unless somebody is told."""
    setting = front.inner.setting
    return setting.telling and setting.pages == AMPLE and not front.inner.untold


def _forgive(front: Front, records: Sequence[bytes]) -> None:
    for record in records:
        front.owed.pop(record, None)


def _told(context: dict[str, Any]) -> str:
    return f"{context.get('message')}: {context.get('exception')!r}"


def _bury(node: Node) -> None:
    """Let go of what a process had; nobody judges it any more."""
    for asked in node.asked.values():
        asked.task.cancel()
        if asked.task.done() and not asked.task.cancelled() and asked.task.exception() is None:
            asked.task.result().release()
    for waited in node.waited.values():
        waited.task.cancel()
    for live in node.live.values():
        with live.req:
            pass
    for front in node.fronts:
        front.calls.clear()
        for lease in list(front.leases):
            lease.release()

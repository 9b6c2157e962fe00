"""The scheduler: what runs in the next step, and what becomes of it.  One thread.

A request is owned by one place at a time: `line` (resolved, not admitted), `active` (in the pool), or
`resting` (preempted, before it resolves again); where it lies is its state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcontract.contract.executor import Executor
from kvcontract.engine.active import Active
from kvcontract.engine.admission import Admission
from kvcontract.engine.batch import build_step, wanted_rows, written
from kvcontract.engine.drafter import Drafter
from kvcontract.engine.intake import Arrival
from kvcontract.engine.preemption import due, victims
from kvcontract.engine.request import Finish, Request, Result, refusal
from kvcontract.engine.sampling import Sampler
from kvcontract.memory.binding import Binding
from kvcontract.memory.slots import copy_blocks
from kvcontract.pool.handles import Later
from kvcontract.pool.request import Chunk
from kvcontract.store.policy import KvPrefix
from kvcontract.store.store import KvStore


@dataclass(frozen=True, slots=True)
class Machine:
    """What steps run on, and how much of it one step may take.

    Attributes:
        executor: runs steps; bound already.
        store: prefix cache and tiers; None: every prompt is computed.
        bindings: the memory of each space, by its key.
        drafter: proposes tokens that the model verifies.
        max_batch_tokens: most tokens of one step.
        max_chunk_tokens: prefill chunks end at multiples of this position.
        max_requests: most requests at once.
    """

    executor: Executor
    store: KvStore | None
    bindings: Mapping[str, Binding]
    drafter: Drafter | None
    max_batch_tokens: int
    max_chunk_tokens: int
    max_requests: int


class Scheduler:
    """Admits, preempts, runs, ends.

    Args:
        machine: what steps run on.
        line: requests that wait for pages.
        begin: hands a request to the intake, with what it has done so far.
        end: told of each result.
    """

    def __init__(
        self,
        machine: Machine,
        line: Admission,
        begin: Callable[[Request, Active | None], object],
        end: Callable[[Result], object],
    ) -> None:
        self.line = line
        self.active: list[Active] = []
        self.resting: list[Active] = []
        self._machine = machine
        self._begin = begin
        self._end = end
        self._device: torch.device | None = None
        self._closed = False

    def step(
        self, arrived: Iterable[Arrival], cancelled: Collection[int], preempted: Collection[int]
    ) -> bool:
        """Take in what has arrived, let go, admit, run one batch; False if there was nothing to do.

        Args:
            arrived: requests that have been resolved.
            cancelled: ids of requests that end now.
            preempted: ids of requests that a caller wants to give way.

        Raises:
            Exception: what the executor raised; the requests of the batch have failed results by then.
        """
        moved = 0
        for arrival in arrived:
            moved += 1
            if (result := self.line.push(arrival)) is not None:
                self._end_all(arrival.request, result)
        moved += self._drop(cancelled)
        moved += self._yield(preempted)
        moved += self._admit()
        moved += self._wake_rested()
        batch = self._schedule()
        if batch:
            self._run(batch)
        return bool(batch or moved)

    def close(self, arrived: Iterable[Arrival], reason: str) -> None:
        """End everything; nothing begins any more."""
        self._closed = True
        waiting = [*arrived, *self.line.drop({arrival.request.id for arrival in self.line})]
        with contextlib.ExitStack() as end:  # one that fails keeps no other from being released
            for item in self.active:
                end.callback(self._finish, item, Finish.CANCELLED, reason)
            for item in self.resting:
                end.callback(self._end_preempted, item, Finish.CANCELLED, reason)
            for arrival in waiting:
                end.callback(self._end_arrival, arrival, Finish.CANCELLED, reason)

    # Who is in the pool

    def _drop(self, cancelled: Collection[int]) -> int:
        """End the cancelled requests; how many."""
        gone = self.line.drop(cancelled)
        for arrival in gone:
            self._end_arrival(arrival, Finish.CANCELLED, "")
        rested = [item for item in self.resting if item.request.id in cancelled]
        for item in rested:
            self._end_preempted(item, Finish.CANCELLED, "")
        stopped = [item for item in self.active if item.request.id in cancelled]
        for item in stopped:
            self._finish(item, Finish.CANCELLED)
        return len(gone) + len(rested) + len(stopped)

    def _yield(self, preempted: Collection[int]) -> int:
        """Preempt the active ones of some requests, behind the equals that wait now; how many."""
        chosen = [item for item in self.active if item.request.id in preempted]
        for item in chosen:
            equals = [other for other in self._waiting() if other.priority == item.request.priority]
            self._preempt(item, frozenset(other.id for other in equals))
        return len(chosen)

    def _admit(self) -> int:
        """Admit waiting requests in the line's order, and make room for the first by its priority."""
        admitted = 0
        while True:
            while self._has_place() and (answer := self._next()) is not None:
                if isinstance(answer, Active):
                    self.active.append(answer)
                else:
                    self._end_all(*answer)
                admitted += 1
            chosen = self._victims()
            if not chosen:
                return admitted
            for item in chosen:
                self._preempt(item)

    def _next(self) -> Active | tuple[Request, Result] | None:
        """The next in line that fits; nobody, while somebody who rests is next."""
        return None if self.resting and due(self.resting, self._waiting()) else self.line.next()

    def _victims(self) -> list[Active]:
        lowest = min((item.request.priority for item in self.active), default=None)
        if lowest is None or not any(request.priority > lowest for request in self._waiting()):
            return []
        lack = self.line.head()
        return [] if lack is None else victims(self.active, lack, self.line.pool, room=self._has_place())

    def _preempt(self, item: Active, yields_to: frozenset[int] = frozenset()) -> None:
        """Seal what is complete, give pages and slots back, rest (B20)."""
        if self._machine.store is not None:
            after = None if self._device is None else written(self._device)
            self._machine.store.seal(item.kv, after=after)
        item.preempt(yields_to)
        self.active.remove(item)
        self.resting.append(item)

    def _wake_rested(self) -> int:
        """Let those resolve again that are next and fit; how many."""
        room, woken = self.line.pool.budget(), 0
        for item in due(self.resting, self._waiting()):
            lifetime = item.kv.lifetime_pages
            fits = room >= lifetime and self._has_place(woken)
            lower = any(other.request.priority < item.request.priority for other in self.active)
            # With nobody active only other holds can be in the way, which are let go for the first in line.
            if not (fits or lower) and (self.active or woken):
                break
            self.resting.remove(item)
            self._begin(item.request, item)
            room, woken = room - lifetime, woken + 1
        return woken

    def _has_place(self, taken: int = 0) -> bool:
        """Whether one request more fits into the batch and the slots."""
        return len(self.active) + taken < self._machine.max_requests and self.line.has_slots

    def _waiting(self) -> list[Request]:
        return [arrival.request for arrival in self.line]

    # A step

    def _schedule(self) -> list[tuple[Active, Chunk]]:
        """Decodes first, then prefill chunks in order of admission, while tokens are left."""
        batch: list[tuple[Active, Chunk]] = []
        try:
            self._fill(batch)
        except BaseException:
            for item, chunk in batch:  # nothing stays outstanding, or no later step could be scheduled
                item.kv.revert(chunk)
            raise
        return batch

    def _fill(self, batch: list[tuple[Active, Chunk]]) -> None:
        machine = self._machine
        prefilling = [item for item in self.active if item.prefilling]
        left = machine.max_batch_tokens - len(self.active) + len(prefilling)
        for item in (item for item in self.active if not item.prefilling):
            chunk = item.schedule_decode(machine.drafter, 1 + left)
            left -= chunk.drafts
            batch.append((item, chunk))
        for item in prefilling:
            start = item.kv.committed_tokens
            size = min(left, machine.max_chunk_tokens - start % machine.max_chunk_tokens)
            if size > 0:
                chunk = item.kv.schedule_prefill(size)
                batch.append((item, chunk))
                left -= len(chunk.token_ids)

    def _run(self, batch: list[tuple[Active, Chunk]]) -> None:
        every = [item.request.capture == "all" for item, _ in batch]
        try:
            for _, chunk in batch:
                self._copy(chunk.copies)
            step = build_step(
                [chunk for _, chunk in batch],
                all_rows=every,
                adapters=[item.request.scope.lora for item, _ in batch],
            )
            logits = self._machine.executor.forward(step).logits
            self._device = logits.device
            nan = logits.isnan().any(dim=-1).cpu().numpy()
        except BaseException as error:
            with contextlib.ExitStack() as undo:  # one that fails keeps no other from being released
                for item, _ in batch:
                    undo.callback(self._finish, item, Finish.FAILED, f"step: {error!r}")
            raise
        row, faults = 0, []
        for (item, chunk), all_rows in zip(batch, every, strict=True):
            wanted = wanted_rows(chunk, all_rows=all_rows)
            rows = slice(row, row + len(wanted))
            row = rows.stop
            if nan[rows].any():
                where = chunk.start + wanted[nan[rows].argmax()]
                self._finish(item, Finish.FAILED, f"the logits of position {where} are NaN")
                continue
            try:
                self._commit(item, chunk, logits[rows], wanted)
            except Exception as error:  # noqa: BLE001 - raised below, once the rest of the batch is committed
                faults.append(error)
                if item in self.active:
                    self._finish(item, Finish.FAILED, f"commit: {error!r}")
        if faults:
            raise faults[0]

    def _commit(self, item: Active, chunk: Chunk, logits: Tensor, wanted: NDArray[np.int64]) -> None:
        """Commit one request's part of a step, seal what it completed, finish it if that was the last."""
        finish = item.commit(chunk, logits, wanted)
        if item.request.branches and not item.prefilling:
            self._branches(item, logits[-1])
        fresh = item.kv.registered > item.sealed_pages or item.kv.checkpoint is not None
        fresh = fresh or bool(item.kv.beside.emitted)
        if self._machine.store is not None and fresh:
            self._machine.store.seal(item.kv, after=written(logits.device))
            item.sealed_pages = item.kv.registered
        if finish is not None:
            self._finish(item, finish)

    def _copy(self, copies: Mapping[str, tuple[tuple[int, int], ...]]) -> None:
        """Copy blocks, all groups of each, in the order of the device's work."""
        copy_blocks(self._machine.bindings, copies)

    def _branches(self, item: Active, logits: Tensor) -> None:
        """The prompt has been run: every branch samples its own first token and goes on by itself."""
        branches, item.request = item.request.branches, replace(item.request, branches=())
        for request in branches:
            try:
                self._branch(item, request, logits)
            except Exception as error:  # noqa: BLE001 - the others go on
                self._end(refusal(request, Finish.FAILED, f"branch: {error!r}"))

    def _branch(self, item: Active, request: Request, logits: Tensor) -> None:
        sampler = Sampler(request.sampling)
        token = sampler(logits)
        kv = item.kv.fork(token) if self._has_place() and not item.kv.finished else Later(1)
        prefix = KvPrefix.none(item.prefix.rank)
        if isinstance(kv, Later):
            self.line.push(Arrival(request, prefix, sampler=sampler, forced=token))
            return
        made = Active(request, prefix, kv, sampler, vocab_size=self.line.vocab_size)
        self.active.append(made)
        if self.line.pool.sides.slots:  # before this request rewrites what the branch is to begin with
            self._copy(kv.copies)
            kv.copied()
        if token in request.stop_token_ids:
            self._finish(made, Finish.STOP)

    # Ends

    def _finish(self, item: Active, finish: Finish, reason: str = "") -> None:
        self.active.remove(item)
        try:
            if self._machine.store is None or finish is Finish.FAILED:
                with item.kv:  # reverts a step that came to nothing, and releases
                    if finish is Finish.FAILED:
                        item.kv.mark_reset(0)  # suspect bytes are not kept for reuse (B13)
            else:
                self._machine.store.retire(item.kv)
        finally:
            self._end(item.result(finish, reason))
            self._let_branches_begin(item.request.branches, reason)

    def _end_preempted(self, item: Active, finish: Finish, reason: str) -> None:
        self.resting.remove(item)
        self._end_arrival(Arrival(item.request, KvPrefix.none(), item=item), finish, reason)

    def _end_arrival(self, arrival: Arrival, finish: Finish, reason: str) -> None:
        self._end(arrival.end(finish, reason))
        self._let_branches_begin(arrival.request.branches, reason)

    def _let_branches_begin(self, branches: Sequence[Request], reason: str) -> None:
        """Their parent ended before they could: they want the prompt all the same."""
        for branch in branches:
            if self._closed:
                self._end(refusal(branch, Finish.CANCELLED, reason))
            else:
                self._begin(branch, None)

    def _end_all(self, request: Request, result: Result) -> None:
        """End a request and the branches that never began."""
        self._end(result)
        for branch in request.branches:
            self._end(refusal(branch, result.finish, result.reason))

"""A small continuous-batching engine: it exists so that conformance and benchmarks run a real model.

::

    with Engine(model, executor, pool, store=store) as engine:
        request = engine.submit(prompt, max_new_tokens=32)
        result = engine.run()[request]

One thread calls `step` (or `run`); `submit` and `cancel` may come from any.  A request is owned by one place
at a time: intake (being resolved) → inbox → `_line` (resolved, not admitted) → `_active` (in the pool) →
results.  Where it lies is its state.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvcontract.contract.errors import InternalFault, UsageFault
from kvcontract.contract.executor import Executor
from kvcontract.contract.model import KvModel, Scope
from kvcontract.contract.wire import fingerprint
from kvcontract.engine.active import Active
from kvcontract.engine.admission import Admission
from kvcontract.engine.batch import build_step, wanted_rows, written
from kvcontract.engine.drafter import Drafter
from kvcontract.engine.fit import refuse_unfit
from kvcontract.engine.intake import Arrival, Intake
from kvcontract.engine.request import GREEDY, Capture, Finish, Request, Result, check_prompt, refusal
from kvcontract.engine.sampling import Sampler, Sampling
from kvcontract.memory.binding import Binding
from kvcontract.pool.handles import Later
from kvcontract.pool.keys import FleetSecret, Keyer
from kvcontract.pool.pool import BlockPool
from kvcontract.pool.request import FULL, Chunk
from kvcontract.pool.slab import LiveSlots
from kvcontract.store.policy import PLAIN, KvPrefix, ResolvePolicy

if TYPE_CHECKING:
    from kvcontract.store.store import KvStore

STALL_S: Final = 120.0
"""`run` gives up when nothing has moved for so long."""


class Engine:
    """Runs requests over one rank.

    Args:
        model: the declaration.
        executor: bound to the arenas already.
        pool: the rank's pages.
        store: prefix cache and tiers; None: every prompt is computed.
        rank: name of the rank in the store.
        max_batch_tokens: most tokens of one step.
        max_chunk_tokens: prefill chunks end at multiples of this position, so that a request is cut at the
            same places whatever it hits (or earlier, where the batch is full); None is `max_batch_tokens`.
        max_requests: most requests at once, none above `max_batch_tokens`.
        stop_token_ids: end-of-sequence ids of the model.
        bindings: the memory of each space, by its key; needed for branches, whose partial pages are copied.
        slots: live slots of each bounded group, by its name.
        drafter: proposes tokens that the model verifies.

    Raises:
        UsageFault: limits that cannot work, or state that the pool does not serve; all are named.
    """

    def __init__(
        self,
        model: KvModel,
        executor: Executor,
        pool: BlockPool,
        *,
        store: KvStore | None = None,
        rank: str = "0",
        max_batch_tokens: int | None = None,
        max_chunk_tokens: int | None = None,
        max_requests: int | None = None,
        stop_token_ids: Collection[int] = (),
        bindings: Mapping[str, Binding] | None = None,
        slots: Mapping[str, LiveSlots] | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        limits = executor.limits
        self.model = model
        self.pool = pool
        self.store = store
        self.max_batch_tokens = limits.max_tokens if max_batch_tokens is None else max_batch_tokens
        most = min(limits.max_requests, self.max_batch_tokens)
        self.max_requests = most if max_requests is None else max_requests
        self.max_chunk_tokens = self.max_batch_tokens if max_chunk_tokens is None else max_chunk_tokens
        self._slots = dict(slots or {})
        refuse_unfit(self, executor.limits, self._slots)
        self._limits = limits
        self._executor = executor
        self._stop_token_ids = frozenset(stop_token_ids)
        secret = FleetSecret.random()
        own = Keyer(fingerprint(model).required, secret, model.page_tokens)
        self._line = Admission.of(pool, own if store is None else store.keyer, self._slots, limits.vocab_size)
        self._bindings = dict(bindings or {})
        self._drafter = drafter
        self._wake = threading.Event()
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._cancelled: set[int] = set()
        self._intake = Intake(store, rank, self._wake)
        self._active: list[Active] = []
        self._results: dict[int, Result] = {}
        self._open: set[int] = set()
        self._closed = False
        self._forget_pool = pool.on_release(self._wake.set)

    def submit(
        self,
        prompt: Sequence[int] | NDArray[np.integer[Any]],
        max_new_tokens: int,
        *,
        sampling: Sampling = GREEDY,
        scope: Scope | None = None,
        stop_token_ids: Collection[int] | None = None,
        capture_logits: Capture | bool = False,
        policy: ResolvePolicy = PLAIN,
    ) -> int:
        """Hand a request over; returns its id.

        Args:
            prompt: token ids.
            max_new_tokens: most tokens to sample.
            sampling: how.
            scope: who may share its pages.
            stop_token_ids: instead of the engine's; empty runs to the full length.
            capture_logits: keep the logits of sampled rows (True), or of ``"all"`` rows that are run.
            policy: how far the resolve may go.

        Raises:
            UsageFault: the request cannot be served by this model; every fault is named.
        """
        return self.submit_parallel(
            prompt,
            max_new_tokens,
            1,
            sampling=sampling,
            scope=scope,
            stop_token_ids=stop_token_ids,
            capture_logits=capture_logits,
            policy=policy,
        )[0]

    def submit_parallel(
        self,
        prompt: Sequence[int] | NDArray[np.integer[Any]],
        max_new_tokens: int,
        count: int,
        *,
        sampling: Sampling = GREEDY,
        scope: Scope | None = None,
        stop_token_ids: Collection[int] | None = None,
        capture_logits: Capture | bool = False,
        policy: ResolvePolicy = PLAIN,
    ) -> tuple[int, ...]:
        """Hand `count` requests over that share one prompt, which is run once (n > 1); returns their ids.

        After the prompt each goes on by itself: full pages are shared, the partial one is copied (B23).  With
        a seed, request i samples with seed + i.  A branch that finds no room waits like any other
        request, and starts from what is resident of the prompt.

        Raises:
            UsageFault: as `submit`; or `count` is below 1, or the engine was given no bindings to copy in.
        """
        if count < 1 or (count > 1 and not self._bindings):
            raise UsageFault(f"count {count}: expected 1 or more; more than 1 needs the engine's bindings")
        tokens = check_prompt(prompt, max_new_tokens, self._limits)
        capture: Capture = "sampled" if capture_logits is True else capture_logits or "none"
        whole = Request(
            id=-1,
            prompt=tokens,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            scope=scope or Scope(),
            stop_token_ids=self._stop_token_ids if stop_token_ids is None else frozenset(stop_token_ids),
            capture=capture,
            policy=policy,
        )
        with self._lock:
            if self._closed:
                raise UsageFault("the engine is closed: it takes no more work")
            made = [whole.branch(next(self._ids), number) for number in range(count)]
            self._open.update(request.id for request in made)
            pages = -(-(len(tokens) + max_new_tokens) // self.pool.page_tokens)
            fits = pages <= self.pool.total
            if fits:  # under the lock: a close that comes now finds it in the intake
                self._intake.begin(replace(made[0], branches=tuple(made[1:])))
        if not fits:
            # B10: what can never fit is refused at intake, before anything is fetched for it.
            why = f"{pages} pages for {len(tokens)} + {max_new_tokens} tokens; the pool has {self.pool.total}"
            for request in made:
                self._end(refusal(request, Finish.REFUSED, why))
        return tuple(request.id for request in made)

    def cancel(self, request_id: int) -> None:
        """End a request early, wherever it is; its result says what it had produced.  Ended: nothing."""
        with self._lock:
            if request_id not in self._open:
                return
            self._cancelled.add(request_id)
        self._intake.cancel(request_id)
        self._wake.set()

    def take_results(self) -> dict[int, Result]:
        """Results of finished requests by id; each is handed out once."""
        with self._lock:
            results, self._results = self._results, {}
        return results

    @property
    def idle(self) -> bool:
        """Whether every request has its result."""
        with self._lock:
            return not self._open

    @property
    def keyer(self) -> Keyer:
        """Derives the page keys of its requests."""
        return self._line.keyer

    def gauges(self) -> dict[str, int]:
        """Requests by where they are; all 0 at idle (R8)."""
        return {
            "resolving": self._intake.resolving,
            "arrived": self._intake.arrived,
            "waiting": len(self._line),
            "active": len(self._active),
        }

    def run(self) -> dict[int, Result]:
        """Step until every request has its result; returns those not taken yet.

        Raises:
            InternalFault: nothing moved for `STALL_S`.
        """
        moved = time.monotonic()
        while not self.idle:
            self._wake.clear()
            if self.step():
                moved = time.monotonic()
            elif not self.idle:
                if time.monotonic() - moved > STALL_S:
                    raise InternalFault(f"no request moved for {STALL_S:g} s: {self.gauges()}")
                self._wake.wait(STALL_S)
        return self.take_results()

    def step(self) -> bool:
        """Admit what fits, run one batch; False if there was nothing to do.

        Raises:
            Exception: what the executor raised; the requests of the batch have failed results by then.
        """
        arrived = self._intake.take()
        for arrival in arrived:
            if (result := self._line.push(arrival)) is not None:
                self._end_all(arrival.request, result)
        ended = self._drop_cancelled()
        admitted = self._admit()
        batch = self._schedule()
        if batch:
            self._run(batch)
        return bool(batch or admitted or ended or arrived)

    def _admit(self) -> int:
        """Admit waiting requests that fit, in the line's order."""
        admitted = 0
        while len(self._active) < self.max_requests and (answer := self._line.next()) is not None:
            if isinstance(answer, Active):
                self._active.append(answer)
            else:
                self._end_all(*answer)
            admitted += 1
        return admitted

    def _drop_cancelled(self) -> int:
        """End the cancelled requests that the scheduler owns."""
        with self._lock:
            cancelled = set(self._cancelled)
        gone = self._line.drop(cancelled)
        for arrival in gone:
            self._end(refusal(arrival.request, Finish.CANCELLED, ""))
            for branch in arrival.request.branches:
                self._intake.begin(branch)  # the others still want the prompt
        stopped = [active for active in self._active if active.request.id in cancelled]
        for active in stopped:
            self._finish(active, Finish.CANCELLED)
        return len(gone) + len(stopped)

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
        prefilling = [item for item in self._active if item.prefilling]
        left = self.max_batch_tokens - len(self._active) + len(prefilling)
        for item in (item for item in self._active if not item.prefilling):
            chunk = item.schedule_decode(self._drafter, 1 + left)
            left -= chunk.drafts
            batch.append((item, chunk))
        for item in prefilling:
            start = item.kv.committed_tokens
            size = min(left, self.max_chunk_tokens - start % self.max_chunk_tokens)
            if size > 0:
                chunk = item.kv.schedule_prefill(size)
                batch.append((item, chunk))
                left -= len(chunk.token_ids)

    def _run(self, batch: list[tuple[Active, Chunk]]) -> None:
        every = [item.request.capture == "all" for item, _ in batch]
        try:
            for _, chunk in batch:
                for pair in chunk.copies:
                    self._bindings[FULL].copy_blocks([pair])
            slots = [item.slots for item, _ in batch]
            step = build_step([chunk for _, chunk in batch], slots=slots, all_rows=every)
            logits = self._executor.forward(step).logits
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
                if item in self._active:
                    self._finish(item, Finish.FAILED, f"commit: {error!r}")
        if faults:
            raise faults[0]

    def _commit(self, item: Active, chunk: Chunk, logits: Tensor, wanted: NDArray[np.int64]) -> None:
        """Commit one request's part of a step, seal what it completed, finish it if that was the last."""
        finish = item.commit(chunk, logits, wanted)
        if item.request.branches and not item.prefilling:
            self._branches(item, logits[-1])
        if self.store is not None and item.kv.registered > item.sealed_pages:
            self.store.seal(item.kv, after=written(logits.device))
            item.sealed_pages = item.kv.registered
        if finish is not None:
            self._finish(item, finish)

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
        full = len(self._active) >= self.max_requests or any(s.free == 0 for s in self._slots.values())
        kv = Later(1) if full or item.kv.finished or request.id in self._cancelled else item.kv.fork(token)
        prefix = KvPrefix.none(item.prefix.rank)
        if isinstance(kv, Later):
            self._line.push(Arrival(request, prefix, sampler=sampler, forced=token))
            return
        slots = self._line.take_slots()
        made = Active(request, prefix, kv, sampler, slots, vocab_size=self._limits.vocab_size)
        self._active.append(made)
        if token in request.stop_token_ids:
            self._finish(made, Finish.STOP)

    def _finish(self, item: Active, finish: Finish, reason: str = "") -> None:
        self._active.remove(item)
        try:
            if self.store is None or finish is Finish.FAILED:
                with item.kv:  # reverts a step that came to nothing, and releases
                    if finish is Finish.FAILED:
                        item.kv.mark_reset(0)  # suspect bytes are not kept for reuse (B13)
            else:
                self.store.retire(item.kv)
        finally:
            self._line.release_slots(item)
            self._end(item.result(finish, reason))
            for branch in item.request.branches:  # it ended before they could begin
                if self._closed:
                    self._end(refusal(branch, Finish.CANCELLED, reason))
                else:
                    self._intake.begin(branch)

    def _end(self, result: Result) -> None:
        with self._lock:
            self._results[result.id] = result
            self._cancelled.discard(result.id)
            self._open.discard(result.id)

    def _end_all(self, request: Request, result: Result) -> None:
        """End a request and the branches that never began."""
        self._end(result)
        for branch in request.branches:
            self._end(replace(result, id=branch.id))

    def close(self) -> None:
        """Cancel what is left and give every page back; the store stays the caller's.  Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        waiting = [*self._line.drop({*self._open}), *self._intake.close()]
        with contextlib.ExitStack() as end:
            end.callback(self._forget_pool)
            for item in self._active:
                end.callback(self._finish, item, Finish.CANCELLED, "the engine was closed")
            for arrival in waiting:
                gone = refusal(arrival.request, Finish.CANCELLED, "the engine was closed")
                end.callback(self._end_all, arrival.request, gone)
                end.callback(arrival.prefix.release)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

"""A small continuous-batching engine: it exists so that conformance and benchmarks run a real model.

::

    with Engine(model, executor, pool, store=store) as engine:
        request = engine.submit(prompt, max_new_tokens=32)
        result = engine.run()[request]

One thread calls `step` (or `run`); `submit` and `cancel` may come from any.  A request is owned by one place
at a time: intake (being resolved) → inbox → `_waiting` (resolved, not admitted) → `_active` (in the pool) →
results.  Where it lies is its state.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcontract.contract.errors import InternalFault, UsageFault
from kvcontract.contract.executor import Executor
from kvcontract.contract.layout import layout
from kvcontract.contract.model import KvModel, Scope
from kvcontract.contract.wire import fingerprint
from kvcontract.engine.active import Active
from kvcontract.engine.batch import build_step, wanted_rows
from kvcontract.engine.intake import Arrival, Intake
from kvcontract.engine.request import GREEDY, Capture, Finish, Request, Result, check_prompt
from kvcontract.engine.sampling import Sampler, Sampling
from kvcontract.pool.handles import Later, Never
from kvcontract.pool.keys import FleetSecret, Keyer
from kvcontract.pool.pool import BlockPool
from kvcontract.pool.request import FULL, Chunk, RequestKv, admit
from kvcontract.store.policy import PLAIN, ResolvePolicy

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
    ) -> None:
        limits = executor.limits
        self.model = model
        self.pool = pool
        self.store = store
        self.max_batch_tokens = limits.max_tokens if max_batch_tokens is None else max_batch_tokens
        most = min(limits.max_requests, self.max_batch_tokens)
        self.max_requests = most if max_requests is None else max_requests
        self.max_chunk_tokens = self.max_batch_tokens if max_chunk_tokens is None else max_chunk_tokens
        _refuse(self, executor)
        self._limits = limits
        self._executor = executor
        self._stop_token_ids = frozenset(stop_token_ids)
        secret = FleetSecret.random()
        own = Keyer(fingerprint(model).required, secret, model.page_tokens)
        self._keyer = own if store is None else store.keyer
        self._wake = threading.Event()
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._cancelled: set[int] = set()
        self._intake = Intake(store, rank, self._wake)
        self._waiting: deque[Arrival] = deque()
        self._active: list[Active] = []
        self._results: dict[int, Result] = {}
        self._open: set[int] = set()
        self._closed = False
        self._forget_pool = pool.on_release(self._wake.set)

    # In and out

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
        tokens = check_prompt(prompt, max_new_tokens, self._limits)
        capture: Capture = (
            capture_logits if isinstance(capture_logits, str) else "sampled" if capture_logits else "none"
        )
        stops = self._stop_token_ids if stop_token_ids is None else frozenset(stop_token_ids)
        with self._lock:
            if self._closed:
                raise UsageFault("the engine is closed: it takes no more work")
            request = Request(
                next(self._ids), tokens, max_new_tokens, sampling, scope or Scope(), stops, capture, policy
            )
            self._open.add(request.id)
        pages = -(-(len(tokens) + max_new_tokens) // self.pool.page_tokens)
        if pages > self.pool.total:
            # B10: what can never fit is refused at intake, before anything is fetched for it.
            why = f"{pages} pages for {len(tokens)} + {max_new_tokens} tokens; the pool has {self.pool.total}"
            self._end(Result(request.id, len(tokens), (), Finish.REFUSED, why))
        else:
            self._intake.begin(request)
        return request.id

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

    def gauges(self) -> dict[str, int]:
        """Requests by where they are; all 0 at idle (R8)."""
        return {
            "resolving": self._intake.resolving,
            "arrived": self._intake.arrived,
            "waiting": len(self._waiting),
            "active": len(self._active),
        }

    # Running

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
        self._waiting.extend(arrived)
        ended = self._drop_cancelled()
        admitted = self._admit()
        batch = self._schedule()
        if batch:
            self._run(batch)
        return bool(batch or admitted or ended or arrived)

    def _admit(self) -> int:
        """Admit waiting requests in order, up to the first that does not fit now."""
        before = len(self._waiting)
        while self._waiting and len(self._active) < self.max_requests:
            arrival = self._waiting[0]
            answer = self._ask_pool(arrival)
            if isinstance(answer, Later):
                if self._active or not self._shed():
                    break
                continue
            self._waiting.popleft()
            if isinstance(answer, Result):
                arrival.prefix.release()
                self._end(answer)
            else:
                sampler = Sampler(arrival.request.sampling)
                self._active.append(Active(arrival.request, arrival.prefix, answer, sampler))
        return before - len(self._waiting)

    def _ask_pool(self, arrival: Arrival) -> RequestKv | Later | Result:
        """The pool's answer; a result where the request ends here."""
        request, error = arrival.request, arrival.error
        if error is not None:
            return _refusal(request, Finish.FAILED, f"resolve: {error!r}")
        try:
            answer = admit(
                self.pool,
                prompt_tokens=request.prompt,
                max_new_tokens=request.max_new_tokens,
                keyer=self._keyer,
                scope=request.scope,
                prefix=arrival.prefix,
            )
        except UsageFault as fault:
            return _refusal(request, Finish.REFUSED, str(fault))
        return _refusal(request, Finish.REFUSED, answer.reason) if isinstance(answer, Never) else answer

    def _shed(self) -> bool:
        """Send the last waiting request with a hold back to the intake; False if there is none.

        With nothing active, holds of waiting requests keep the head out, and none would ever let go (B8).
        """
        for index in range(len(self._waiting) - 1, 0, -1):
            arrival = self._waiting[index]
            if arrival.prefix.hold is not None:
                del self._waiting[index]
                arrival.prefix.release()
                self._intake.begin(arrival.request)
                return True
        return False

    def _drop_cancelled(self) -> int:
        """End the cancelled requests that the scheduler owns."""
        with self._lock:
            cancelled = set(self._cancelled)
        gone = [arrival for arrival in self._waiting if arrival.request.id in cancelled]
        for arrival in gone:
            self._waiting.remove(arrival)
            arrival.prefix.release()
            self._end(_refusal(arrival.request, Finish.CANCELLED, ""))
        stopped = [active for active in self._active if active.request.id in cancelled]
        for active in stopped:
            self._finish(active, Finish.CANCELLED)
        return len(gone) + len(stopped)

    def _schedule(self) -> list[tuple[Active, Chunk]]:
        """Decodes first, then prefill chunks in order of admission, while tokens are left."""
        prefilling = [item for item in self._active if item.prefilling]
        batch = [(item, item.kv.schedule_decode()) for item in self._active if not item.prefilling]
        left = self.max_batch_tokens - len(batch)
        for item in prefilling:
            start = item.kv.committed_tokens
            size = min(left, self.max_chunk_tokens - start % self.max_chunk_tokens)
            if size > 0:
                chunk = item.kv.schedule_prefill(size)
                batch.append((item, chunk))
                left -= len(chunk.token_ids)
        return batch

    def _run(self, batch: list[tuple[Active, Chunk]]) -> None:
        every = [item.request.capture == "all" for item, _ in batch]
        try:
            step = build_step([chunk for _, chunk in batch], all_rows=every)
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
        if self.store is not None and item.kv.registered > item.sealed_pages:
            self.store.seal(item.kv, after=_written(logits.device))
            item.sealed_pages = item.kv.registered
        if finish is not None:
            self._finish(item, finish)

    def _finish(self, item: Active, finish: Finish, reason: str = "") -> None:
        self._active.remove(item)
        try:
            if self.store is None or finish is Finish.FAILED:
                with item.kv:  # reverts a step that came to nothing, and releases
                    pass
            else:
                self.store.retire(item.kv)
        finally:
            self._end(item.result(finish, reason))

    def _end(self, result: Result) -> None:
        with self._lock:
            self._results[result.id] = result
            self._cancelled.discard(result.id)
            self._open.discard(result.id)

    # The end

    def close(self) -> None:
        """Cancel what is left and give every page back; the store stays the caller's.  Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._waiting.extend(self._intake.close())
        with contextlib.ExitStack() as end:
            end.callback(self._forget_pool)
            for item in self._active:
                end.callback(self._finish, item, Finish.CANCELLED, "the engine was closed")
            for arrival in self._waiting:
                end.callback(self._end, _refusal(arrival.request, Finish.CANCELLED, "the engine was closed"))
                end.callback(arrival.prefix.release)
        self._waiting.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _refuse(engine: Engine, executor: Executor) -> None:
    limits = executor.limits
    faults = []
    if not 1 <= engine.max_requests <= limits.max_requests:
        faults.append(f"max_requests {engine.max_requests}: expected 1 .. {limits.max_requests}")
    if not engine.max_requests <= engine.max_batch_tokens <= limits.max_tokens:
        # Every active request must be able to move in every step.
        faults.append(
            f"max_batch_tokens {engine.max_batch_tokens}: expected {engine.max_requests} (max_requests)"
            f" .. {limits.max_tokens}"
        )
    if engine.max_chunk_tokens < 1:
        faults.append(f"max_chunk_tokens {engine.max_chunk_tokens}: expected 1 or more")
    if engine.pool.page_tokens != engine.model.page_tokens:
        faults.append(f"pages of {engine.pool.page_tokens} tokens, declared {engine.model.page_tokens}")
    other = [space.key for space in layout(engine.model).spaces if space.key != FULL]
    if other:
        faults.append(f"state in {', '.join(other)}: this engine serves full attention only")
    if faults:
        raise UsageFault("the engine cannot run: " + "; ".join(faults))


def _refusal(request: Request, finish: Finish, reason: str) -> Result:
    return Result(request.id, len(request.prompt), (), finish, reason)


def _written(device: torch.device) -> Any:
    """Waits, on whatever thread calls it, until the writes queued on the device so far are done (C2)."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch's own stub
    event.record(torch.cuda.current_stream(device))
    return event.synchronize

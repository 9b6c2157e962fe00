"""A small continuous-batching engine: it exists so that conformance and benchmarks run a real model.

::

    with Engine(model, executor, pool, store=store) as engine:
        request = engine.submit(prompt, max_new_tokens=32)
        result = engine.run()[request]

One thread calls `step` (or `run`) and `close`; every other verb may be called from any.  A request is owned
by one place at a time: the line of the door (behind a control operation) → intake (being resolved) → inbox →
the scheduler's line (resolved, not admitted) → active (in the pool) → results.  One that is preempted rests,
then goes back to the intake.  Where it lies is its state.
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

from kvcontract.contract.errors import InternalFault, UsageFault
from kvcontract.contract.executor import Executor
from kvcontract.contract.model import KvModel, Scope
from kvcontract.contract.wire import fingerprint
from kvcontract.engine.active import Active
from kvcontract.engine.adapters import Adapters
from kvcontract.engine.admission import Admission
from kvcontract.engine.control import CLOSED, Control
from kvcontract.engine.drafter import Drafter
from kvcontract.engine.fit import emits_all, refuse_unfit
from kvcontract.engine.intake import Intake
from kvcontract.engine.loop import EngineLoop
from kvcontract.engine.operations import Controls
from kvcontract.engine.request import GREEDY, Capture, Finish, Request, Result, check_prompt, refusal
from kvcontract.engine.sampling import Sampling
from kvcontract.engine.scheduler import Machine, Scheduler
from kvcontract.memory.binding import Binding
from kvcontract.pool.checkpoints import DEFAULT_CHECKPOINTS, CheckpointPolicy
from kvcontract.pool.keys import FleetSecret, Keyer
from kvcontract.pool.pool import BlockPool
from kvcontract.store.policy import PLAIN, ResolvePolicy

if TYPE_CHECKING:
    from kvcontract.store.store import KvStore

STALL_S: Final = 120.0
"""`run` gives up when nothing has moved for so long; an operation has a deadline of its own."""


class Engine(Controls):
    """Runs requests over one rank; `Controls` has the verbs that change it while it runs.

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
        bindings: the memory of each space, by its key; needed for branches, whose partial pages are copied,
            and for state that is restored by a copy.
        drafter: proposes tokens that the model verifies.
        checkpoints: where prompts are cut so that others can go on from there, for models that need it.

    Attributes:
        keyer: derives the page keys of its requests.
        bindings: see the arguments.

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
        drafter: Drafter | None = None,
        checkpoints: CheckpointPolicy = DEFAULT_CHECKPOINTS,
    ) -> None:
        self._loop = EngineLoop()
        control = Control(self._loop, self._enter, self._refuse, self._going_on)
        super().__init__(store, pool, Adapters(executor), control)
        self._limits = limits = executor.limits
        self.model = model
        self.max_batch_tokens = limits.max_tokens if max_batch_tokens is None else max_batch_tokens
        most = min(limits.max_requests, self.max_batch_tokens)
        self.max_requests = most if max_requests is None else max_requests
        self.max_chunk_tokens = self.max_batch_tokens if max_chunk_tokens is None else max_chunk_tokens
        self.bindings = dict(bindings or {})
        refuse_unfit(self, limits)
        self._stop_token_ids = frozenset(stop_token_ids)
        self.keyer = _own_keyer(model) if store is None else store.keyer
        self._wake = threading.Event()
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._results: dict[int, Result] = {}
        self._open: set[int] = set()
        self._cancelled: set[int] = set()
        self._preempted: set[int] = set()
        self._closed = False
        self._intake = Intake(store, rank, self._wake, self._loop)
        sizes = self.max_batch_tokens, self.max_chunk_tokens, self.max_requests
        machine = Machine(executor, store, self.bindings, drafter, *sizes)
        interior = emits_all(executor, pool.sides)
        line = Admission.of(pool, self.keyer, checkpoints, limits.vocab_size, interior=interior)
        self._scheduler = Scheduler(machine, line, self._begin, self._end)
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
        priority: int = 0,
        turns: Collection[int] = (),
    ) -> int:
        """Hand a request over; returns its id.

        Args:
            prompt: token ids.
            max_new_tokens: most tokens to sample.
            sampling: how.
            scope: who may share its pages; names its adapter, whose revision is added if it is not given.
            stop_token_ids: instead of the engine's; empty runs to the full length.
            capture_logits: keep the logits of sampled rows (True), or of ``"all"`` rows that are run.
            policy: how far the resolve may go.
            priority: a higher one goes first, and preempts active ones of a lower one where it does not fit.
            turns: positions at which later prompts are expected to leave this one, such as the end of what
                all of them begin with: a checkpoint is taken before each, where the model needs any.

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
            priority=priority,
            turns=turns,
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
        priority: int = 0,
        turns: Collection[int] = (),
    ) -> tuple[int, ...]:
        """Hand `count` requests over that share one prompt, which is run once (n > 1); returns their ids.

        After the prompt each goes on by itself: full pages are shared, the partial one is copied (B23).  With
        a seed, request i samples with seed + i.  A branch that finds no room waits like any other
        request, and starts from what is resident of the prompt.

        Raises:
            UsageFault: as `submit`; or `count` is below 1, or the engine was given no bindings to copy in.
        """
        if count < 1 or (count > 1 and not self.bindings):
            raise UsageFault(f"count {count}: expected 1 or more; more than 1 needs the engine's bindings")
        tokens = check_prompt(prompt, max_new_tokens, self._limits, priority)
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
            priority=priority,
            turns=tuple(turns),
        )
        with self._lock:
            if self._closed:
                raise UsageFault("the engine is closed: it takes no more work")
            made = [whole.branch(next(self._ids), number) for number in range(count)]
            self._open.update(request.id for request in made)
        first = replace(made[0], branches=tuple(made[1:]))
        self._take(first)
        return first.ids

    def cancel(self, request_id: int) -> None:
        """End a request early, wherever it is; its result says what it had produced.  Ended: nothing."""
        with self._lock:
            if request_id not in self._open:
                return
            self._cancelled.add(request_id)
        behind = self._control.drop(request_id)
        if behind is not None:
            self._end(refusal(behind, Finish.CANCELLED, ""))
        self._intake.cancel(request_id)
        self._wake.set()

    def preempt(self, request_id: int) -> None:
        """Let an active request give way: it goes on later, behind the equals that wait now (B20).

        At the next step its pages come back, and the tokens it has are kept.  It resolves them again, and
        what is not found any more is run again; what it samples is what it would have sampled.  A request
        that is not active holds no promise: nothing happens.
        """
        with self._lock:
            self._preempted.add(request_id)
        self._wake.set()

    # Results

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
        """Requests by where they are, and control operations that have not ended; all 0 at idle (R8)."""
        return {
            "control": self._control.waiting,
            "behind": self._control.behind,
            "resolving": self._intake.resolving,
            "arrived": self._intake.arrived,
            "waiting": len(self._scheduler.line),
            "active": len(self._scheduler.active),
            "preempted": len(self._scheduler.resting),
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
                if self._control.waiting:
                    moved = time.monotonic()  # it ends by its own deadline
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
        with self._lock:
            cancelled, preempted = set(self._cancelled), self._preempted
            self._preempted = set()
        return self._scheduler.step(arrived, cancelled, preempted)

    # Between the parts

    def _take(self, request: Request) -> None:
        """A request goes to the door, unless it never can be served."""
        prompt, new, page = len(request.prompt), request.max_new_tokens, self.pool.page_tokens
        pages = -(-(prompt + new) // page)
        if pages > self.pool.total:
            # B10: what can never fit is refused at intake, before anything is fetched for it.
            self._refuse(
                request, f"{pages} pages for {prompt} + {new} tokens; the pool has {self.pool.total}"
            )
        elif not self._control.submit(request):
            self._end_all(request, Finish.CANCELLED, CLOSED)

    def _enter(self, request: Request) -> str | None:
        """A request comes through the door: what it names must be there; then it is resolved."""
        scope = self._adapters.scoped(request.scope)
        if isinstance(scope, str):
            return scope
        self._intake.begin(request.within(scope))
        return None

    def _begin(self, request: Request, item: Active | None) -> None:
        """A request that the scheduler gives away: a branch on its own, or a preempted one."""
        self._intake.begin(request, item)
        with self._lock:
            cancelled = request.id in self._cancelled
        if cancelled:  # it was said when nobody resolved it
            self._intake.cancel(request.id)

    def _refuse(self, request: Request, reason: str) -> None:
        self._end_all(request, Finish.REFUSED, reason)

    def _end_all(self, request: Request, finish: Finish, reason: str) -> None:
        for each in (request, *request.branches):
            self._end(refusal(each, finish, reason))

    def _end(self, result: Result) -> None:
        with self._lock:
            self._results[result.id] = result
            self._cancelled.discard(result.id)
            self._open.discard(result.id)
        self._control.left(result.id)
        self._wake.set()

    def _going_on(self) -> tuple[str, ...]:
        """What an operation may have waited for."""
        found = [f"{count} {name}" for name, count in self.gauges().items() if count and name != "behind"]
        if self.store is not None:
            gauges = self.store.gauges()
            found += [f"{gauges[name]} {name}" for name in ("loads", "saves", "shed") if gauges[name]]
        return tuple(found)

    # Its end

    def close(self) -> None:
        """Cancel what is left and give every page back; the store stays the caller's.  Idempotent.

        Control operations are given up; only one that has begun to change something is waited for, at most
        until its deadline.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        with contextlib.ExitStack() as end:
            end.callback(self._loop.close)
            end.callback(self._forget_pool)
            for request in self._control.close():
                self._end_all(request, Finish.CANCELLED, CLOSED)
            self._scheduler.close(self._intake.close(), CLOSED)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _own_keyer(model: KvModel) -> Keyer:
    """For an engine without a store, whose keys nobody else sees."""
    return Keyer(fingerprint(model).required, FleetSecret.random(), model.page_tokens)

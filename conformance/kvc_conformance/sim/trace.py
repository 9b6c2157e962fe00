"""Playing a trace, cutting it down to what matters, and keeping it as JSON."""

from __future__ import annotations

import gc
import json
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final, Self

from kvc_conformance.sim.checked import (
    action_faults,
    found_faults,
    model_faults,
    seed_faults,
    setting_faults,
)
from kvc_conformance.sim.device import BrokenCopy
from kvc_conformance.sim.judge import Counts, Judge, Violation
from kvc_conformance.sim.prompts import Prompts
from kvc_conformance.sim.schedule import Schedule
from kvc_conformance.sim.setting import Setting
from kvc_conformance.sim.spaces import simulated
from kvc_conformance.sim.world import Action, World
from kvcontract.contract.errors import KvContractError, UsageFault
from kvcontract.contract.model import KvModel

SCHEMA: Final = "kvc.trace/1"
STEPS: Final = 105
"""Actions of a seed, before everything is brought to its end."""

_MOST_PLAYS: Final = 1500


@dataclass(frozen=True, slots=True)
class Trace:
    """A world and what happens in it.

    Attributes:
        model: the declaration, as it is simulated.
        seed: that it was drawn from.
        violation: what is found when it is played, as clause and text; None if nothing was.
    """

    model: KvModel
    seed: int
    setting: Setting
    actions: tuple[Action, ...]
    violation: tuple[str, str] | None = None

    def save(self, path: Path) -> None:
        """Write it as JSON.

        Raises:
            UsageFault: the file cannot be written.
        """
        try:
            path.write_text(json.dumps(self.document(), indent=1) + "\n")
        except OSError as error:
            raise UsageFault(f"{path} cannot be written: {error.strerror}") from error

    def document(self) -> dict[str, Any]:
        """It as plain JSON."""
        found = None if self.violation is None else dict(zip(("clause", "text"), self.violation, strict=True))
        return {
            "schema": SCHEMA,
            "seed": self.seed,
            "violation": found,
            "setting": self.setting.as_json(),
            "actions": list(self.actions),
            "model": self.model.model_dump(mode="json"),
        }

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read it.

        Raises:
            UsageFault: not a trace of this version.
        """
        try:
            document = json.loads(path.read_text())
            if document["schema"] != SCHEMA:
                raise UsageFault(f"{path}: schema {document['schema']!r}; this version plays {SCHEMA!r}")
            parts = [document[name] for name in ("seed", "violation", "setting", "actions")]
            model = KvModel.model_validate_json(json.dumps(document["model"]))
        except OSError as error:
            raise UsageFault(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UsageFault(f"{path} is not a trace: {error!r}") from error
        seed, found, setting, actions = parts
        faults = [
            *model_faults(model),
            *seed_faults(seed),
            *found_faults(found),
            *setting_faults(setting),
            *action_faults(actions),
        ]
        if faults:
            raise UsageFault(f"{path} is not a trace: {'; '.join(faults)}")
        return cls(
            model=model,
            seed=seed,
            setting=Setting.of_json(setting),
            actions=tuple(actions),
            violation=None if found is None else (found["clause"], found["text"]),
        )


@dataclass(frozen=True, slots=True)
class Played:
    """What came of a world.

    Attributes:
        actions: those that fitted their moment.
        violation: the first that was found.
    """

    actions: tuple[Action, ...]
    violation: Violation | None
    counts: Counts


Next = Callable[[World], Action | None]


class collected:  # noqa: N801 - used as a function
    """Worlds leave cycles behind, some with handles of crashed processes in them: nobody's leaks."""

    def __enter__(self) -> None:
        gc.disable()

    def __exit__(self, *_: object) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
        gc.enable()


def run_seed(prompts: Prompts, seed: int, steps: int = STEPS) -> tuple[Setting, Played]:
    """Play what a seed draws."""
    rng = Random(seed)  # noqa: S311 - a schedule, not a secret
    setting = Setting.draw(rng, prompts.degrees, prompts.beside)
    schedule = Schedule(rng)
    left = iter(range(steps))
    return setting, _play(
        prompts, setting, lambda world: None if next(left, None) is None else schedule.draw(world)
    )


def play(prompts: Prompts, setting: Setting, actions: Sequence[Action]) -> Played:
    """Play actions one after the other; those that do not fit are left out."""
    left = iter(actions)
    return _play(prompts, setting, lambda _: next(left, None))


def replay(trace: Trace) -> Played:
    """Play a trace.

    Raises:
        UsageFault: its declaration cannot be cut to the degrees of its world, or lacks its spaces.
    """
    prompts = Prompts(trace.model)
    odd = sorted(set(trace.setting.degrees) - set(prompts.degrees))
    if odd:
        raise UsageFault(f"setting.degrees: {trace.model.name} cannot be cut to {', '.join(map(str, odd))}")
    blocks, spaces = set(trace.setting.blocks), {space.key for space in prompts.beside}
    if blocks != spaces:
        expected = ", ".join(sorted(spaces)) or "none"
        raise UsageFault(f"setting.blocks: {trace.model.name} has blocks beside its pages in: {expected}")
    with collected():
        return play(prompts, trace.setting, trace.actions)


def _play(prompts: Prompts, setting: Setting, following: Next) -> Played:
    done: list[Action] = []
    found: Violation | None = None
    with _world(prompts, setting) as world:
        try:
            while (action := following(world)) is not None:
                done.append(action)
                if not world.apply(action):
                    done.pop()
            world.finish()
        except Violation as violation:
            found = violation
        except Exception as error:  # none of what is done here may be refused, or fail
            if not (isinstance(error, KvContractError) or _raised_by_the_runtime(error)):
                raise
            found = Violation("R4", f"{type(error).__name__}: {error}")
        counts = world.judge.counts
    return Played(tuple(done), found, counts)


def _raised_by_the_runtime(error: BaseException) -> bool:
    last = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
    return str(last.f_globals.get("__name__")).startswith("kvcontract.")


@contextmanager
def _world(prompts: Prompts, setting: Setting) -> Iterator[World]:
    """A world; exceptions that nobody catches and resources that nobody returns are violations.

    The collector waits meanwhile: what it finds, and when, depends on what ran before.
    """
    world = World(prompts, setting)
    collects = gc.isenabled()
    gc.disable()
    hook, threading.excepthook = threading.excepthook, lambda args: _uncaught(world.judge, args)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", ResourceWarning)
            warnings.showwarning = lambda message, *_, **__: world.judge.broken("A6", str(message))
            yield world
    finally:
        threading.excepthook = hook
        world.discard()
        if collects:
            gc.enable()


def _uncaught(judge: Judge, args: Any) -> None:
    if isinstance(args.exc_value, BrokenCopy):
        judge.fault("fail copy")
        return
    judge.broken("R4", f"an exception nobody caught: {args.exc_value!r}")


def minimal(prompts: Prompts, setting: Setting, played: Played) -> Played:
    """Leave out every action that the violation can do without: what is left is needed, one by one.

    Halves first, then smaller and smaller pieces, each time checking that the same clause is still broken.
    """
    if played.violation is None:
        raise UsageFault("nothing to cut down: no violation was found")
    clause, best, plays = played.violation.clause, played, 0
    size = max(1, len(best.actions) // 2)
    while plays < _MOST_PLAYS:
        at, shorter = 0, False
        while at < len(best.actions) and plays < _MOST_PLAYS:
            tried = play(prompts, setting, best.actions[:at] + best.actions[at + size :])
            plays += 1
            if tried.violation is not None and tried.violation.clause == clause:
                best, shorter = tried, True
            else:
                at += size
        if size == 1 and not shorter:
            break
        size = max(1, size // 2)
    return best


def cut_down(prompts: Prompts, trace: Trace) -> Trace:
    """The same violation, by the actions that it needs."""
    with collected():
        played = minimal(prompts, trace.setting, play(prompts, trace.setting, trace.actions))
    return of(prompts, trace.seed, trace.setting, played)


def of(prompts: Prompts, seed: int, setting: Setting, played: Played) -> Trace:
    """A trace that can be saved."""
    found = None if played.violation is None else (played.violation.clause, played.violation.text)
    return Trace(prompts.model, seed, setting, played.actions, found)


__all__ = [
    "SCHEMA",
    "STEPS",
    "Played",
    "Trace",
    "cut_down",
    "minimal",
    "of",
    "play",
    "replay",
    "run_seed",
    "simulated",
]

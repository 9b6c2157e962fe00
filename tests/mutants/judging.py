"""Judges a mutant: in a process of its own, by what reaches it, cheapest first, until something objects.

A process that has imported what is heavy, but nothing of ours, forks for each mutant; there the mutated
source stands for its module.  Children that the suite starts run the sources as they are: a check judges in
the parent, and what a plugin and the runtime do is no part of it.  So of `kvcontract.contract.check` and of
`content` it is judged what this process does with them.  One nursery serves all mutants of a worker.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final, Literal

from mutating import ROOT, modules

How = Literal["objection", "crash", "time", ""]
Told = Callable[[dict[str, Any]], None]
HEAVY: Final = ("coverage", "hypothesis", "jinja2", "numpy", "pluggy", "pydantic", "pytest", "rich", "typer")
OURS: Final = ("kvcontract", "kvc_", "keeping", "planted")
PLUGINS: Final = ("qwen3", "qwen35", "gemma4")
TIERS: Final = ("dram", "disk", "shared")
ZOO: Final = ROOT / "tests" / "zoo"
PYTEST: Final = (
    "-x",
    "-q",
    "-p",
    "no:cacheprovider",
    "--hypothesis-seed=0",
    "-W",
    "ignore:Module already imported",
)
SLACK_S: Final = 20.0
TIMES: Final = 6.0
"""A judgement may take so many times what it takes of the sources as they are, and the slack."""


@dataclass(frozen=True, slots=True)
class Item:
    """Something that may object.

    Attributes:
        kind: tests of the suite, an animal of the zoo, or a plugin or tier that is sound.
        names: of the tests; or the ground and the name.
        clauses: to judge by; of tests none.
        seconds: what it takes.
    """

    kind: Literal["tests", "animal", "sound"]
    names: tuple[str, ...]
    clauses: tuple[str, ...] = ()
    seconds: float = 0.0

    def told(self) -> str:
        """In a few words."""
        return self.names[0] if self.kind == "tests" else " ".join(self.names)


@dataclass(frozen=True, slots=True)
class Judgement:
    """What became of a mutant.

    Attributes:
        how: it died; "": it did not.
        by: what killed it.
        said: how that put it.
        seconds: it took.
        tried: how many items it met.
        left: how many items it was spared because time was up.
    """

    how: How
    by: str
    said: str
    seconds: float
    tried: int
    left: int


class Objection(Exception):
    """Something noticed the mutant."""

    def __init__(self, how: How, by: str, said: str) -> None:
        self.how, self.by, self.said = how, by, said
        super().__init__(said)


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002 - it has one module
        return compile(self._source, self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, source: str) -> None:
        self._name, self._source = name, source

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> Any:  # noqa: ARG002
        if fullname != self._name:
            return None
        file = str(modules()[fullname])
        return importlib.util.spec_from_file_location(
            fullname, file, loader=_Loader(fullname, file, self._source)
        )


class Ground:
    """What judgements grow on: heavy imports, and a nursery of which children are had."""

    def __init__(self) -> None:
        os.chdir(ROOT)
        for name in HEAVY:
            importlib.import_module(name)
        self._nursery: Any = None
        self._process: subprocess.Popen[bytes] | None = None
        self.renew()

    def renew(self) -> None:
        """Have a new nursery; its children end."""
        self.close()
        spawning = importlib.import_module("kvc_conformance.spawning")
        scrubbed = importlib.import_module("kvc_conformance.driver").scrubbed
        self._nursery = spawning.Nursery(scrubbed(1))
        self._process = self._nursery._process
        self._nursery._control.recv(1)
        self._nursery.ready = True
        self._nursery._process = _Elsewhere()
        for name in [name for name in sys.modules if name.startswith(OURS)]:
            del sys.modules[name]

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            self._nursery._control.close()
            self._process.kill()
            self._process.wait()

    def forked(self, work: Callable[[Told], None], log: Path) -> Generator[Any]:
        """Have something done in a process of its own; what it tells, until it ends.

        Args:
            work: is given what to tell with; a message ``{"limit": s}`` says how long the next may take.
            log: gets its output.

        Raises:
            TimeoutError: it took too long, and is ended.
        """
        told, tells = os.pipe()
        pid = os.fork()
        if not pid:
            self._work(work, tells, log)
        os.close(tells)
        limit, rest, sound = 120.0, b"", False
        try:
            with contextlib.closing(_pipe(told)) as pipe:
                while True:
                    ready, _, _ = select.select([pipe], [], [], limit)
                    if not ready:
                        raise TimeoutError
                    more = os.read(pipe.number, 1 << 16)
                    if not more:
                        return
                    *lines, rest = (rest + more).split(b"\n")
                    for line in lines:
                        message = json.loads(line)
                        limit = message.get("limit", limit)
                        sound = "done" in message
                        yield message
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            if not sound or (self._process is not None and self._process.poll() is not None):
                self.renew()

    def _work(self, work: Callable[[Told], None], tells: int, log: Path) -> None:
        status = 1
        try:
            os.setsid()
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.path[:0] = [str(ZOO)]
            importlib.import_module("kvc_conformance.spawning")._nurseries["1"] = self._nursery

            def tell(message: dict[str, Any]) -> None:
                os.write(tells, json.dumps(message).encode() + b"\n")

            work(tell)
            status = 0
        except BaseException:  # noqa: BLE001 - nothing may return into the parent's stack
            importlib.import_module("traceback").print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(status)


class _Elsewhere:
    """The nursery's process, which is another's child."""

    def poll(self) -> int | None:
        return None

    def kill(self) -> None:
        pass

    def wait(self) -> None:
        pass


class _pipe:  # noqa: N801 - a handle
    def __init__(self, number: int) -> None:
        self.number = number

    def fileno(self) -> int:
        return self.number

    def close(self) -> None:
        os.close(self.number)


def judge(ground: Ground, name: str, source: str, items: Sequence[Item], log: Path, left: int) -> Judgement:
    """Judge a mutant.

    One that took too long is given its time anew, and more of it.  What objects, or does not end, must let
    the sources live as they are, there and then; else it is the machine that it tells of, and is passed over.

    Args:
        ground: to fork from.
        name: of the module.
        source: of the mutant.
        items: what may object, in this order.
        log: gets the output.
        left: how many more there are, for which there is no time.
    """
    began, first, patience = time.monotonic(), 0, 1.0
    finder = _Finder(name, source)
    while True:
        at, end = _tried(ground, finder, items, first, patience, log)
        if end["how"] == "time" and patience == 1.0:
            first, patience = at, 2.0
        elif end["how"] in {"objection", "time"} and not _holds(ground, items[at], log):
            first, patience = at + 1, 1.0
        else:
            return Judgement(end["how"], end["by"], end["said"], time.monotonic() - began, at + 1, left)


def _tried(
    ground: Ground, finder: _Finder, items: Sequence[Item], first: int, patience: float, log: Path
) -> tuple[int, dict[str, Any]]:
    """The last item that a mutant met, from the first on, and what became of it."""

    def work(tell: Told) -> None:
        sys.meta_path.insert(0, finder)
        for number, item in enumerate(items[first:], first):
            tell({"limit": _limit(item, patience), "item": number})
            try:
                meet(item)
            except Objection as objection:
                tell({"how": objection.how, "by": objection.by, "said": objection.said, "done": True})
                return
        tell({"how": "", "by": "", "said": "", "done": True})

    at = first - 1
    try:
        with contextlib.closing(ground.forked(work, log)) as told:
            for message in told:
                at = message.get("item", at)
                if "how" in message:
                    return at, message
    except TimeoutError:
        return at, {"how": "time", "by": items[at].told(), "said": "no end"}
    said = log.read_text(errors="replace").strip().splitlines()[-1:]
    return at, {"how": "crash", "by": items[max(at, 0)].told(), "said": "".join(said)}


def _limit(item: Item, patience: float) -> float:
    return patience * (TIMES * item.seconds + SLACK_S)


def _holds(ground: Ground, item: Item, log: Path) -> bool:
    """Whether an item lets the sources live as they are."""

    def work(tell: Told) -> None:
        tell({"limit": _limit(item, 2.0)})
        with contextlib.suppress(Objection):
            meet(item)
            tell({"holds": True})
        tell({"done": True})

    try:
        with contextlib.closing(ground.forked(work, log)) as told:
            return any("holds" in message for message in list(told))
    except TimeoutError:
        return False


def meet(item: Item) -> None:
    """Have an item judge what is imported.

    Raises:
        Objection: it objects.
    """
    try:
        if item.kind == "tests":
            _meet_tests(item)
        elif item.kind == "animal":
            _meet_animal(item)
        else:
            _meet_sound(item)
    except Objection:
        raise
    except BaseException as error:
        raise Objection("crash", item.told(), f"{type(error).__name__}: {error}") from error


class _Listener:
    """Hears the first failure of a test run."""

    def __init__(self) -> None:
        self.failed: tuple[How, str, str] | None = None

    def pytest_exception_interact(self, node: Any, call: Any) -> None:
        error = call.excinfo.value
        fair = isinstance(error, AssertionError) or type(error).__name__ == "Failed"
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        self.failed = self.failed or ("objection" if fair else "crash", node.nodeid, said)


def _meet_tests(item: Item) -> None:
    import pytest  # noqa: PLC0415 - only where something is judged

    listener = _Listener()
    code = pytest.main([*PYTEST, *item.names], [listener])
    if code:
        how, by, said = listener.failed or ("crash", item.told(), f"pytest ended with {code!s}")
        raise Objection(how, by, said)


@contextlib.contextmanager
def shortened(*, really: bool = True) -> Iterator[None]:
    """Have all children come from the nursery; an animal that is found otherwise so is judged without."""
    bench: Any = importlib.import_module("kvc_conformance.bench")
    child = bench.Child

    def forked(job: Any, *, threads: int | None, forked: bool) -> Any:  # noqa: ARG001 - all are
        return child(job, threads=threads, forked=True)

    if really:
        bench.Child = forked
    try:
        yield
    finally:
        bench.Child = child


def animal(names: tuple[str, ...]) -> Any:
    """An animal by ground and name."""
    keeping = importlib.import_module("keeping")
    return next(one for one in keeping.animals(names[0]) if one.name == names[1])


def _meet_animal(item: Item) -> None:
    keeping, runner = (importlib.import_module(name) for name in ("keeping", "kvc_conformance.runner"))
    one = animal(item.names)
    with shortened(really=bool(item.clauses)):
        report = runner.run(one.request(one.trips, alone=bool(item.clauses)))
    _crashed(item, report)
    said = list(keeping.objections(one, report))
    if said:
        raise Objection("objection", " ".join(item.names), said[0])


def request(names: tuple[str, ...], clauses: tuple[str, ...]) -> Any:
    """To certify something sound, by some clauses."""
    if names[0] == "good":
        return animal(names).request(*clauses, alone=True)
    runner = importlib.import_module("kvc_conformance.runner")
    return runner.Request(name=names[1], tier=names[0] == "tier", only=clauses, alone=True)


def _meet_sound(item: Item) -> None:
    runner = importlib.import_module("kvc_conformance.runner")
    outcomes = importlib.import_module("kvc_conformance.outcomes")
    wanted = dict(clause.split("=") for clause in item.clauses)

    def stop(result: Any) -> None:
        if result.outcome.value not in {"pass", "not_applicable", "deselected"}:
            how: How = "crash" if result.evidence.fault == "suite" else "objection"
            said = f"{result.clause}: {result.evidence.saw}".splitlines()[0]
            raise Objection(how, f"{item.names[1]} {result.clause}", said)

    with shortened():
        report = runner.run(request(item.names, tuple(wanted)), progress=stop)
    worst = outcomes.fold(report.results)
    for clause, outcome in wanted.items():
        if clause not in worst or worst[clause].value != outcome:
            found = worst[clause].value if clause in worst else "nothing"
            raise Objection("objection", f"{item.names[1]} {clause}", f"{found} instead of {outcome}")


def _crashed(item: Item, report: Any) -> None:
    for result in report.results:
        if result.outcome.value == "error" and result.evidence.fault == "suite":
            raise Objection("crash", " ".join(item.names), f"{result.clause}: {result.evidence.saw}")

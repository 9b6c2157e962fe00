"""Which line of the mutated modules is reached by what, measured once on the sources as they are."""

from __future__ import annotations

import ast
import importlib
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from judging import PLUGINS, PYTEST, TIERS, ZOO, Ground, Item, Told, animal, request, shortened
from mutating import ROOT, Mutant, modules

LEFT_OUT: Final = frozenset({"test_simulator.py", "test_page.py"})
"""Tests of minutes, which are about the store and the pages of the documentation."""

BESIDE: Final = ("store/test_rings.py", "store/test_narrow_snapshots.py", "memory/test_derived.py")
SAME: Final = "test_our_tiers_are_conformant"
"""A test that asks what the sound tiers are asked anyway, clause by clause."""

MARKED: Final = "not slow and not cuda and not wheel"
QUICK_S: Final = 0.5
ENOUGH_S: Final = 60.0
"""A mutant that everything of so many seconds has let live is a survivor."""

AT_IMPORT: Final = "import"
"""The key of what runs when a module is imported."""

HOLDING: Final = frozenset({"pass", "not_applicable"})


@dataclass(slots=True)
class Map:
    """What reaches what.

    Attributes:
        lines: by module and line, keys of what reaches it.
        seconds: by key; of a clause without what comes before it, which is under the key without clause.
        outcomes: of a clause of something sound.
        whole: animals that are judged with all that their clause requires.
    """

    lines: dict[str, dict[int, list[str]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    outcomes: dict[str, str] = field(default_factory=dict)
    whole: list[str] = field(default_factory=list)

    def take(self, part: dict[str, Any]) -> None:
        """Add what one measurement told."""
        for name, lines in part["lines"].items():
            mine = self.lines.setdefault(name, {})
            for line, keys in lines.items():
                mine.setdefault(int(line), []).extend(keys)
        self.seconds |= part["seconds"]
        self.outcomes |= part.get("outcomes", {})
        self.whole += part.get("whole", [])


def tasks() -> list[str]:
    """What there is to measure."""
    folder = ROOT / "tests"
    files = [
        file.relative_to(ROOT)
        for part in ("conformance", "contract")
        for file in sorted((folder / part).glob("test_*.py"))
        if file.name not in LEFT_OUT
    ]
    files += [Path("tests") / name for name in BESIDE]
    sound = [f"sound:model/{name}" for name in PLUGINS] + [f"sound:tier/{name}" for name in TIERS]
    sound += [f"sound:good/{file.stem}" for file in sorted((ZOO / "good").glob("*.py"))]
    broken = [
        f"animal:{ground}/{file.stem}"
        for ground in ("models", "runtime", "tiers")
        for file in sorted((ZOO / ground).glob("*.py"))
    ]
    return [*sound, *broken, *(f"tests:{file}" for file in files)]


def measure(ground: Ground, task: str, log: Path) -> dict[str, Any]:
    """One measurement.

    Raises:
        RuntimeError: the sources as they are do not pass.
    """
    kind, _, what = task.partition(":")
    work = {"tests": _tests, "animal": _animal, "sound": _sound}[kind]

    def measured(tell: Told) -> None:
        tell({"limit": 600.0})
        tell({"part": work(what), "done": True})

    for message in ground.forked(measured, log):
        if "part" in message:
            part: dict[str, Any] = message["part"]
            return part
    raise RuntimeError(f"{task} could not be measured:\n{log.read_text(errors='replace')[-3000:]}")


def _covered() -> Any:
    import coverage  # noqa: PLC0415 - only where something is measured

    cov = coverage.Coverage(data_file=None, config_file=False, include=[str(f) for f in modules().values()])
    cov.start()
    for name in modules():
        importlib.import_module(name)
    return cov


def _lines(cov: Any) -> dict[str, dict[int, list[str]]]:
    cov.stop()
    data = cov.get_data()
    found: dict[str, dict[int, list[str]]] = {}
    for name, file in modules().items():
        by_line = data.contexts_by_lineno(str(file))
        found[name] = {line: [key or AT_IMPORT for key in keys] for line, keys in by_line.items()}
    return found


def _tests(what: str) -> dict[str, Any]:
    import pytest  # noqa: PLC0415 - only where something is measured

    cov, seconds = _covered(), dict[str, float]()

    class Clock:
        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
            key, began = f"tests:{item.nodeid}", time.monotonic()
            cov.switch_context(key)
            yield
            seconds[key] = time.monotonic() - began

    code = pytest.main([*PYTEST, "-m", MARKED, what], [Clock()])
    if code not in {0, 5}:
        raise RuntimeError(f"pytest ended with {code!s}")
    return {"lines": _lines(cov), "seconds": seconds}


def _animal(what: str) -> dict[str, Any]:
    keeping, runner = (importlib.import_module(name) for name in ("keeping", "kvc_conformance.runner"))
    names, key = tuple(what.split("/")), f"animal:{what}"
    whole: list[str] = []
    cov = _covered()
    for alone in (True, False):
        cov.switch_context(key)
        one, began = animal(names), time.monotonic()
        with shortened(really=alone):
            said = list(keeping.objections(one, runner.run(one.request(one.trips))))
        spent = time.monotonic() - began
        if not said:
            return {"lines": _lines(cov), "seconds": {key: spent}, "whole": whole}
        whole.append(key)
    raise RuntimeError(f"{what}: {said}")


def _sound(what: str) -> dict[str, Any]:
    runner, outcomes = (importlib.import_module(f"kvc_conformance.{name}") for name in ("runner", "outcomes"))
    key, cov = f"sound:{what}", _covered()
    seconds: dict[str, float] = {key: 0.0}
    run = runner._Runner._run

    def timed(self: Any, check: Any, *, selected: bool) -> None:
        clause, began = f"{key}|{check.clause}", time.monotonic()
        cov.switch_context(clause)
        run(self, check, selected=selected)
        cov.switch_context(key)
        seconds[clause] = seconds.get(clause, 0.0) + time.monotonic() - began

    runner._Runner._run = timed
    cov.switch_context(key)
    began = time.monotonic()
    with shortened():
        report = runner.run(request(tuple(what.split("/")), ()))
    seconds[key] = time.monotonic() - began - sum(seconds.values())
    worst = outcomes.fold(report.results)
    held = {f"{key}|{clause}": found.value for clause, found in worst.items() if found.value in HOLDING}
    return {"lines": _lines(cov), "seconds": seconds, "outcomes": held}


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text(encoding="utf-8"))


@cache
def _uses(module: str) -> dict[str, set[int]]:
    """The lines in which each name is read."""
    found: dict[str, set[int]] = {}
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found.setdefault(node.id, set()).add(node.lineno)
    return found


def _span(node: ast.stmt) -> range:
    """The lines of a statement; of one that has a body, those before it."""
    body = getattr(node, "body", None)
    end = node.end_lineno or node.lineno
    if body and isinstance(body[0], ast.stmt):
        end = max(node.lineno, body[0].lineno - 1)
    return range(node.lineno, end + 1)


@cache
def _statement(module: str, line: int) -> tuple[list[ast.stmt], range]:
    """The statements that a line is in, outermost first, and the lines of the innermost."""
    inside = [
        node
        for node in ast.walk(_tree(module))
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    return inside, _span(inside[-1]) if inside else range(line, line + 1)


_FUNCTION: Final = (ast.FunctionDef, ast.AsyncFunctionDef)


def reached(found: Map, mutant: Mutant) -> set[str]:
    """Keys of what reaches a mutant."""
    lines = found.lines[mutant.module]
    inside, span = _statement(mutant.module, mutant.line)
    if inside and _is_register(inside[0]):
        return _of_clause(found, mutant, inside[0])
    keys = {key for line in span for key in lines.get(line, ())}
    if keys - {AT_IMPORT} or not inside:
        return keys
    functions = [node for node in inside if isinstance(node, _FUNCTION)]
    if functions and mutant.line not in _span(functions[-1]):
        # of a function's body: nothing reaches it, or the import does, which whatever reaches the module sees
        return {key for line in lines.values() for key in line} if keys else set()
    if functions:
        body = range(functions[-1].lineno, (functions[-1].end_lineno or 0) + 1)
        return {key for line in body for key in lines.get(line, ())}
    return _of_module_level(found, mutant, inside[0])


def _is_register(statement: ast.stmt) -> bool:
    """Whether it is a module's ``CHECKS``."""
    return isinstance(statement, ast.AnnAssign) and ast.unparse(statement.target) == "CHECKS"


def _of_clause(found: Map, mutant: Mutant, statement: ast.stmt) -> set[str]:
    """What runs the clause whose check is registered there, and tests of the module, which may read it all.

    If no clause is named there, any of the module's.
    """
    every = {key for line in found.lines[mutant.module].values() for key in line}
    tests = {key for key in every if key.startswith("tests:")}
    text = modules()[mutant.module].read_text(encoding="utf-8").splitlines()
    for number in range(mutant.line, statement.lineno - 1, -1):
        if re.search(r"[Cc]heck\(", text[number - 1]):
            named = re.search(r"KVC-[A-Z]+-\d+", "".join(text[number - 1 : number + 1]))
            if named:
                return tests | {key for key in found.seconds if key.endswith(f"|{named[0]}")}
    return tests | {key for key in every if "|" in key}


def _of_module_level(found: Map, mutant: Mutant, statement: ast.stmt) -> set[str]:
    """What reaches a use of the name that is given there."""
    if isinstance(statement, ast.ClassDef):
        names = {statement.name}
    else:
        names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    keys: set[str] = set()
    for module in found.lines:
        for line in {line for name in names for line in _uses(module).get(name, ())}:
            _, span = _statement(module, line)
            keys.update(key for one in span for key in found.lines[module].get(one, ()))
    keys -= {AT_IMPORT}
    return keys or {key for rest in found.lines[mutant.module].values() for key in rest}


def items(found: Map, keys: Iterable[str], killed: Sequence[str] = ()) -> tuple[list[Item], int]:
    """What is to judge, in order, and how many more there would be.

    Args:
        found: the map.
        keys: of what reaches the mutant.
        killed: names of what killed it before, or its neighbours; they come first.
    """
    keys = sorted(keys)
    tests = {
        key.partition(":")[2]: found.seconds[key]
        for key in keys
        if key.startswith("tests:") and SAME not in key
    }
    quick = [name for name, seconds in tests.items() if seconds < QUICK_S]
    slow = {name: seconds for name, seconds in tests.items() if seconds >= QUICK_S}
    every = [Item("tests", (name,), (), seconds + 0.5) for name, seconds in slow.items()]
    if quick:
        every.append(Item("tests", tuple(quick), (), 0.5 + sum(tests[name] for name in quick)))
    for key in keys:
        if key.startswith("animal:"):
            one = tuple(key.partition(":")[2].split("/"))
            alone = () if key in found.whole else ("alone",)
            every.append(Item("animal", one, alone, found.seconds[key]))
    every += _sounds(found, keys)
    every.sort(key=lambda item: (not any(name in killed for name in item.names), item.seconds))
    chosen: list[Item] = []
    spent = 0.0
    for item in every:
        if chosen and spent + item.seconds > ENOUGH_S:
            break
        chosen.append(item)
        spent += item.seconds
    return chosen, len(every) - len(chosen)


def _sounds(found: Map, keys: Sequence[str]) -> list[Item]:
    clauses: dict[str, list[str]] = {}
    for key in keys:
        if key.startswith("sound:"):
            who, _, clause = key.partition("|")
            mine = clauses.setdefault(who, [])
            if clause and key in found.outcomes:
                mine.append(clause)
    made = []
    for who, its in clauses.items():
        chosen = its or [min(clause for key, clause in _of(found, who))]
        seconds = found.seconds[who] + sum(found.seconds[f"{who}|{clause}"] for clause in chosen)
        told = tuple(f"{clause}={found.outcomes[f'{who}|{clause}']}" for clause in chosen)
        made.append(Item("sound", tuple(who.partition(":")[2].split("/")), told, seconds))
    return made


def _of(found: Map, who: str) -> list[tuple[str, str]]:
    return [(key, key.partition("|")[2]) for key in found.outcomes if key.startswith(f"{who}|")]


def paths() -> list[Path]:
    """Everything that what is measured stands on."""
    parts = ("conformance", "kvcontract", "plugins", "tests/zoo", "tests/conformance", "tests/contract")
    files = [file for part in parts for file in (ROOT / part).rglob("*.py")]
    files += [ROOT / "tests" / name for name in ("conftest.py", *BESIDE)]
    return sorted(files)

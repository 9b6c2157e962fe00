"""The runner owns the suite: it plans, has the children execute, judges, and compares plan with results."""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvc_conformance.bench import Bench, Check, CouldNotRun, Failed, NotApplicable, parse
from kvc_conformance.checks import CHECKS
from kvc_conformance.driver import ChildDied, ProbeFailed
from kvc_conformance.outcomes import HOLDS, Evidence, Fault, Outcome, Result, Verdict, fold, judge
from kvcontract.contract.clauses import CLAUSES, Level, clause
from kvcontract.contract.errors import InternalFault, UsageFault
from kvcontract.core.identity import load_config

NOT_LOADED: Final = 4
TRACE_LINES: Final = 12


@dataclass(frozen=True, slots=True)
class Request:
    """What to certify, and how.

    Attributes:
        name: the model's name.
        file: an unpackaged plugin.
        config: a config.json: the declaration is judged for it, and a small model of it is run.
        checkpoint: a folder of config.json and weights, run as it is.
        options: core launch options by name; None values are not given.
        plugin_options: the plugin's own.
        level: the level to certify.
        only: clauses to restrict the run to, with what they require; the verdict is then incomplete.
        seed: all randomness comes from it.
        device: where executors run, in torch's spelling.
    """

    name: str
    file: Path | None = None
    config: Path | None = None
    checkpoint: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    plugin_options: Mapping[str, str] = field(default_factory=dict)
    level: Level = "L2"
    only: tuple[str, ...] = ()
    seed: int = 0
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Report:
    """What a run found.

    Attributes:
        request: what was asked.
        plan: the (clause, case) pairs that were to run.
        results: one for each, in order.
        verdict: what they come to.
        environment: versions and the like.
    """

    request: Request
    plan: tuple[tuple[str, str], ...]
    results: tuple[Result, ...]
    verdict: Verdict
    environment: dict[str, Any]


Progress = Callable[[Result], None]
Planned = Callable[[int], None]


def run(request: Request, *, progress: Progress | None = None) -> Report:
    """Certify a plugin.

    Args:
        request: what and how.
        progress: told of each result as it comes.

    Raises:
        UsageFault: the request cannot be read: no such file, unknown clause; all faults are named.
        InternalFault: plan and results disagree.
    """
    tell = progress or (lambda _: None)
    _refuse(request)
    with tempfile.TemporaryDirectory(prefix="kvc-") as folder:
        bench = Bench(_job(request), Path(folder), request.seed, request.checkpoint)
        try:
            failure = _load(bench)
            runner = _Runner(bench, request, tell)
            results = runner.refused(failure) if failure else runner.all()
        finally:
            bench.close()
    _inventory(runner.plan, results)
    verdict = judge(request.name, results, request.level)
    if failure is not None:
        sentence = f"{request.name}: could not be loaded: {failure.text}"
        verdict = Verdict("not conformant", None, sentence, NOT_LOADED)
    elif request.only and verdict.exit_code == 0:
        sentence = f"{request.name}: every selected clause holds; a selection certifies nothing"
        verdict = Verdict("incomplete", None, sentence, 3)
    return Report(request, tuple(runner.plan), tuple(results), verdict, environment(bench))


def _refuse(request: Request) -> None:
    faults = []
    if request.config is not None and request.checkpoint is not None:
        faults.append("give --config or --checkpoint, not both")
    for item in request.only:
        try:
            clause(item)
        except UsageFault as error:
            faults.append(str(error))
    if faults:
        raise UsageFault("; ".join(faults))
    if request.config is not None:
        load_config(request.config)
    if request.checkpoint is not None:
        load_config(request.checkpoint)


def _job(request: Request) -> dict[str, Any]:
    return {
        "name": request.name,
        "file": _text(request.file),
        "config": _text(request.config),
        "checkpoint": _text(request.checkpoint),
        "options": {name: value for name, value in request.options.items() if value is not None},
        "plugin_options": dict(request.plugin_options),
        "device": request.device,
    }


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path.resolve())


def _load(bench: Bench) -> ProbeFailed | None:
    """Have the plugin declare; what keeps it from being loaded is returned."""
    try:
        answer = bench.plugin.call("declare.declare").body
    except ProbeFailed as error:
        if error.kind in {"PluginLoadError", "PluginNotFound", "DuplicatePlugin"}:
            return error
        raise
    bench.model, bench.findings = parse(answer)
    bench.runs = bool(answer["runs"])
    bench.samples = tuple(answer["samples"])
    if answer["config"] is not None:
        bench.samples = (dict(answer["config"]), *bench.samples)
    return None


class _Runner:
    def __init__(self, bench: Bench, request: Request, tell: Progress) -> None:
        self._bench = bench
        self._request = request
        self._tell = tell
        self.plan: list[tuple[str, str]] = []
        self._results: list[Result] = []

    def all(self) -> list[Result]:
        """Run every check of the levels asked for, in the order of the clauses."""
        chosen = self._chosen()
        for item in CLAUSES:
            if item.level > self._request.level:
                continue
            for check in (check for check in CHECKS if check.clause == item.id):
                self._run(check, selected=item.id in chosen)
        return self._results

    def refused(self, failure: ProbeFailed) -> list[Result]:
        """The results of a plugin that could not be loaded: one failure, everything else blocked."""
        broken = failure.clause or "KVC-DECL-01"
        for item in CLAUSES:
            if item.level > self._request.level:
                continue
            self.plan.append((item.id, ""))
            if item.id == broken:
                evidence = Evidence(failure.text, failure.where, fault="plugin")
                self._add(Result(item.id, "", Outcome.FAIL, evidence))
            else:
                self._add(Result(item.id, "", Outcome.BLOCKED, because=(broken,)))
        return self._results

    def _chosen(self) -> set[str]:
        if not self._request.only:
            return {item.id for item in CLAUSES}
        chosen: set[str] = set()
        open_ids = [clause(item).id for item in self._request.only]
        while open_ids:
            item = open_ids.pop()
            if item not in chosen:
                chosen.add(item)
                open_ids += clause(item).requires
        return chosen

    def _run(self, check: Check, *, selected: bool) -> None:
        blocked_by = self._blockers(check.clause)
        if blocked_by or not selected:
            outcome = Outcome.BLOCKED if blocked_by else Outcome.DESELECTED
            self.plan.append((check.clause, ""))
            self._add(Result(check.clause, "", outcome, because=blocked_by))
            return
        planned: list[tuple[str, ...]] = []
        failed = self._guarded(check.clause, "", lambda: planned.append(check.cases(self._bench)))
        if failed.outcome is not Outcome.PASS:
            self.plan.append((check.clause, ""))
            self._add(failed)
            return
        self.plan += [(check.clause, case) for case in planned[0]]
        for case in planned[0]:
            self._add(self._guarded(check.clause, case, functools.partial(check.run, self._bench, case)))

    def _blockers(self, clause_id: str) -> tuple[str, ...]:
        worst = fold(self._results)
        return tuple(
            item
            for item in clause(clause_id).requires
            if worst.get(item, Outcome.PASS) not in HOLDS | {Outcome.DESELECTED, Outcome.COULD_NOT_RUN}
        )

    def _guarded(self, clause_id: str, case: str, body: Callable[[], str | None]) -> Result:
        """Run a body; whatever it raises is an outcome."""
        began = time.monotonic()
        try:
            outcome, evidence = Outcome.PASS, Evidence(body() or "")
        except Failed as failed:
            outcome, evidence = Outcome.FAIL, failed.evidence
        except CouldNotRun as reason:
            outcome, evidence = Outcome.COULD_NOT_RUN, Evidence(str(reason))
        except NotApplicable as reason:
            outcome, evidence = Outcome.NOT_APPLICABLE, Evidence(str(reason))
        except ProbeFailed as error:
            fault: Fault = "plugin" if error.from_plugin else "runtime"
            outcome = Outcome.FAIL if error.clause == clause_id else Outcome.ERROR
            trace = tuple(error.trace.strip().splitlines()[-TRACE_LINES:])
            evidence = Evidence(f"{error.kind}: {error.text}", error.where, trace, fault)
        except ChildDied as error:
            outcome, evidence = Outcome.ERROR, Evidence(str(error), fault="plugin")
        return Result(clause_id, case, outcome, evidence, (), time.monotonic() - began)

    def _add(self, result: Result) -> None:
        self._results.append(result)
        self._tell(result)


def _inventory(plan: list[tuple[str, str]], results: list[Result]) -> None:
    """Plan and results must agree: what was planned ran, and nothing else did."""
    got = [(result.clause, result.case) for result in results]
    if plan != got:
        missing = [item for item in plan if item not in got]
        extra = [item for item in got if item not in plan]
        raise InternalFault(f"plan and results disagree: missing {missing}, unplanned {extra}")


def environment(bench: Bench) -> dict[str, Any]:
    """Versions and what was shrunk; not part of what must be equal between runs."""
    return {**_versions(), "seed": bench.seed, "device": bench.job["device"], "shrunk": bench.shrunk}


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415
    from platform import python_version  # noqa: PLC0415

    found = {"python": python_version()}
    for name in ("kvcontract", "numpy", "pydantic", "torch", "transformers", "numba"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def results_by_clause(results: tuple[Result, ...]) -> Iterator[tuple[str, list[Result]]]:
    """Results grouped by clause, in order."""
    grouped: dict[str, list[Result]] = {}
    for result in results:
        grouped.setdefault(result.clause, []).append(result)
    yield from grouped.items()

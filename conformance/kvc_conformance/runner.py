"""The runner owns the suite: it plans, has the children execute, judges, and compares plan with results."""

from __future__ import annotations

import functools
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from kvc_conformance.bench import Bench, Check, CouldNotRun, Failed, NotApplicable, parse
from kvc_conformance.checkpoints import refuse_broken_weights
from kvc_conformance.checks import CHECKS, TIER_CHECKS
from kvc_conformance.driver import ChildDied, ProbeFailed
from kvc_conformance.outcomes import BROKEN, HOLDS, Evidence, Fault, Outcome, Result, Verdict, fold, judge
from kvc_conformance.profiles import PROFILES, ProfileName
from kvc_conformance.waivers import Waiver, weighed
from kvcontract.contract.capability import CAPABILITIES, applies
from kvcontract.contract.clauses import CLAUSES, TIER_CLAUSES, Clause, Level, clause
from kvcontract.contract.errors import EnvironmentFault, InternalFault, UsageFault
from kvcontract.contract.model import KvModel
from kvcontract.contract.stand_in import StandIn
from kvcontract.core.identity import load_config

NOT_LOADED: Final = 4
BROKEN_PLUGIN: Final = "KVC-DECL-01"
BAD_RETURN: Final = "KVC-DECL-04"
NO_TIER: Final = "KVC-TIER-01"
LOAD_FAULTS: Final = frozenset({"PluginLoadError", "PluginNotFound", "DuplicatePlugin"})
REFUSED: Final = "PluginFault"
PLUGIN_FAULTS: Final = LOAD_FAULTS | {REFUSED, "HookQuit", "NotConformant"}
NO_MEMORY: Final = ("MemoryError", "OutOfMemoryError")
NO_MEMORY_WORDS: Final = ("can't allocate memory", "not enough memory", "Unable to allocate")
STEP_REFUSED: Final = "step refused: "
TRACE_LINES: Final = 12


@dataclass(frozen=True, slots=True)
class Request:
    """What to certify, and how.

    Attributes:
        name: the model's or tier's name.
        file: an unpackaged plugin.
        config: a config.json: the declaration is judged for it, and a small model of it is run.
        checkpoint: a folder of config.json and weights, run as it is.
        options: core launch options by name; None values are not given.
        plugin_options: the plugin's own.
        level: the level to certify.
        only: clauses to restrict the run to, with what they require; the verdict is then incomplete.
        alone: without what they require: quicker, but what fails may not be the root of it.
        seed: all randomness comes from it.
        profile: how much is tried of what has no end.
        device: where executors run, in torch's spelling.
        tier: it is a tier; `config`, `checkpoint`, `options`, `level` and `device` do not apply.
        waivers: failures that are lived with for a while.
    """

    name: str
    file: Path | None = None
    config: Path | None = None
    checkpoint: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    plugin_options: Mapping[str, str] = field(default_factory=dict)
    level: Level = "L2"
    only: tuple[str, ...] = ()
    alone: bool = False
    seed: int = 0
    profile: ProfileName = "quick"
    device: str = "cpu"
    tier: bool = False
    waivers: tuple[Waiver, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """What a run found.

    Attributes:
        request: what was asked.
        plan: the (clause, case) pairs that were to run.
        results: one for each, in order.
        verdict: what they come to.
        environment: versions and the like.
        model: what was declared; None: nothing that can be shown, or a tier was certified.
    """

    request: Request
    plan: tuple[tuple[str, str], ...]
    results: tuple[Result, ...]
    verdict: Verdict
    environment: dict[str, Any]
    model: KvModel | None = None


@dataclass(frozen=True, slots=True)
class _Subject:
    """What is certified: by which clauses and checks, up to which level, and how a child loads it."""

    clauses: tuple[Clause, ...]
    checks: tuple[Check, ...]
    level: Level
    load: Callable[[Bench], _Refusal | None]


Progress = Callable[[Result], None]
Planned = Callable[[int], None]


def run(request: Request, *, progress: Progress | None = None) -> Report:
    """Certify a plugin.

    Args:
        request: what and how.
        progress: told of each failure as it comes, and of a clause's other results once it is through.

    Raises:
        UsageFault: the request cannot be read: no such file, unknown clause; all faults are named.
        InternalFault: plan and results disagree.
    """
    tell = progress or (lambda _: None)
    _refuse(request)
    subject = _subject(request)
    with tempfile.TemporaryDirectory(prefix="kvc-") as folder:
        profile = PROFILES[request.profile]
        bench = Bench(_job(request), Path(folder), request.seed, request.checkpoint, profile)
        if subject.level == "L2":
            bench.expect_children()
        try:
            failure = subject.load(bench)
            runner = _Runner(bench, request, subject, tell)
            results = runner.refused(failure) if failure else runner.all()
        finally:
            bench.close()
    _inventory(runner.plan, results)
    verdict = judge(request.name, results, subject.level, subject.clauses)
    if failure is not None and not failure.loaded:
        sentence = f"{request.name}: could not be loaded: {failure.evidence.saw}"
        verdict = Verdict("not conformant", None, sentence, NOT_LOADED)
    elif request.only and _selection_holds(request, results):
        sentence = f"{request.name}: every selected clause holds; a selection certifies nothing"
        verdict = Verdict("incomplete", None, sentence, 3)
    verdict = weighed(verdict, fold(results), request.waivers, datetime.now(UTC).date())
    plan, ran_in = tuple(runner.plan), environment(bench, request)
    return Report(request, plan, tuple(results), verdict, ran_in, bench.model)


def _selection_holds(request: Request, results: list[Result]) -> bool:
    worst = fold(results)
    return all(worst.get(clause(item).id) in HOLDS for item in request.only) and not any(
        outcome in BROKEN for outcome in worst.values()
    )


def _subject(request: Request) -> _Subject:
    if request.tier:
        return _Subject(TIER_CLAUSES, TIER_CHECKS, "T", _load_tier)
    return _Subject(CLAUSES, CHECKS, request.level, _load)


def _refuse(request: Request) -> None:
    faults = []
    if request.config is not None and request.checkpoint is not None:
        faults.append("give --config or --checkpoint, not both")
    if request.alone and not request.only:
        faults.append("--alone is for --clause: name one")
    for item in request.only:
        try:
            level = clause(item).level
        except UsageFault as error:
            faults.append(str(error))
            continue
        if (level == "T") != request.tier:
            faults.append(f"{item} is a clause on {'tiers' if level == 'T' else 'models'}")
    if faults:
        raise UsageFault("; ".join(faults))
    if request.config is not None:
        load_config(request.config)
    if request.checkpoint is not None:
        load_config(request.checkpoint)
        refuse_broken_weights(request.checkpoint)


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


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why there is nothing to certify: what the plugin did before it had declared."""

    clause: str
    evidence: Evidence
    loaded: bool


def _load(bench: Bench) -> _Refusal | None:
    """Have the plugin imported and declare; what keeps it from that is returned.

    Raises:
        UsageFault: what was asked for cannot be read.
    """
    loaded = False
    try:
        bench.plugin.call("declare.load")
        loaded = True
        answer = bench.plugin.call("declare.declare").body
    except ChildDied as error:
        when = "a hook ran" if loaded else "it was imported"
        return _Refusal(BROKEN_PLUGIN, Evidence(f"while {when}, {error}", fault="plugin"), loaded)
    except ProbeFailed as error:
        return _refusal(error, loaded=loaded)
    bench.model, bench.findings = parse(answer)
    bench.stand_ins = tuple(StandIn(**mark) for mark in answer["stand_ins"])
    bench.runs = bool(answer["runs"])
    bench.samples = tuple(answer["samples"])
    if answer["config"] is not None:
        bench.samples = (dict(answer["config"]), *bench.samples)
    return None


def _load_tier(bench: Bench) -> _Refusal | None:
    """Have the tier's plugin imported; what keeps it from that is returned."""
    try:
        bench.built_in = bool(bench.plugin.call("tier.load_plugin").body["built_in"])
    except ChildDied as error:
        return _Refusal(NO_TIER, Evidence(f"while it was imported, {error}", fault="plugin"), loaded=False)
    except ProbeFailed as error:
        return replace(_refusal(error, loaded=False), clause=NO_TIER)
    return None


def _refusal(error: ProbeFailed, *, loaded: bool) -> _Refusal:
    if not error.from_plugin and error.kind == "UsageFault":
        raise UsageFault(error.text) from error
    if not error.from_plugin and error.kind in {"EnvironmentFault", "MissingExtra"}:
        raise EnvironmentFault(error.text) from error
    trace = tuple(error.trace.strip().splitlines()[-TRACE_LINES:])
    text, broken = error.text, error.clause
    if loaded and broken is None and not error.from_plugin and error.kind not in PLUGIN_FAULTS:
        text, broken = f"what a hook returned cannot be used: {error.kind}: {error.text}", BAD_RETURN
    elif broken is None and error.kind not in LOAD_FAULTS:
        text = f"{'a hook' if loaded else 'import'} raised {error.kind}: {error.text}"
    evidence = Evidence(text, error.where, trace, "plugin")
    return _Refusal(broken or BROKEN_PLUGIN, evidence, loaded)


class _Runner:
    def __init__(self, bench: Bench, request: Request, subject: _Subject, tell: Progress) -> None:
        self._bench = bench
        self._request = request
        self._subject = subject
        self._tell = tell
        self.plan: list[tuple[str, str]] = []
        self._results: list[Result] = []

    def all(self) -> list[Result]:
        """Run every check of the levels asked for, in the order of the clauses."""
        chosen = self._chosen()
        for item in self._subject.clauses:
            if item.level > self._subject.level:
                continue
            before = len(self._results)
            for check in (check for check in self._subject.checks if check.clause == item.id):
                self._run(check, selected=item.id in chosen)
            self._tell_of(self._results[before:])
        return self._results

    def refused(self, failure: _Refusal) -> list[Result]:
        """The results of a plugin that never came to declare: one failure, everything else blocked."""
        broken = failure.clause
        for item in self._subject.clauses:
            if item.level > self._subject.level:
                continue
            self.plan.append((item.id, ""))
            if item.id == broken:
                self._add(Result(item.id, "", Outcome.FAIL, failure.evidence))
            else:
                self._add(Result(item.id, "", Outcome.BLOCKED, because=(broken,)))
            self._tell_of(self._results[-1:])
        return self._results

    def _chosen(self) -> set[str]:
        if not self._request.only:
            return {item.id for item in self._subject.clauses}
        chosen: set[str] = set()
        open_ids = [clause(item).id for item in self._request.only]
        while open_ids:
            item = open_ids.pop()
            if item not in chosen:
                chosen.add(item)
                open_ids += () if self._request.alone else clause(item).requires
        return chosen

    def _run(self, check: Check, *, selected: bool) -> None:
        blocked_by = self._blockers(check.clause)
        if blocked_by or not selected:
            outcome = Outcome.BLOCKED if blocked_by else Outcome.DESELECTED
            self.plan.append((check.clause, ""))
            self._add(Result(check.clause, "", outcome, because=blocked_by))
            return
        planned: list[tuple[str, ...]] = []
        failed = self._guarded(check.clause, "", lambda: planned.append(self._cases(check)))
        if failed.outcome is not Outcome.PASS:
            self.plan.append((check.clause, ""))
            self._add(failed)
            return
        self.plan += [(check.clause, case) for case in planned[0]]
        for case in planned[0]:
            self._add(self._guarded(check.clause, case, functools.partial(check.run, self._bench, case)))

    def _cases(self, check: Check) -> tuple[str, ...]:
        """The cases of a check.

        Raises:
            NotApplicable: the declaration has not what the clause is about.
        """
        rule = clause(check.clause)
        if rule.capability is not None and self._bench.model is not None:
            model = self._bench.model if rule.level == "L0" else self._bench.small
            if not applies(rule, model):
                raise NotApplicable(f"it applies where {CAPABILITIES[rule.capability].words}")
        return check.cases(self._bench)

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
            outcome, evidence = Outcome.COULD_NOT_RUN, Evidence(str(reason), reason.where)
        except NotApplicable as reason:
            outcome, evidence = Outcome.NOT_APPLICABLE, Evidence(str(reason))
        except ProbeFailed as error:
            outcome, evidence = _raised(error, clause_id)
        except ChildDied as error:
            outcome, evidence = Outcome.ERROR, Evidence(str(error), fault="plugin")
        except (MemoryError, OverflowError) as error:
            outcome, evidence = Outcome.COULD_NOT_RUN, Evidence(_no_memory(str(error)))
        except Exception as error:  # noqa: BLE001 - the report is never lost, whatever the suite did wrong
            trace = tuple("".join(traceback.format_exception(error)).strip().splitlines()[-TRACE_LINES:])
            saw = f"the suite itself raised {type(error).__name__}: {error}"
            outcome, evidence = Outcome.ERROR, Evidence(saw, trace=trace, fault="suite")
        return Result(clause_id, case, outcome, evidence, (), time.monotonic() - began)

    def _add(self, result: Result) -> None:
        if self._bench.built_in and result.fault == "plugin":
            result = replace(result, evidence=replace(result.evidence, fault="runtime"))
        self._results.append(result)
        if result.outcome in BROKEN:
            self._tell(result)

    def _tell_of(self, results: list[Result]) -> None:
        """What was not told at once, folded: a line for each outcome of a clause."""
        for outcome in dict.fromkeys(result.outcome for result in results if result.outcome not in BROKEN):
            same = [result for result in results if result.outcome is outcome]
            case = same[0].case if len(same) == 1 else f"{len(same)} cases"
            seconds = sum(result.seconds for result in same)
            self._tell(replace(same[0], case=case, seconds=seconds))


def _raised(error: ProbeFailed, clause_id: str) -> tuple[Outcome, Evidence]:
    """What an exception in the child comes to."""
    if error.kind in NO_MEMORY or any(words in error.text for words in NO_MEMORY_WORDS):
        return Outcome.COULD_NOT_RUN, Evidence(_no_memory(error.text))
    trace = tuple(error.trace.strip().splitlines()[-TRACE_LINES:])
    if error.from_plugin and error.text.startswith(STEP_REFUSED):
        saw = (
            "the plugin's executor handed on a step that is not the one it was given:"
            f" {error.text.removeprefix(STEP_REFUSED)}"
        )
        return Outcome.FAIL, Evidence(saw, error.where, trace, "plugin")
    if error.kind == REFUSED:  # the library's own judgement of what the plugin brings, in words
        return Outcome.FAIL, Evidence(error.text, error.where, trace, "plugin")
    plugin = error.from_plugin or error.kind in PLUGIN_FAULTS
    if clause(clause_id).who == "runtime" and not plugin:  # what it does under a script is what is judged
        saw = f"in the middle of the script the runtime raised {error.kind}: {error.text}"
        return Outcome.FAIL, Evidence(saw, error.where, trace, "runtime")
    outcome = Outcome.FAIL if error.clause == clause_id else Outcome.ERROR
    fault: Fault = "plugin" if plugin else "runtime"
    return outcome, Evidence(f"{error.kind}: {error.text}", error.where, trace, fault)


def _no_memory(said: str) -> str:
    return (
        f"needs more memory than this machine has ({said or 'no more is said'}); look at the sizes declared"
    )


def _inventory(plan: list[tuple[str, str]], results: list[Result]) -> None:
    """Plan and results must agree: what was planned ran, and nothing else did."""
    got = [(result.clause, result.case) for result in results]
    if plan != got:
        missing = [item for item in plan if item not in got]
        extra = [item for item in got if item not in plan]
        raise InternalFault(f"plan and results disagree: missing {missing}, unplanned {extra}")


def environment(bench: Bench, request: Request) -> dict[str, Any]:
    """Versions and what was shrunk; not part of what must be equal between runs."""
    asked = {"seed": request.seed, "profile": request.profile, "device": request.device}
    return {**_versions(), **asked, "shrunk": bench.shrunk}


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

"""Level 0, and what follows from declarations alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

from kvc_conformance.bench import Bench, Check, CouldNotRun, Failed, parse, told
from kvc_conformance.driver import ProbeFailed
from kvc_conformance.facts import first_difference, keys_of, with_value, without
from kvcontract.contract.check import check_model
from kvcontract.contract.clauses import CLAUSES
from kvcontract.contract.finding import Finding
from kvcontract.contract.model import KvModel
from kvcontract.contract.stand_in import facts_of

BEFORE_DECLARING: Final = frozenset(
    {"KVC-DECL-01", "KVC-DECL-02", "KVC-DECL-03", "KVC-DECL-10", "KVC-DECL-11"}
)
"""Clauses that hold or break before there is a declaration."""

PURE: Final = "KVC-DECL-05"
OPTIONS: Final = "KVC-DECL-10"
RAISED: Final = "KVC-DECL-01"
FACTS: Final = "KVC-DECL-11"
TP_DEGREES: Final = (1, 2, 4, 8)
FLOATS: Final = ("bfloat16", "float16", "float32")


def _static(clause_id: str) -> Check:
    def run(bench: Bench, _case: str) -> None:
        found = [item for item in bench.findings if item.clause == clause_id]
        found += _again(bench, clause_id, found)
        found += [item for item in _of_samples(bench) if item.clause == clause_id]
        if found:
            raise Failed(told(found), where=found[0].where)
        if clause_id not in BEFORE_DECLARING:
            _ = bench.declared

    return Check(clause_id, run)


def _again(bench: Bench, clause_id: str, found: list[Finding]) -> list[Finding]:
    """The parent's own judgement of the parsed declaration, where the child reported nothing."""
    if found or bench.model is None:
        return []
    tp = int(bench.job["options"].get("tp") or 1)
    return [item for item in check_model(bench.model, tp=tp) if item.clause == clause_id]


def _pure(bench: Bench, case: str) -> str:
    """KVC-DECL-05: the same in a second call, and in a process of other hashes and variables."""
    _static(PURE).run(bench, case)
    where = bench.declared.where
    variables = " and ".join(f"{name} is {value}" for name, value in bench.swayed.items())
    another = f"another process, where {variables}," if variables else "another process"
    try:
        other, findings = parse(bench.peer.call("declare.declare").body)
    except ProbeFailed as error:
        if not variables:
            raise
        raise Failed(f"{another} declares nothing: {error.text}", where=where) from error
    if other is None:
        raise Failed(f"{another} declares nothing: {told(findings)}", where=where)
    unlike = first_difference(_plain(other), _plain(bench.declared))
    if unlike is not None:
        why = "sets have another order in each process, and names, times and numbers of processes are others"
        if variables:
            why = "a declaration follows from ctx alone, or workers of other environments would not agree"
        raise Failed(f"{another} declares something else: {unlike}; {why}", where=where)
    return "equal in two processes"


def _plain(model: KvModel) -> Any:
    return json.loads(model.canonical_json())


def _options(bench: Bench, case: str) -> str:
    """KVC-DECL-10: what was given, and some more, is honoured or refused by name."""
    _static(OPTIONS).run(bench, case)
    if bench.model is None:
        return ""
    tried = []
    for name, value in _to_try(bench.model):
        model, findings = parse(bench.plugin.call("declare.declare", {"options": {name: value}}).body)
        lost = [item for item in findings if (item.clause, item.path) == (OPTIONS, f"options.{name}")]
        wrong = _raised(findings) + (lost if model is not None else [])  # what is refused declares nothing
        if wrong:
            raise Failed(
                f"asked for {name} {value}: {wrong[0].message}; an option is honoured, or refused by"
                f' `raise ctx.refuse("{name}", ...)`',
                where=wrong[0].where or bench.model.where,
            )
        tried.append(name)
    return f"tried: {', '.join(tried)}"


def _raised(findings: Iterable[Finding]) -> list[Finding]:
    """Those of a factory that raised something else than a refusal."""
    return [item for item in findings if item.clause == RAISED]


def _to_try(model: KvModel) -> Iterator[tuple[str, Any]]:
    """Options with values other than what is declared without them."""
    yield "tp", 2
    sizes = model.page_tokens_allowed or (2 * model.page_tokens,)
    yield from (("page_tokens", size) for size in sizes if size != model.page_tokens)
    yield "key_tokens", 2 * model.record_tokens
    kept = {item.dtype for arena in model.arenas for item in arena.fields}
    yield from (("kv_dtype", name) for name in FLOATS if name not in kept)


def _facts(bench: Bench, case: str) -> None:
    """KVC-DECL-11: nothing is missing or refused, and nothing stands in for what is missing."""
    _static(FACTS).run(bench, case)
    _refuse_guesses(bench)
    marks = bench.stand_ins
    if marks:
        needs = f"needs facts that are still to be filled in: {facts_of(marks)}"
        raise CouldNotRun(needs, where=marks[0].where)


def _refuse_guesses(bench: Bench) -> None:
    """A key that a config lacks is what the model's own code takes it for, or it is refused.

    Where the declaration does not change without a key, the key is not used; where it does, transformers
    tells what the model then is, and for that, given outright, the declaration must be the same.
    """
    if bench.model is None or not bench.samples:
        return
    config = _made_small(bench) or bench.samples[0]  # its numbers are seldom anybody's guess
    paths = list(keys_of(config))
    (base, _), *found = _declared_for(bench, [config, *(without(config, path) for path in paths)])
    if base is None:
        return
    missed = {}
    for path, (model, findings) in zip(paths, found, strict=True):
        for item in _raised(findings):
            raise Failed(
                f"for a config without {'.'.join(path)}, {item.message}; config.counts and config.facts name"
                " what is missing",
                where=item.where,
            )
        if model is not None and first_difference(model, base):
            missed[path] = model
    for path, value in _taken(bench, config, list(missed)):
        ((meant, _),) = _declared_for(bench, [with_value(config, path, value)])
        if meant is None and value is None:
            continue  # null is refused as such, and says nothing
        unlike = "that is refused" if meant is None else first_difference(missed[path], meant)
        if unlike is not None:
            raise Failed(
                f"for a config without {'.'.join(path)}, where transformers takes {value!r}, another model is"
                f" declared than with that value: {unlike}; config.counts and config.facts name what is"
                " missing",
                where=bench.model.where,
            )


def _taken(
    bench: Bench, config: dict[str, Any], paths: list[tuple[str, ...]]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """What transformers takes for each key that a config lacks, as far as it can be told."""
    if not paths:
        return
    try:
        answer = bench.reference.call("reference.completed", {"config": config, "paths": paths})
    except ProbeFailed as error:
        if error.kind != "MissingExtra":
            raise
        return
    for path, values in zip(paths, answer.body["found"], strict=True):
        yield from ((path, value) for value in values)


def _declared_for(bench: Bench, configs: list[dict[str, Any]]) -> list[tuple[Any, list[Finding]]]:
    """What is declared for each, as plain JSON, and what is wrong with it; None where anything is."""
    answer = bench.plugin.call("declare.variants", {"configs": configs})
    return [
        (None if text is None else json.loads(text), [Finding(**item) for item in findings])
        for text, findings in answer.body["found"]
    ]


def _made_small(bench: Bench) -> dict[str, Any] | None:
    """The config of a small model of the kind; None: there is nothing that could be made small."""
    try:
        return bench.small_config
    except (KeyError, TypeError, ValueError):
        return None


def _of_samples(bench: Bench) -> list[Finding]:
    """What is wrong with what is declared for the plugin's own samples, and for a small model of the kind.

    Where what is declared for the facts given is wrong, that is told alone.
    """
    if bench.findings or bench.model is None or not bench.samples:
        return []
    if "findings of samples" not in bench.kept:
        small = _made_small(bench)
        configs = {} if small is None else {"for a small model of the kind, ": small}
        if bench.job["config"] is None and bench.job["checkpoint"] is None:
            configs = {f"for kvc_samples[{i}], ": sample for i, sample in enumerate(bench.samples)} | configs
        found = _declared_for(bench, list(configs.values()))
        bench.kept["findings of samples"] = next(
            (
                [replace(item, path=f"{whose}{item.path}") for item in findings]
                for whose, (_, findings) in zip(configs, found, strict=True)
                if findings
            ),
            [],
        )
    kept: list[Finding] = bench.kept["findings of samples"]
    return kept


def _same_for_every_tp(bench: Bench, _case: str) -> str:
    """KVC-LAYOUT-08."""
    base = bench.declared
    served = []
    for tp in TP_DEGREES:
        model, findings = parse(bench.plugin.call("declare.declare", {"options": {"tp": tp}}).body)
        if model is None or findings:
            continue  # a degree that does not fit is refused, which KVC-LAYOUT-02 judges
        served.append(tp)
        unlike = first_difference(_plain(model), _plain(base))
        if unlike is not None:
            raise Failed(
                f"at tp {tp} the declaration differs from that at the tp asked for: {unlike}",
                where=base.where,
            )
    if not served:
        raise CouldNotRun("no degree of tensor parallelism is served")
    return f"equal at tp {', '.join(map(str, served))}"


CHECKS: Final[tuple[Check, ...]] = (
    *(_static(item.id) for item in CLAUSES if item.level == "L0" and item.id not in {PURE, OPTIONS, FACTS}),
    Check(PURE, _pure),
    Check(OPTIONS, _options),
    Check(FACTS, _facts),
    Check("KVC-LAYOUT-08", _same_for_every_tp),
)

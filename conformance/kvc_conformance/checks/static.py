"""Level 0, and what follows from declarations alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
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
FACTS: Final = "KVC-DECL-11"
TP_DEGREES: Final = (1, 2, 4, 8)
FLOATS: Final = ("bfloat16", "float16", "float32")


def _static(clause_id: str) -> Check:
    def run(bench: Bench, _case: str) -> None:
        found = [item for item in bench.findings if item.clause == clause_id]
        found += _again(bench, clause_id, found)
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
    """KVC-DECL-05: the same in a second call, and in a process of other hashes."""
    _static(PURE).run(bench, case)
    other, findings = parse(bench.peer.call("declare.declare").body)
    if other is None:
        raise Failed(f"another process declares nothing: {told(findings)}", where=bench.declared.where)
    unlike = first_difference(_plain(other), _plain(bench.declared))
    if unlike is not None:
        raise Failed(
            f"another process declares something else: {unlike}; sets have another order in each process, and"
            " names, times and numbers of processes are others",
            where=bench.declared.where,
        )
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
        if model is not None and lost:  # where it is refused, nothing is declared
            raise Failed(
                f"asked for {name} {value}: {lost[0].message}; an option is honoured, or refused by"
                f' `raise ctx.refuse("{name}", ...)`',
                where=model.where,
            )
        tried.append(name)
    return f"tried: {', '.join(tried)}"


def _to_try(model: KvModel) -> Iterator[tuple[str, Any]]:
    """Options with values other than what is declared without them."""
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
    try:
        config = bench.small_config  # its numbers are seldom anybody's guess
    except (KeyError, TypeError, ValueError):  # it has nothing that could be made small
        config = bench.samples[0]
    paths = list(keys_of(config))
    base, *found = _declared_for(bench, [config, *(without(config, path) for path in paths)])
    missed = {
        path: model
        for path, model in zip(paths, found, strict=True)
        if base is not None and model is not None and first_difference(model, base)
    }
    for path, value in _taken(bench, config, list(missed)):
        (meant,) = _declared_for(bench, [with_value(config, path, value)])
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


def _declared_for(bench: Bench, configs: list[dict[str, Any]]) -> list[Any]:
    """What is declared for each, as plain JSON; None where it is refused."""
    answer = bench.plugin.call("declare.variants", {"configs": configs})
    return [None if text is None else json.loads(text) for text in answer.body["models"]]


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

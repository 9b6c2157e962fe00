"""A report as one HTML page that needs nothing else: verdict, failures, clauses, and the model's memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

from jinja2 import Environment, StrictUndefined

from kvc_conformance.claims import claims
from kvc_conformance.outcomes import BROKEN, HOLDS, Outcome, Result, fold
from kvc_conformance.report import WORDS, failure, whole
from kvc_conformance.runner import Report, results_by_clause
from kvcontract.contract.clauses import LEVELS, clause
from kvcontract.contract.layout import Space, layout
from kvcontract.contract.model import KvModel

COLOURS: Final = 8
"""Of fields in a memory map; the page's style names as many."""

FIELDS_SHOWN: Final = 12
"""Rows of a space's table; of a model of many layers the rest look the same."""

ENTRIES_SHOWN: Final = 6
"""Of a list in a config."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A field in the picture of one block.

    Attributes:
        start: per mille of the block.
        width: likewise.
        colour: number of its field's name.
        title: what it is, in words.
    """

    start: float
    width: float
    colour: int
    title: str


def page(report: Report) -> str:
    """The page, complete with its style; no script, nothing that is fetched."""
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    text = files("kvc_conformance").joinpath("page.html.j2").read_text(encoding="utf-8")
    request, worst = report.request, fold(report.results)
    told = [
        ["\n".join(failure(result, request)) for result in results if result.outcome in BROKEN]
        for _, results in results_by_clause(report.results)
    ]
    env = dict(report.environment)
    shrunk = env.pop("shrunk", {})
    return environment.from_string(text).render(
        name=request.name,
        kind="tier" if request.tier else "model",
        verdict=report.verdict,
        levels=_levels(worst),
        counts=Counter(WORDS[outcome] for outcome in worst.values()),
        failures=[texts for texts in told if texts],
        claims={} if report.model is None else claims(report.model, worst),
        clauses=[_row(clause_id, results, worst[clause_id]) for clause_id, results in _by_level(report)],
        again=whole(request),
        spaces=[] if report.model is None else _spaces(report.model),
        declared=report.model,
        env=env,
        shrunk=[(key, _short(was), _short(now)) for key, (was, now) in shrunk.items()],
    )


def _short(value: Any) -> str:
    """A value of a config; of a long list, its length."""
    if isinstance(value, list) and len(value) > ENTRIES_SHOWN:
        return f"{len(value)} entries"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _by_level(report: Report) -> list[tuple[str, list[Result]]]:
    return sorted(results_by_clause(report.results), key=lambda item: (clause(item[0]).level, item[0]))


def _levels(worst: dict[str, Outcome]) -> list[dict[str, Any]]:
    """Each level that was to be certified, and whether all of its clauses hold."""
    found = []
    for level, about in LEVELS.items():
        mine = [outcome for clause_id, outcome in worst.items() if clause(clause_id).level == level]
        if mine:
            holds = all(outcome in HOLDS for outcome in mine)
            failed = any(outcome in BROKEN for outcome in mine)
            state = "holds" if holds else "fails" if failed else "open"
            kept = sum(outcome in HOLDS for outcome in mine)
            found.append({"id": level, "about": about, "state": state, "kept": kept, "of": len(mine)})
    return found


def _row(clause_id: str, results: list[Result], outcome: Outcome) -> dict[str, Any]:
    said = [result.evidence.saw for result in results if result.outcome is outcome and result.evidence.saw]
    because = sorted({other for result in results for other in result.because})
    return {
        "rule": clause(clause_id),
        "word": WORDS[outcome],
        "outcome": outcome.value,
        "cases": len(results),
        "note": f"because of {', '.join(because)}" if because else said[0] if said else "",
        "seconds": sum(result.seconds for result in results),
    }


def _spaces(model: KvModel) -> list[dict[str, Any]]:
    """What one block of each space looks like."""
    found = []
    for space in layout(model).spaces:
        bars, names = _bars(space)
        fields = [
            {
                "arena": arena.name,
                "field": field.name,
                "dtype": field.dtype,
                "shape": ", ".join(f"{axis} {n:,}" for axis, n in zip(field.axes, field.shape, strict=True)),
                "offset": arena.offset_bytes + field.offset_bytes,
                "bytes": field.content_bytes,
                "colour": names[field.name],
            }
            for arena in space.arenas
            for field in arena.fields
        ]
        used = sum(field.content_bytes for arena in space.arenas for field in arena.fields)
        kept = {item.group for item in model.arenas if item.name in {arena.name for arena in space.arenas}}
        found.append(
            {
                "key": space.key,
                "groups": [group for group in model.groups if group.name in kept],
                "paged": space.kind == "paged",
                "bytes": space.stride_bytes,
                "per_token": space.stride_bytes / model.page_tokens,
                "padding": space.stride_bytes - used,
                "bars": bars,
                "names": names,
                "fields": fields[:FIELDS_SHOWN],
                "more": len(fields) - len(fields[:FIELDS_SHOWN]),
            }
        )
    return found


def _bars(space: Space) -> tuple[list[Bar], dict[str, int]]:
    """A bar for each field of a block, and the number of each field's name."""
    names: dict[str, int] = {}
    bars = []
    for arena in space.arenas:
        for field in arena.fields:
            colour = names.setdefault(field.name, len(names) % COLOURS)
            at = arena.offset_bytes + field.offset_bytes
            start = 1000 * at / space.stride_bytes
            width = 1000 * field.content_bytes / space.stride_bytes
            where = "" if arena.layer is None else f", layer {arena.layer}"
            title = f"{field.name} of {arena.name}{where}: {field.content_bytes:,} B at {at:,}"
            bars.append(Bar(round(start, 3), round(width, 3), colour, title))
    return bars, names

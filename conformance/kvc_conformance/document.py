"""What a report is as JSON: ``kvc schema report`` prints the schema of `ReportDocument`."""

from __future__ import annotations

from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NotRequired,  # typing's own, which pydantic wants before 3.12
)

from pydantic import ConfigDict, Field, TypeAdapter, with_config
from typing_extensions import TypedDict

SCHEMA: Final = "kvc.report/1"

OutcomeName = Literal["pass", "fail", "error", "blocked", "could_not_run", "not_applicable", "deselected"]
LevelName = Literal["L0", "L1", "L2", "L3", "T"]
ClaimState = Literal["held", "broken", "open", "not declared"]


@with_config(ConfigDict(extra="forbid", title="Result"))
class ResultDocument(TypedDict):
    """One check of one case."""

    clause: Annotated[str, Field(description="Id of the clause; `kvc explain ID` explains it.")]
    level: LevelName
    case: Annotated[str, Field(description="Page size, precision, ...; empty if there is only one.")]
    outcome: OutcomeName
    saw: Annotated[str, Field(description="What was expected and found; of a pass, figures.")]
    where: Annotated[str | None, Field(description="file:line of the author's code, if known.")]
    trace: Annotated[list[str], Field(description="The steps that led there, at most a dozen.")]
    fault: Annotated[
        Literal["plugin", "runtime", "suite", "environment"] | None,
        Field(description="Whose fault a failure is; null: it is none."),
    ]
    because: Annotated[list[str], Field(description="Of a blocked clause, those that failed before.")]
    rule: str
    fix: Annotated[str, Field(description="What to try first.")]
    again: Annotated[str, Field(description="The command that runs this clause again.")]
    seconds: float


@with_config(ConfigDict(extra="forbid", title="Report"))
class ReportDocument(TypedDict):
    """A report of `kvc conformance --json`.

    A `kvc.report/1` may gain keys under `env`; any other change of what is here is a new number.
    """

    schema: Annotated[Literal["kvc.report/1"], Field(description="Which form this is.")]
    model: NotRequired[Annotated[str, Field(description="Name of the model that was certified.")]]
    tier: NotRequired[Annotated[str, Field(description="Name of the tier that was certified.")]]
    verdict: Literal["conformant", "incomplete", "not conformant"]
    level: Annotated[LevelName | None, Field(description="The highest level whose clauses all hold.")]
    asked: LevelName
    sentence: Annotated[str, Field(description="The verdict in words.")]
    exit_code: Annotated[int, Field(description="See `kvc help exit-codes`.")]
    claims: Annotated[
        dict[str, ClaimState],
        Field(description="What the declaration has that clauses depend on, and what became of it."),
    ]
    counts: Annotated[dict[OutcomeName, int], Field(description="Results by outcome.")]
    plan: Annotated[
        list[tuple[str, str]], Field(description="Clause and case of all that was to run, in order.")
    ]
    results: Annotated[list[ResultDocument], Field(description="One for each entry of the plan.")]
    env: Annotated[
        dict[str, Any],
        Field(description="Versions, seed, profile, device: not part of what equal runs have in common."),
    ]


def schema() -> dict[str, Any]:
    """The JSON schema (2020-12) of a report."""
    draft = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": draft, "$id": SCHEMA, **TypeAdapter(ReportDocument).json_schema(mode="serialization")}

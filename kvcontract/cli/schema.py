"""``kvc schema``: the JSON schemas of what goes in and comes out."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from kvcontract.cli import view
from kvcontract.contract.errors import UsageFault

KINDS: Final = ("model", "report")


def command(
    kind: Annotated[
        str, typer.Argument(help="report: of `kvc conformance --json`; model: of a declaration.")
    ],
) -> int:
    """Print the JSON schema of a report, or of a declaration.

    Example: kvc schema report
    """
    if kind not in KINDS:
        raise UsageFault(f"no schema of {kind!r}; there are: {', '.join(KINDS)}")
    view.emit_json(_report() if kind == "report" else _model())
    return 0


def _report() -> dict[str, Any]:
    from kvc_conformance.document import schema  # noqa: PLC0415 - `kvc --help` must not pay for the suite

    return schema()


def _model() -> dict[str, Any]:
    from kvcontract.contract.model import KvModel  # noqa: PLC0415 - likewise

    return KvModel.model_json_schema()

"""``kvc check``: level 0, the static checks of a declaration."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvcontract.cli import view
from kvcontract.cli.launching import JsonFlag, with_model
from kvcontract.contract.check import finding_document
from kvcontract.contract.stand_in import StandIn, facts_of
from kvcontract.core.geometry import geometry
from kvcontract.core.launch import Launch


@with_model
def command(opened: Launch, *, json: JsonFlag = False) -> int:
    """Check a declaration statically; all findings at once.

    Facts that are still to be filled in are listed; while there are any, the exit code is 3.

    Example: kvc check qwen3 --config config.json --page-tokens 64
    """
    sound = opened.declared is not None and not opened.findings
    marks = opened.stand_ins
    figures = geometry(opened.model, tp=opened.ctx.options.tp) if sound else None
    if json:
        view.emit_json(
            {
                "schema": "kvc.check/1",
                "model": opened.plugin.name,
                "ok": sound and not marks,
                "findings": [finding_document(item) for item in opened.findings],
                "to_fill_in": [asdict(mark) for mark in marks],
                "geometry": figures,
            }
        )
    else:
        for mark in marks:
            view.console().print(f"TO FILL IN  {mark.fact} ({mark.where})")
        if figures is None:
            view.findings(opened.plugin.name, opened.findings)
        else:
            _sound(opened.plugin.name, figures, marks)
    return 1 if not sound else 3 if marks else 0


def _sound(name: str, figures: dict[str, Any], marks: tuple[StandIn, ...]) -> None:
    out = view.console()
    out.print(
        f"{name}: declared soundly; {view.count(figures['arenas'], 'arena')}, "
        f"{view.bytes_text(figures['page_bytes'])} a page of {figures['page_tokens']} tokens, "
        f"{view.bytes_text(figures['bytes_per_token'])} a token at tp {figures['tp']}; "
        f"fingerprint {figures['fingerprint']}"
    )
    if marks:
        out.print(f"{name}: still to be filled in (KVC-DECL-11): {facts_of(marks)}")

"""``kvc check``: level 0, the static checks of a declaration."""

from __future__ import annotations

from kvcontract.cli import view
from kvcontract.cli.launching import JsonFlag, with_model
from kvcontract.contract.check import finding_document
from kvcontract.core.geometry import geometry
from kvcontract.core.launch import Launch


@with_model
def command(opened: Launch, *, json: JsonFlag = False) -> int:
    """Check a declaration statically; all findings at once.

    Example: kvc check qwen3 --config config.json --page-tokens 64
    """
    sound = opened.declared is not None and not opened.findings
    figures = geometry(opened.model, tp=opened.ctx.options.tp) if sound else None
    if json:
        view.emit_json(
            {
                "schema": "kvc.check/1",
                "model": opened.plugin.name,
                "ok": sound,
                "findings": [finding_document(item) for item in opened.findings],
                "geometry": figures,
            }
        )
    elif figures is None:
        view.findings(opened.plugin.name, opened.findings)
    else:
        view.console().print(
            f"{opened.plugin.name}: declared soundly; {view.count(figures['arenas'], 'arena')}, "
            f"{view.bytes_text(figures['page_bytes'])} a page of {figures['page_tokens']} tokens, "
            f"{view.bytes_text(figures['bytes_per_token'])} a token at tp {figures['tp']}; "
            f"fingerprint {figures['fingerprint']}"
        )
    return 0 if sound else 1

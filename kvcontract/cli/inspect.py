"""``kvc inspect``: the geometry of a declaration, and where its bytes go."""

from __future__ import annotations

from typing import Any

from kvcontract.cli import view
from kvcontract.cli.launching import JsonFlag, with_model
from kvcontract.contract.layout import layout
from kvcontract.contract.model import KvModel
from kvcontract.contract.wire import parts, wire_record
from kvcontract.core.geometry import geometry
from kvcontract.core.launch import Launch


@with_model
def command(opened: Launch, *, json: JsonFlag = False) -> int:
    """Show a declaration's bytes, arena by arena.

    Per token, page and worker; and what a stored record holds.

    Example: kvc inspect qwen3 --config config.json --tp 2
    """
    model, tp = opened.model, opened.ctx.options.tp
    figures = geometry(model, tp=tp)
    if json:
        document = {
            "schema": "kvc.inspect/1",
            "model": model.name,
            "geometry": figures,
            "arenas": _arenas(model, tp),
        }
        view.emit_json({**document, "records": _records(model), "declaration": model.model_dump(mode="json")})
        return 0
    summary = [
        ("weights", f"{model.weights.kind} {model.weights.value or model.weights.config}".strip()),
        ("numerics", model.numerics),
        ("page", f"{model.page_tokens} tokens, {view.bytes_text(figures['page_bytes'])} a worker"),
        ("token", f"{view.bytes_text(figures['bytes_per_token'])} a worker, at tp {tp}"),
        ("record", f"{model.record_tokens} tokens"),
        ("fingerprint", figures["fingerprint"]),
    ]
    view.table(f"{model.name}: geometry", ("what", "value"), summary)
    arenas = [[_cell(value) for value in row.values()] for row in _folded(_arenas(model, tp))]
    view.table(
        "arenas of one page-first block",
        ("arena", "group", "field", "dtype", "shape", "offset", "bytes"),
        arenas,
    )
    records = [[_cell(value) for value in row.values()] for row in _records(model)]
    view.table("stored records (one shard)", ("part", "groups", "payload bytes", "segments"), records)
    return 0


def _cell(value: Any) -> str:
    """How a table shows a value: counts with thousands separators, shapes as ``[token 16, head 8]``."""
    if isinstance(value, dict):
        return f"[{', '.join(f'{axis} {size:,}' for axis, size in value.items())}]"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _arenas(model: KvModel, tp: int) -> list[dict[str, Any]]:
    return [
        {
            "arena": arena.name,
            "group": arena.group,
            "field": field.name,
            "dtype": field.dtype,
            "shape": dict(zip(field.axes, field.shape, strict=True)),
            "offset_bytes": arena.offset_bytes + field.offset_bytes,
            "content_bytes": field.content_bytes,
        }
        for space in layout(model, 0, tp).spaces
        for arena in space.arenas
        for field in arena.fields
    ]


def _folded(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first and last rows of a long table, with what is left out between them said."""
    keep = 6
    if len(rows) <= 2 * keep:
        return rows
    middle = dict.fromkeys(rows[0], "") | {"arena": f"… {len(rows) - 2 * keep} more (--json lists them)"}
    return [*rows[:keep], middle, *rows[-keep:]]


def _records(model: KvModel) -> list[dict[str, Any]]:
    records = [(part, wire_record(model, part)) for part in parts(model)]
    return [
        {
            "part": f"{part.id} {part.name}",
            "groups": ", ".join(part.groups),
            "payload_bytes": record.payload_bytes,
            "segments": len(record.segments),
        }
        for part, record in records
    ]

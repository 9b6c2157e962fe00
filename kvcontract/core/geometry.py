"""The figures of a declaration that people plan with: bytes per slice, page, token and worker."""

from __future__ import annotations

from typing import Any

from kvcontract.contract.layout import layout
from kvcontract.contract.model import KvModel
from kvcontract.contract.wire import fingerprint, parts


def geometry(model: KvModel, *, tp: int = 1) -> dict[str, Any]:
    """Bytes of a declaration as plain JSON.

    Args:
        model: a declaration without findings.
        tp: workers that the model is cut over; all byte figures are those of one worker.

    Returns:
        `arenas` counts blocks a page; `slice_bytes` is one page of one arena, per group; `page_bytes` and
        `bytes_per_token` are sums over the paged groups; `stride_bytes` is the distance between
        page-first blocks, per space.
    """
    laid = layout(model, 0, tp)
    slices: dict[str, list[int]] = {}
    for space in laid.spaces:
        for arena in space.arenas:
            sizes = slices.setdefault(arena.group, [])
            if arena.content_bytes not in sizes:
                sizes.append(arena.content_bytes)
    return {
        "page_tokens": model.page_tokens,
        "record_tokens": model.record_tokens,
        "tp": tp,
        "arenas": len(model.arenas),
        "slice_bytes": {name: sizes[0] if len(sizes) == 1 else sizes for name, sizes in slices.items()},
        "page_bytes": laid.page_bytes,
        "bytes_per_token": laid.page_bytes // model.page_tokens,
        "spaces": [
            {
                "key": space.key,
                "kind": space.kind,
                "groups": list(space.groups),
                "content_bytes": space.content_bytes,
                "stride_bytes": space.stride_bytes,
            }
            for space in laid.spaces
        ],
        "parts": [{"id": part.id, "name": part.name, "groups": list(part.groups)} for part in parts(model)],
        "fingerprint": str(fingerprint(model)),
    }

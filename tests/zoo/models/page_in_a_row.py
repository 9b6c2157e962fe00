"""Wrong on purpose: gives the token axis the size of a page, though a row is one token."""

from __future__ import annotations

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl
from kvcontract.contract.model import Axes

KVC_CONTRACT = 1
TRIPS = "KVC-LAYOUT-04"
SAYS = r"one row has one token; the page size multiplies it; allowed: token of size 1"
LEVEL = "L0"
PAGE = Axes([("head", 8), ("token", 16), ("dim", 128)])


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, head-major, whole pages a row."""
    model = kvc_qwen3.kvc_model(ctx)
    arenas = []
    for arena in model.arenas:
        fields = tuple(field.model_copy(update={"axes": PAGE}) for field in arena.fields)
        arenas.append(arena.model_copy(update={"fields": fields}))
    return model.model_copy(update={"name": "page_in_a_row", "arenas": tuple(arenas)})

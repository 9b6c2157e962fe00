"""Wrong on purpose: names its arenas after the process, so that no two workers' arenas are confused."""

from __future__ import annotations

import os

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-05"
SAYS = r"another process declares something else: arenas\[0\]\.name"
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with other names in every process."""
    model = kvc_qwen3.kvc_model(ctx)
    arenas = tuple(arena.model_copy(update={"name": f"{os.getpid()}.{arena.name}"}) for arena in model.arenas)
    return model.model_copy(update={"name": "own_process", "arenas": arenas})

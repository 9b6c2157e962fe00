"""Wrong on purpose: asks for a state that nobody stores and the executor rebuilds, which is not served."""

from __future__ import annotations

from typing import Any

import kvc_qwen35
from kvcontract import Context, HfLayers, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-12"
SAYS = r"restore = 'recomputed': this version of the runtime does not serve it"
LEVEL = "L1"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with a bounded group that is recomputed."""
    model = kvc_qwen35.kvc_model(ctx)
    groups = tuple(
        group.model_copy(update={"restore": "recomputed"}) if group.kind == "bounded" else group
        for group in model.groups
    )
    return model.model_copy(update={"name": "recomputed_state", "groups": groups})


@hookimpl
def kvc_executor(ctx: Context) -> HfLayers:
    """The real map."""
    return kvc_qwen35.kvc_executor(ctx)


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The real geometry."""
    return kvc_qwen35.kvc_samples(ctx)

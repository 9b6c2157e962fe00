"""Wrong on purpose: asks the config for a key that another family has."""

from __future__ import annotations

from dataclasses import replace

import kvc_qwen3
from kvcontract import Config, Context, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-11"
SAYS = r"config\.n_kv_heads = None: config\.json lacks n_kv_heads"
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, of as many heads as a key says that is not there."""
    config = ctx.config if ctx.config is not None else Config(kvc_qwen3.SAMPLE)
    (heads,) = config.counts("n_kv_heads")
    whole = Config({**config, "num_key_value_heads": heads})
    return kvc_qwen3.kvc_model(replace(ctx, config=whole)).model_copy(update={"name": "other_familys_key"})

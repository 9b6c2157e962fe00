"""The hooks a plugin may implement, each with one argument.

::

    from kvcontract import hookimpl

    KVC_CONTRACT = 1

    @hookimpl
    def kvc_model(ctx): ...
"""

from __future__ import annotations

from typing import Any, Final

import pluggy
from pydantic import BaseModel

from kvcontract.contract.executor import Executor, HfLayers
from kvcontract.contract.model import KvModel
from kvcontract.contract.options import Context
from kvcontract.contract.tier_context import TierContext

PROJECT: Final = "kvcontract"
"""pluggy project name and entry-point group of model plugins."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's function as the implementation of the hook of the same name."""


@hookspec
def kvc_model(ctx: Context) -> KvModel:  # type: ignore[empty-body] # a specification
    """Declare the model (required): pure, without tensors, devices or I/O.

    `ctx.config` is the checkpoint's config, or None for a small built-in; `ctx.weights` goes into the
    declaration as it is.
    """


@hookspec
def kvc_options(ctx: Context) -> type[BaseModel]:  # type: ignore[empty-body] # a specification
    """The plugin's own options, as a pydantic model with defaults (optional)."""


@hookspec
def kvc_executor(ctx: Context) -> Executor | HfLayers:  # type: ignore[empty-body] # a specification
    """What runs the model (optional; level 2 needs it).

    Either an executor for `ctx.checkpoint`, `ctx.device` and `ctx.dtype`, or the map from layers to arenas
    that the generic executor needs.
    """


@hookspec
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:  # type: ignore[empty-body] # a specification
    """Configs (parsed config.json) that the suite may build small checkpoints from (optional).

    The first is used when no checkpoint is given.  Samples add cases; they cannot remove any.
    """


@hookspec
def kvc_tier(ctx: TierContext) -> object:
    """Open a tier, a `kvcontract.tiers.base.Tier` (required of tier plugins, group ``kvcontract.tiers``)."""


HOOKS: Final[tuple[str, ...]] = ("kvc_model", "kvc_options", "kvc_executor", "kvc_samples", "kvc_tier")

"""Open a tier by name: one of ours, or a plugin's."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, cast

from kvcontract.contract import plugins
from kvcontract.contract.errors import DuplicatePlugin, PluginNotFound, UsageFault
from kvcontract.contract.tier_context import TierContext
from kvcontract.memory.slab import Slab
from kvcontract.tiers.base import Tier
from kvcontract.tiers.disk import DiskTier
from kvcontract.tiers.dram import DramTier
from kvcontract.tiers.shared import SharedTier

Open = Callable[[TierContext], Tier]


def _dram(ctx: TierContext) -> Tier:
    # Pinning is slow, so it is done here, once, and not while pages wait.
    allocate = None if ctx.allocate is None else Slab(ctx.capacity_bytes, ctx.allocate)
    return DramTier(ctx.capacity_bytes, clock=ctx.clock, allocate=allocate, handoff_ttl_s=ctx.handoff_ttl_s)


def _disk(ctx: TierContext) -> Tier:
    return DiskTier(
        ctx.directory,
        ctx.capacity_bytes,
        meta=ctx.meta,
        clock=ctx.clock,
        handoff_ttl_s=ctx.handoff_ttl_s,
    )


def _shared(ctx: TierContext) -> Tier:
    return SharedTier(
        ctx.directory,
        ctx.capacity_bytes,
        meta=ctx.meta,
        clock=ctx.clock,
        handoff_ttl_s=ctx.handoff_ttl_s,
    )


BUILT_IN: Final[Mapping[str, Open]] = {
    "dram": _dram,
    "disk": _disk,
    "shared": _shared,
}
"""The tiers of this distribution, by name."""


def opener(
    name: str, options: Mapping[str, str], file: Path | None = None
) -> tuple[Open, plugins.Plugin | None]:
    """What opens the tier of a name, and the plugin it comes from; None: it is one of ours.

    Args:
        name: of the tier.
        options: that it will be given in its context.
        file: an unpackaged plugin; its name is the file's stem.

    Raises:
        PluginFault: no such tier, two of them, or one that cannot be loaded.
        UsageFault: options for a tier that has none.
    """
    announced = {item.name for item in plugins.installed("kvc_tier")}
    if file is None and name in BUILT_IN:
        if name in announced:
            raise DuplicatePlugin(f"tier {name!r} is built in, and a plugin announces it too; uninstall that")
        if options:
            raise UsageFault(f"tier {name!r} has no options of its own; given: {', '.join(options)}")
        return BUILT_IN[name], None
    if file is None and name not in announced:
        known = sorted({*BUILT_IN, *announced})
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(known)}"
        raise PluginNotFound(f"no tier is named {name!r}; {hint}")
    plugin = plugins.load(name, file=file, hook="kvc_tier")
    return lambda ctx: cast("Tier", plugin.call("kvc_tier", ctx)), plugin

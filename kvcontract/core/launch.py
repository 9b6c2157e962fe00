"""From a model's name and a launch's options to a judged declaration: the one way in.

The command line, the suite and the Python API all come through `launch`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcontract.contract import plugins
from kvcontract.contract.errors import NotConformant, UsageFault
from kvcontract.contract.finding import Finding
from kvcontract.contract.model import KvModel, WeightIdentity
from kvcontract.contract.options import Config, Context
from kvcontract.contract.stand_in import StandIn, stand_ins
from kvcontract.core.identity import config_digest, load_config, weight_identity


@dataclass(frozen=True, slots=True)
class Launch:
    """A plugin, the context its hooks are called with, and what it declares there.

    Attributes:
        plugin: the loaded plugin.
        ctx: the context; `ctx.model` is the declaration where there is one.
        declared: the declaration, even if it breaks clauses; None if there is none to speak of.
        findings: every breach, options included.
    """

    plugin: plugins.Plugin
    ctx: Context
    declared: KvModel | None
    findings: tuple[Finding, ...]

    @property
    def stand_ins(self) -> tuple[StandIn, ...]:
        """What the plugin marks as still to be filled in (KVC-DECL-11)."""
        return stand_ins(self.plugin.module)

    @property
    def model(self) -> KvModel:
        """The declaration.

        Raises:
            NotConformant: it breaks clauses; carries every finding.
        """
        if self.declared is None or self.findings:
            raise NotConformant(self.plugin.name, self.findings)
        return self.declared


@dataclass(frozen=True, slots=True)
class Source:
    """Where a launch's facts come from; at most one of `config` and `checkpoint`.

    Attributes:
        name: the model's name.
        file: an unpackaged plugin to use instead of an installed one.
        config: a config.json without weights.
        checkpoint: a folder of config.json and safetensors files.
    """

    name: str
    file: Path | None = None
    config: Path | None = None
    checkpoint: Path | None = None


@dataclass(frozen=True, slots=True)
class Runtime:
    """Where and in which element type an executor computes, in torch's spelling."""

    device: str = "cpu"
    dtype: str = "float32"


def launch(
    source: Source,
    *,
    options: Mapping[str, Any] | None = None,
    plugin_options: Mapping[str, Any] | None = None,
    runtime: Runtime | None = None,
) -> Launch:
    """Load a plugin and judge what it declares.

    Args:
        source: the plugin and the facts.
        options: core options by name (`kvcontract.contract.options.LaunchOptions`).
        plugin_options: the plugin's own options by name.
        runtime: where the executor will run.

    Raises:
        PluginFault: the plugin is missing, broken or ambiguous.
        UsageFault: config or checkpoint cannot be read; every fault is named.
    """
    runtime = runtime or Runtime()
    config, weights = _facts(source)
    plugin = plugins.load(source.name, file=source.file)
    bare = Context(
        config=config,
        weights=weights,
        checkpoint=source.checkpoint,
        device=runtime.device,
        dtype=runtime.dtype,
    )
    ctx, faults = plugin.context(bare, options or {}, plugin_options or {})
    declared, findings = plugin.declare(ctx)
    if declared is not None:
        ctx = ctx.with_model(declared)
    return Launch(plugin, ctx, declared, (*faults, *findings))


def _facts(source: Source) -> tuple[Config | None, WeightIdentity]:
    if source.config is not None and source.checkpoint is not None:
        raise UsageFault("give --config or --checkpoint, not both: a checkpoint has its own config.json")
    if source.checkpoint is not None:
        return Config(load_config(source.checkpoint)), weight_identity(source.checkpoint)
    if source.config is not None:
        config = load_config(source.config)
        return Config(config), WeightIdentity(kind="unresolved", config=config_digest(config))
    return None, WeightIdentity(kind="unresolved")

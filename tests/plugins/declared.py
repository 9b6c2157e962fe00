"""What packaged plugins declare for real configs, and small random models of them."""

from __future__ import annotations

import importlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tiny_models import Tiny

from kvcontract.contract.executor import HfLayers
from kvcontract.contract.finding import Finding
from kvcontract.contract.model import KvModel
from kvcontract.contract.options import Config, Context
from kvcontract.contract.plugins import Plugin
from kvcontract.core.shrink import shrink
from kvcontract.engine.checkpoint import random_model

CONFIGS = Path(__file__).parents[1] / "configs"
NOT_SERVED_YET = "KVC-DECL-12"
"""The one clause that bounded groups and windows break until the runtime serves them."""


def config(name: str) -> dict[str, Any]:
    """A real config.json."""
    found: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return found


def plugin(name: str) -> Plugin:
    """A plugin by its name, whether or not its package is installed."""
    return Plugin(name, importlib.import_module(f"kvc_{name}"), f"kvc-{name}")


def declare(
    name: str, given: dict[str, Any] | None, **options: Any
) -> tuple[KvModel | None, tuple[Finding, ...], Context]:
    """The declaration of a config, its findings but for `NOT_SERVED_YET`, and the context."""
    bare = Context(config=None if given is None else Config(given))
    ctx, faults = plugin(name).context(bare, options, {})
    model, findings = plugin(name).declare(ctx)
    rest = (*faults, *(item for item in findings if item.clause != NOT_SERVED_YET))
    return model, rest, ctx if model is None else ctx.with_model(model)


def sound(name: str, given: dict[str, Any] | None, **options: Any) -> KvModel:
    """A declaration that breaks no other clause."""
    model, findings, _ = declare(name, given, **options)
    assert not findings
    assert model is not None
    return model


def layers(name: str, given: dict[str, Any] | None) -> HfLayers:
    """A plugin's map."""
    found = plugin(name).call("kvc_executor", declare(name, given)[2])
    assert isinstance(found, HfLayers)
    return found


@cache
def _model(text: str, dtype: str) -> torch.nn.Module:
    return random_model(json.loads(text), seed=3).to(getattr(torch, dtype))


def small(name: str, given: dict[str, Any], *, dtype: str, page_tokens: int) -> Tiny:
    """A small random model of a config, with what the plugin declares for it."""
    shrunk = shrink(given).config
    kv = sound(name, shrunk, page_tokens=page_tokens, kv_dtype=dtype)
    return Tiny(_model(json.dumps(shrunk), dtype), kv, layers(name, shrunk))

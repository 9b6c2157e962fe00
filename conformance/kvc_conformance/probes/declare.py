"""Probes that load the plugin and return what it declares.

A child's job: ``name``, ``file``, ``config``, ``checkpoint`` (paths or null), ``options``,
``plugin_options``, ``device``, ``dtype``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvc_conformance.channel import Message
from kvc_conformance.child import Session
from kvc_conformance.probes.environment import watched
from kvcontract.contract import plugins
from kvcontract.contract.options import Config
from kvcontract.core.launch import Launch, Runtime, Source, launch


def load(session: Session, arguments: dict[str, Any], arrays: Mapping[str, Any]) -> Message:
    """Import the plugin, and no more.  Returns ``plugin``, the distribution it came from."""
    del arguments, arrays
    return Message({"plugin": _load(session).dist})


def declare(session: Session, arguments: dict[str, Any], arrays: Mapping[str, Any]) -> Message:
    """Load the plugin and call its factory; arguments may override ``options``.

    Among what is returned are ``variables``: those of the environment that the plugin's own code looks at.
    """
    del arrays
    with watched(_looked(session)):
        opened = open_launch(session, arguments.get("options"))
    own = opened.plugin.module.__name__.partition(".")[0]
    declared = opened.declared
    body = {
        "model": None if declared is None else declared.canonical_json(),
        "findings": [item.as_json() for item in opened.findings],
        "samples": list(opened.plugin.samples(opened.ctx)),
        "stand_ins": [asdict(mark) for mark in opened.stand_ins],
        "runs": opened.plugin.implements("kvc_executor"),
        "plugin": opened.plugin.dist,
        "variables": sorted(name for who, name in _looked(session) if who == own),
        "config": None if opened.ctx.config is None else dict(opened.ctx.config),
    }
    return Message(body)


def variants(session: Session, arguments: dict[str, Any], arrays: Mapping[str, Any]) -> Message:
    """Call the factory for other configs, all else being equal.

    Arguments: ``configs``.  Returns ``found``, for each what is declared, as JSON, and the findings; null
    where nothing is declared, or where there are findings.
    """
    del arrays
    opened = open_launch(session)
    found = []
    for config in arguments["configs"]:
        ctx = replace(opened.ctx, config=Config(config), model=None)
        model, findings = opened.plugin.declare(ctx)
        text = None if model is None or findings else model.canonical_json()
        found.append([text, [item.as_json() for item in findings]])
    return Message({"found": found})


def open_launch(
    session: Session, options: Mapping[str, Any] | None = None, *, dtype: str | None = None
) -> Launch:
    """The launch of the session's job, with the plugin loaded once; other options or dtype if asked."""
    job = session.job
    source = Source(job["name"], _path(job["file"]), _path(job["config"]), _path(job["checkpoint"]))
    if "homes" not in job:
        _load(session)
    merged = {**job["options"], **(options or {})}
    runtime = Runtime(job["device"], dtype or job.get("dtype") or "float32")
    return launch(source, options=merged, plugin_options=job["plugin_options"], runtime=runtime)


def _load(session: Session) -> plugins.Plugin:
    job = session.job
    with watched(_looked(session)):
        plugin = plugins.load(job["name"], file=_path(job["file"]))
    file = Path(plugin.module.__file__ or "")
    job["homes"] = [str(file if job["file"] else file.parent)]
    return plugin


def _looked(session: Session) -> set[tuple[str, str]]:
    looked: set[tuple[str, str]] = session.objects.setdefault("variables looked at", set())
    return looked


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)

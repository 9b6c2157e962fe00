"""What probes that run a plugin begin with: its launch in a precision, its executor, and its lines."""

from __future__ import annotations

import inspect
from typing import Any

from kvc_conformance.child import Session
from kvc_conformance.probes.declare import open_launch
from kvcontract.contract.errors import PluginFault
from kvcontract.contract.executor import Executor, HfLayers
from kvcontract.core.launch import Launch
from kvcontract.engine.build import generic_executor
from kvcontract.engine.checkpoint import load_model


def open_for(session: Session, dtype: str, page_tokens: int | None, *, asked: bool = True) -> Launch:
    """The launch for a precision; a plugin that cannot keep it is asked for what it keeps by itself.

    Args:
        session: with the plugin's job.
        dtype: computed in.
        page_tokens: of a page; None leaves it to the plugin.
        asked: whether the cache is to keep that type, too.
    """
    options = {"page_tokens": page_tokens or session.job["options"].get("page_tokens"), "tp": 1}
    opened = open_launch(session, {**options, "kv_dtype": dtype if asked else None}, dtype=dtype)
    if any(finding.path == "options.kv_dtype" for finding in opened.findings):
        opened = open_launch(session, {**options, "kv_dtype": None}, dtype=dtype)
    return opened


def runner_of(session: Session, opened: Launch) -> tuple[Executor, str | None]:
    """The plugin's executor, or the generic one for its map; and the line of whichever the plugin wrote."""
    ctx = opened.ctx
    hook = line_of(getattr(opened.plugin.module, "kvc_executor", None))
    runner = opened.plugin.call("kvc_executor", ctx)
    if isinstance(runner, HfLayers):
        key = f"model {ctx.checkpoint} {ctx.dtype}"
        if key not in session.objects:
            session.objects[key] = load_model(str(ctx.checkpoint), ctx.device, ctx.dtype)
        return generic_executor(opened.model, runner, hf_model=session.objects[key]), hook
    if not all(hasattr(runner, name) for name in ("limits", "bind", "forward")):
        raise PluginFault(
            f"kvc_executor returned a {type(runner).__name__}; expected an Executor (limits, bind, forward)"
            " or HfLayers"
        )
    executor: Executor = runner
    ours = type(executor).__module__.startswith("kvcontract.")
    return executor, hook if ours else line_of(type(executor).forward)


def line_of(function: Any) -> str | None:
    """Where a function begins, as ``file:line``; None: it is no Python."""
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return None if code is None else f"{code.co_filename}:{code.co_firstlineno}"

"""Find, load and call plugins.

pluggy gives registration and signature checks; the rest is ours: names come from package metadata alone,
namesakes are an error, one broken plugin hurts no other, a misspelt hook is found, and a plugin for another
contract revision is refused before anything of it is called.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import sys
import traceback
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pluggy
from pydantic import BaseModel, ValidationError

from kvcontract.contract import hooks
from kvcontract.contract.check import check_model, shape_findings
from kvcontract.contract.dtypes import DTYPE_BITS
from kvcontract.contract.errors import (
    DuplicatePlugin,
    HookQuit,
    KvContractError,
    NotConformant,
    PluginFault,
    PluginLoadError,
    PluginNotFound,
)
from kvcontract.contract.finding import Finding
from kvcontract.contract.model import CONTRACT_REVISION, KvModel
from kvcontract.contract.options import Context, LaunchOptions, MissingFacts, Refused, parse_options
from kvcontract.contract.revalidate import revalidate, shown
from kvcontract.contract.tier_context import TierContext

MISSPELT: Final = "KVC-DECL-02"
BROKEN: Final = "KVC-DECL-01"
SHAPE: Final = "KVC-DECL-04"
OTHER_REVISION: Final = "KVC-DECL-03"

_KINDS: Final = {"kvc_model": (hooks.PROJECT, "model"), "kvc_tier": (f"{hooks.PROJECT}.tiers", "tier")}
"""The hook that a kind of plugin must have, its entry-point group, and what it is called."""


@dataclass(frozen=True, slots=True, order=True)
class Installed:
    """A plugin that package metadata announces; nothing of it has been imported.

    Attributes:
        name: the model's or tier's name.
        dist: distribution, with its version.
        target: module to import.
    """

    name: str
    dist: str
    version: str
    target: str


def installed(hook: str = "kvc_model") -> tuple[Installed, ...]:
    """All announced plugins of a kind, sorted; from metadata only, so it is quick and safe."""
    return tuple(sorted(_describe(entry) for entry in entry_points(group=_KINDS[hook][0])))


def _describe(entry: EntryPoint) -> Installed:
    dist = entry.dist
    return Installed(entry.name, dist.name if dist else "?", dist.version if dist else "?", entry.value)


class Plugin:
    """A loaded plugin: its hooks, called one by one, with faults named."""

    def __init__(self, name: str, module: ModuleType, dist: str, needs: str = "kvc_model") -> None:
        self.name = name
        self.module = module
        self.dist = dist
        self._manager = pluggy.PluginManager(hooks.PROJECT)
        self._manager.add_hookspecs(hooks)
        _refuse_other_revision(name, module)
        _refuse_misspelt(name, module)
        try:
            self._manager.register(module, name)
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            raise PluginLoadError(name, str(error), clause=MISSPELT, cause=error) from error
        if not self.implements(needs):
            raise PluginLoadError(name, f"it has no {needs} hook", clause=MISSPELT)

    def implements(self, hook: str) -> bool:
        """Whether the plugin brings a hook."""
        return bool(getattr(self._manager.hook, hook).get_hookimpls())

    def call(self, hook: str, ctx: Context | TierContext) -> Any:
        """Call one hook.

        Raises:
            PluginFault: the plugin does not bring it.
            HookQuit: it tried to end the process.
        """
        implementations = getattr(self._manager.hook, hook).get_hookimpls()
        if not implementations:
            raise PluginFault(f"plugin {self.name!r} brings no {hook}")
        try:
            with redirect_stdout(sys.stderr):  # stdout is data, and ours alone
                return implementations[-1].function(*([ctx] if implementations[-1].argnames else []))
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise HookQuit(f"{type(error).__name__}: {_text(error)}") from error

    def options(self, ctx: Context) -> type[BaseModel] | None:
        """The model of the plugin's own options, if it has any.

        Raises:
            PluginLoadError: the hook raised, or returned something else (KVC-DECL-01, KVC-DECL-04).
        """
        table = self._called("kvc_options", ctx)
        if table is None:
            return None
        if not (isinstance(table, type) and issubclass(table, BaseModel)):
            message = f"kvc_options returns a pydantic model class, not {shown(table)!r}"
            raise PluginLoadError(self.name, message, clause=SHAPE)
        required = [name for name, info in table.model_fields.items() if info.is_required()]
        if required:
            message = f"options have defaults, but {', '.join(required)} of kvc_options has none"
            raise PluginLoadError(self.name, message, clause=SHAPE)
        return table

    def samples(self, ctx: Context) -> tuple[dict[str, Any], ...]:
        """Configs that the suite may build small checkpoints from.

        Raises:
            PluginLoadError: the hook raised, or returned something else (KVC-DECL-01, KVC-DECL-04).
        """
        samples = self._called("kvc_samples", ctx)
        if samples is None and not self.implements("kvc_samples"):
            return ()
        try:
            if isinstance(samples, tuple | list) and all(isinstance(item, dict) for item in samples):
                json.dumps(samples, allow_nan=False)
                return tuple(samples)
            found = shown(samples)
        except (TypeError, ValueError, RecursionError) as error:
            found = _text(error)
        message = f"kvc_samples returns a tuple of parsed config.json objects, not {found!r}"
        raise PluginLoadError(self.name, message, clause=SHAPE)

    def _called(self, hook: str, ctx: Context) -> Any:
        """What an optional hook returns; None if there is none."""
        if not self.implements(hook):
            return None
        try:
            return self.call(hook, ctx)
        except HookQuit as error:
            raise PluginLoadError(self.name, f"{hook} raised {error}", clause=BROKEN, cause=error) from error
        except KvContractError:
            raise
        except Exception as error:
            text = f"{hook} raised {type(error).__name__}: {_text(error)}"
            raise PluginLoadError(self.name, text, clause=BROKEN, cause=error) from error

    def context(
        self, ctx: Context, core: Mapping[str, Any], own: Mapping[str, Any]
    ) -> tuple[Context, tuple[Finding, ...]]:
        """Put a launch's options into a context.

        Args:
            ctx: everything but the options.
            core: values for `LaunchOptions`; None is not given.
            own: values for the plugin's own options, as text.

        Returns:
            The context and what is wrong with the options (KVC-DECL-10).
        """
        given = {name: value for name, value in core.items() if value is not None}
        table = self.options(ctx)
        names = tuple(table.model_fields) if table is not None else ()
        options, faults = parse_options(LaunchOptions, given, known=names)
        parsed, more = parse_options(table or _NoOptions, own, known=tuple(LaunchOptions.model_fields))
        findings = tuple(
            Finding("KVC-DECL-10", f"options.{fault.name}", fault.value, fault.allowed, fault.message)
            for fault in (*faults, *more)
        )
        filled = Context(
            options=options,
            plugin_options=parsed if table is not None else None,
            config=ctx.config,
            weights=ctx.weights,
            checkpoint=ctx.checkpoint,
            device=ctx.device,
            dtype=ctx.dtype,
        )
        return filled, findings

    def declare(self, ctx: Context) -> tuple[KvModel | None, tuple[Finding, ...]]:
        """Call `kvc_model` and judge what it returns, statically.

        Returns:
            The declaration (None if there is none to speak of) and every finding.
        """
        model, findings = self._declaration(ctx)
        if model is None:
            return None, findings
        found = [*findings, *self._purity(ctx, model), *_unhonoured(ctx, model)]
        if model.name != self.name:
            message = "the model bears another name than the plugin"
            found.append(Finding("KVC-DECL-06", "name", model.name, self.name, message, model.where))
        found += check_model(model, tp=ctx.options.tp)
        unwritable = _unwritable(model)
        if unwritable and not found:
            found.append(
                Finding(SHAPE, "kvc_model", unwritable, "text that UTF-8 has", "no JSON of it exists")
            )
        return None if unwritable else model, tuple(sorted(found, key=lambda item: item.clause))

    def model(self, ctx: Context) -> KvModel:
        """The declaration.

        Raises:
            NotConformant: with every finding, if there is any.
        """
        model, findings = self.declare(ctx)
        if model is None or findings:
            raise NotConformant(self.name, findings)
        return model

    def _declaration(self, ctx: Context) -> tuple[KvModel | None, tuple[Finding, ...]]:
        try:
            model = self.call("kvc_model", ctx)
        except ValidationError as error:
            return None, shape_findings(error, self._author_line(error))
        except MissingFacts as error:
            where = self._author_line(error)
            faults = {**dict.fromkeys(error.keys), **error.wrong}
            return None, tuple(
                Finding("KVC-DECL-11", f"config.{key}", shown(value), error.allowed, str(error), where)
                for key, value in faults.items()
            )
        except Refused as error:
            return None, (_refusal(error, self._author_line(error)),)
        except HookQuit as error:
            return None, (self._raised(str(error), error.__cause__ or error),)
        except KvContractError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a plugin raises is its finding
            return None, (self._raised(f"{type(error).__name__}: {_text(error)}", error),)
        if not isinstance(model, KvModel):
            message = "kvc_model returns one KvModel"
            return None, (Finding(SHAPE, "kvc_model", type(model).__name__, "a KvModel", message),)
        reshaped = revalidate(model)
        if reshaped:
            return None, reshaped
        if model.contract != CONTRACT_REVISION:
            message = f"this host serves contract {CONTRACT_REVISION}"
            served = str(CONTRACT_REVISION)
            return model, (Finding(OTHER_REVISION, "contract", model.contract, served, message, model.where),)
        return model, ()

    def _raised(self, text: str, error: BaseException) -> Finding:
        found = type(error).__name__
        message = f"kvc_model raised {text}"
        return Finding(BROKEN, "kvc_model", found, "a KvModel", message, self._author_line(error))

    def _purity(self, ctx: Context, model: KvModel) -> list[Finding]:
        try:
            again = self.call("kvc_model", ctx)
            if again == model:
                return []
            value, message = "differs", "a second call with the same context gave another declaration"
        except Exception as error:  # noqa: BLE001 - whatever a plugin raises is its finding
            value, message = type(error).__name__, f"a second call raised {_text(error)}"
        return [Finding("KVC-DECL-05", "kvc_model", value, "equal declarations", message, model.where)]

    def _author_line(self, error: BaseException) -> str | None:
        file = self.module.__file__
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else file


def _refusal(error: Refused, where: str | None) -> Finding:
    if error.option.startswith("config."):
        return Finding("KVC-DECL-11", error.option, shown(error.value), error.allowed, error.reason, where)
    clause = "KVC-DECL-07" if error.option == "page_tokens" else "KVC-DECL-10"
    return Finding(clause, f"options.{error.option}", error.value, error.allowed, error.reason, where)


def _text(error: BaseException) -> str:
    """What an exception says, even if its author forbids it."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a plugin's own __str__
        return "(its text cannot be read)"


def _unwritable(model: KvModel) -> str | None:
    """Why a declaration cannot be written as JSON, such as lone surrogates in its texts."""
    try:
        model.canonical_json()
    except ValueError as error:
        return _text(error)
    return None


class _NoOptions(BaseModel):
    """The options of a plugin that has none of its own."""


def _unhonoured(ctx: Context, model: KvModel) -> list[Finding]:
    options = ctx.options
    findings = []
    for name in ("page_tokens", "key_tokens"):
        asked = getattr(options, name)
        if asked is not None and getattr(model, name) != asked:
            message = f"the declaration came out with {getattr(model, name)}"
            findings.append(Finding("KVC-DECL-10", f"options.{name}", asked, "an honoured value", message))
    ignored = options.ignored
    kept = {item.dtype for arena in model.arenas for item in arena.fields}
    asked = None if "kv_dtype" in ignored else options.kv_dtype
    if asked in DTYPE_BITS and asked not in kept:
        message = f"no field came out with it, only with {', '.join(sorted(kept))}"
        findings.append(Finding("KVC-DECL-10", "options.kv_dtype", asked, "an honoured value", message))
    for name in ignored:
        if name != "tp":  # the core cuts; a plugin need not look
            message = "the plugin never looked at it"
            findings.append(
                Finding(
                    "KVC-DECL-10", f"options.{name}", getattr(options, name), "an option it reads", message
                )
            )
    return findings


def load(name: str, *, file: Path | None = None, hook: str = "kvc_model") -> Plugin:
    """Import one plugin.

    Args:
        name: the model's or tier's name.
        file: an unpackaged plugin, used instead of an installed one; its name is the file's stem.
        hook: ``kvc_model`` for a plugin of a model, ``kvc_tier`` for one of a tier.

    Raises:
        PluginNotFound: no such name; the nearest are given.
        DuplicatePlugin: two distributions announce it.
        PluginLoadError: it could not be imported or registered; carries the clause and the cause.
    """
    if file is not None:
        return _load_file(name, file, hook)
    entries = [entry for entry in entry_points(group=_KINDS[hook][0]) if entry.name == name]
    if not entries:
        raise PluginNotFound(_not_found(name, hook))
    if len(entries) > 1:
        dists = " and ".join(f"{item.dist} {item.version}" for item in map(_describe, entries))
        raise DuplicatePlugin(f"plugin {name!r} is announced by {dists}; uninstall one ({BROKEN})")
    try:
        with redirect_stdout(sys.stderr):  # stdout is data, and ours alone
            module = entries[0].load()
    except BaseException as error:
        raise _import_failure(name, error) from error
    if not isinstance(module, ModuleType):
        raise PluginLoadError(name, f"{entries[0].value} is not a module", clause=BROKEN)
    return Plugin(name, module, f"{_describe(entries[0]).dist} {_describe(entries[0]).version}", hook)


def _load_file(name: str, file: Path, hook: str) -> Plugin:
    if not file.is_file():
        raise PluginNotFound(f"there is no plugin file {str(file)!r}")
    if name != file.stem:
        raise PluginNotFound(f"the plugin in {str(file)!r} is named {file.stem!r}, not {name!r}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise PluginNotFound(f"{str(file)!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # a Conversion names its callables by this module
    try:
        with redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[file.stem]
        raise _import_failure(name, error) from error
    return Plugin(name, module, str(file), hook)


def _import_failure(name: str, error: BaseException) -> PluginLoadError:
    if isinstance(error, KeyboardInterrupt):
        raise error
    return PluginLoadError(
        name, f"import raised {type(error).__name__}: {_text(error)}", clause=BROKEN, cause=error
    )


def _not_found(name: str, hook: str) -> str:
    names, kind = sorted({item.name for item in installed(hook)}), _KINDS[hook][1]
    near = difflib.get_close_matches(name, names, n=3)
    if near:
        return f"no {kind} plugin is named {name!r}; did you mean {', '.join(near)}?"
    return f"no {kind} plugin is named {name!r}; installed: {', '.join(names) or 'none'}"


def _refuse_other_revision(name: str, module: ModuleType) -> None:
    stated = getattr(module, "KVC_CONTRACT", None)
    if type(stated) is int and stated == CONTRACT_REVISION:
        return
    found = "states no KVC_CONTRACT" if stated is None else f"is written for contract {stated!r}"
    message = f"it {found}; this host serves contract {CONTRACT_REVISION}"
    raise PluginLoadError(name, message, clause=OTHER_REVISION)


def _refuse_misspelt(name: str, module: ModuleType) -> None:
    faults = []
    for attribute, value in vars(module).items():
        if not attribute.startswith("kvc_") or not callable(value):
            continue
        if attribute not in hooks.HOOKS:
            near = difflib.get_close_matches(attribute, hooks.HOOKS, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else f"hooks are {', '.join(hooks.HOOKS)}"
            faults.append(f"{attribute} is not a hook; {hint}")
        elif not hasattr(value, f"{hooks.PROJECT}_impl"):
            faults.append(f"{attribute} is not marked @hookimpl")
    if faults:
        raise PluginLoadError(name, "; ".join(faults), clause=MISSPELT)

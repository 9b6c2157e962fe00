"""The options of a launch, and the context in which a plugin's hooks are called.

One table, `LaunchOptions`, feeds check, inspect, conformance and the Python API; a plugin adds its own as
another pydantic model through `kvc_options`.  An option that nobody knows, or that is given and then not
honoured, is a finding (KVC-DECL-10).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from kvcontract.contract.errors import KvContractError
from kvcontract.contract.model import CONTRACT_REVISION, KvModel, WeightIdentity


class LaunchOptions(BaseModel):
    """The core's options; None leaves the choice to the plugin."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tp: Annotated[int, Field(ge=1, description="workers that tensor parallelism cuts the model over")] = 1
    page_tokens: Annotated[int | None, Field(ge=1, description="tokens of one page")] = None
    key_tokens: Annotated[int | None, Field(ge=1, description="tokens of one stored record")] = None
    kv_dtype: Annotated[str | None, Field(description="element type of the cache, e.g. bfloat16")] = None
    drafter: Annotated[str | None, Field(description="name of a speculative drafter")] = None

    _read: set[str] = PrivateAttr(default_factory=set)

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name in _OPTION_NAMES:
            self._read.add(name)
        return value

    @property
    def given(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        return self.model_dump(exclude_defaults=True)

    @property
    def ignored(self) -> list[str]:
        """Options that were given and that nobody looked at."""
        return [name for name in self.given if name not in self._read]


_OPTION_NAMES: Final = frozenset(LaunchOptions.model_fields)


class MissingFacts(KvContractError):
    """The config lacks keys that the plugin needs, or has there what cannot be (KVC-DECL-11).

    Attributes:
        keys: keys that are absent or null.
        wrong: keys whose values cannot be, with these values.
        allowed: what may be there.
    """

    exit_code = 1

    def __init__(
        self,
        keys: tuple[str, ...],
        present: tuple[str, ...],
        *,
        wrong: Mapping[str, Any] | None = None,
        allowed: str = "a value in config.json",
    ) -> None:
        self.keys = keys
        self.wrong = dict(wrong or {})
        self.allowed = allowed
        absent = [key for key in keys if key not in present]
        null = [key for key in keys if key in present]
        near = {key: difflib.get_close_matches(key, present, n=1) for key in absent}
        named = [f"{key} (is it {near[key][0]}?)" if near[key] else key for key in absent]
        texts = [f"lacks {', '.join(named)}"] if absent else []
        texts += [f"has null for {', '.join(null)}"] if null else []
        texts += [f"has {key} = {value!r}, which is not {allowed}" for key, value in self.wrong.items()]
        super().__init__(f"config.json {'; '.join(texts)}")


class Config(Mapping[str, Any]):
    """A checkpoint's parsed config.json; a missing key is a `MissingFacts`, not a guess."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            raise MissingFacts((key,), tuple(self._values))
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or a default that is itself a fact of the format (never a guess)."""
        return self._values.get(key, default)

    def facts(self, *keys: str) -> tuple[Any, ...]:
        """The values of several keys.

        Raises:
            MissingFacts: naming every key that is absent or null.
        """
        missing = tuple(key for key in keys if self._values.get(key) is None)
        if missing:
            raise MissingFacts(missing, tuple(self._values))
        return tuple(self._values[key] for key in keys)

    def counts(self, *keys: str) -> tuple[int, ...]:
        """The values of several keys that count something: positive integers.

        Raises:
            MissingFacts: naming every key that is absent, null or no positive integer.
        """
        missing = tuple(key for key in keys if self._values.get(key) is None)
        found = {key: self._values[key] for key in keys if key not in missing}
        wrong = {key: value for key, value in found.items() if type(value) is not int or value < 1}
        if missing or wrong:
            raise MissingFacts(missing, tuple(self._values), wrong=wrong, allowed="a positive integer")
        return tuple(found[key] for key in keys)

    @property
    def dtype(self) -> str:
        """Element type the checkpoint was released in (``dtype``, formerly ``torch_dtype``)."""
        value = self._values.get("dtype") or self._values.get("torch_dtype")
        if value is None:
            raise MissingFacts(("dtype",), tuple(self._values))
        return str(value)


class Refused(KvContractError):
    """A plugin refuses the value of an option, or of a key of the config: made by `Context.refuse`.

    Attributes:
        option: the option's name, or ``config.KEY``.
        value: what it is.
        allowed: what it may be.
        reason: what is wrong, without what is allowed.
    """

    exit_code = 1

    def __init__(self, option: str, value: object, allowed: str, why: str) -> None:
        self.option = option
        self.value = value
        self.allowed = allowed
        self.reason = f"{option} = {value!r} is refused: {why}"
        super().__init__(f"{self.reason}; allowed: {allowed}")


@dataclass(frozen=True, slots=True)
class Context:
    """The one argument of every hook; new needs become new attributes.

    Attributes:
        options: the core's launch options.
        plugin_options: an instance of the model that `kvc_options` returned, or None.
        config: the checkpoint's config, or None: then declare a small built-in.
        weights: identity of the checkpoint's weights and config; goes into `KvModel.weights` as it is.
        checkpoint: folder of the checkpoint, or None.
        model: the declaration, for hooks called after `kvc_model`.
        device: device the executor runs on, in torch's spelling.
        dtype: element type the executor computes in, in torch's spelling.
        contract: the contract revision the host serves.
    """

    options: LaunchOptions = field(default_factory=LaunchOptions)
    plugin_options: Any = None
    config: Config | None = None
    weights: WeightIdentity = field(default_factory=lambda: WeightIdentity(kind="unresolved"))
    checkpoint: Path | None = None
    model: KvModel | None = None
    device: str = "cpu"
    dtype: str = "float32"
    contract: int = CONTRACT_REVISION

    def refuse(self, option: str, *, allowed: str, why: str) -> Refused:
        """An error to raise for a value that the model cannot honour.

        Args:
            option: name of a core option or of one of the plugin's own, or ``config.KEY``, dotted where the
                key is nested.
            allowed: what may be there.
            why: the reason, in words.
        """
        if option.startswith("config."):
            found: Any = self.config
            for key in option.removeprefix("config.").split("."):
                found = found.get(key) if isinstance(found, Mapping) else None
            return Refused(option, found, allowed, why)
        value = getattr(self.options, option, None)
        if value is None and self.plugin_options is not None:
            value = getattr(self.plugin_options, option, None)
        return Refused(option, value, allowed, why)

    def with_model(self, model: KvModel) -> Context:
        """The same context after the declaration is known."""
        return replace(self, model=model)


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the options table.

    Attributes:
        name: as in Python; the command line spells it ``--with-dashes`` (core) or ``-O name=value`` (plugin).
        kind: type, in words.
        default: what holds when it is not given.
        help: one line.
    """

    name: str
    kind: str
    default: Any
    help: str


def option_table(model: type[BaseModel] = LaunchOptions) -> tuple[Option, ...]:
    """The options of one table in declared order."""
    return tuple(
        Option(name, _kind(info.annotation), info.get_default(), info.description or "")
        for name, info in model.model_fields.items()
    )


def _kind(annotation: Any) -> str:
    text = getattr(annotation, "__name__", str(annotation))
    return text.replace(" | None", "").replace("NoneType", "none")


@dataclass(frozen=True, slots=True)
class OptionFault:
    """Why an option cannot be taken."""

    name: str
    value: Any
    message: str
    allowed: str = "an option that exists; see --help"


_BOUNDS: Final = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_KINDS: Final = {"int": "an integer", "float": "a number", "bool": "true or false", "string": "text"}


def in_words(refusal: Any, otherwise: str = "see --help") -> str:
    """What may be there instead of what pydantic refused, in words."""
    context = refusal.get("ctx", {})
    bounds = [f"{words} {context[name]}" for name, words in _BOUNDS.items() if name in context]
    kind = _KINDS.get(refusal["type"].split("_")[0], otherwise)
    return " and ".join(bounds) or str(context.get("expected", kind))


def parse_options(
    model: type[BaseModel], values: Mapping[str, Any], *, known: tuple[str, ...] = ()
) -> tuple[Any, list[OptionFault]]:
    """Read options, collecting every fault.

    Args:
        model: the table.
        values: names and values; text is converted as the table says.
        known: further names to suggest from.

    Returns:
        An instance of `model` (its defaults where something was wrong) and the faults.
    """
    names = (*model.model_fields, *known)
    faults = []
    for name in values:
        if name not in model.model_fields:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known options: {', '.join(names)}"
            faults.append(OptionFault(name, values[name], f"unknown option; {hint}"))
    try:
        parsed = model.model_validate({name: values[name] for name in values if name in model.model_fields})
    except ValidationError as error:
        for item in error.errors():
            name = ".".join(str(part) for part in item["loc"]) or "options"
            faults.append(OptionFault(name, item["input"], item["msg"], in_words(item)))
        parsed = model()
    return parsed, faults

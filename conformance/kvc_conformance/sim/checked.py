"""What a trace may say: its actions and its world, checked before anything of them is played.

A trace comes from a file that somebody may have cut or edited.  Whatever is wrong with it is named here, all
of it at once, so that nothing wrong with the file looks like a fault of the store.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from kvc_conformance.sim.prompts import DEGREES, PARENTS, SCOPES
from kvc_conformance.sim.spaces import simulated
from kvcontract.contract.check import check_model
from kvcontract.contract.errors import UsageFault
from kvcontract.contract.layout import layout
from kvcontract.contract.model import KvModel
from kvcontract.tiers.fault import FaultKind

MOST_PAGES: Final = 4096
"""Of a pool or a tier: a world is small, and made anew for every play."""

_MOST: Final = 1 << 31
_MOST_S: Final = 1e6
_MOST_STORES: Final = 16
_MOST_PAGE_BYTES: Final = 1 << 20
_SHOWN: Final = 60

Check = Callable[[Any], str | None]
"""What was expected instead; None: nothing else."""


def _number(least: int = 0, most: int = _MOST) -> Check:
    def check(value: Any) -> str | None:
        return None if type(value) is int and least <= value <= most else f"a number from {least} to {most}"

    return check


def _one_of(*values: Any) -> Check:
    def check(value: Any) -> str | None:
        fits = any(type(value) is type(known) and value == known for known in values)
        return None if fits else "one of " + ", ".join(map(str, values))

    return check


def _seconds(value: Any) -> str | None:
    fits = type(value) in (int, float) and math.isfinite(value) and 0 < value <= _MOST_S
    return None if fits else f"seconds above 0, at most {_MOST_S:g}"


def _seconds_or_0(value: Any) -> str | None:
    return None if type(value) in (int, float) and 0 <= value <= _MOST_S else f"seconds, at most {_MOST_S:g}"


def _share(value: Any) -> str | None:
    return None if type(value) in (int, float) and 0 < value <= 1 else "a share above 0, at most 1"


def _text(value: Any) -> str | None:
    return None if type(value) is str and value else "a text"


def _or_none(check: Check) -> Check:
    def checked(value: Any) -> str | None:
        expected = None if value is None else check(value)
        return expected and f"{expected}, or null"

    return checked


def _positions(value: Any) -> str | None:
    fits = isinstance(value, list) and all(_number()(item) is None for item in value)
    return None if fits else "a list of positions"


def _name(value: Any) -> str | None:
    return None if value is None or _text(value) is None else "a text, or null"


_SWITCH: Final = _one_of(False, True)
_POLICY: Final[Mapping[str, Check]] = {"deadline_s": _seconds, "full_hit": _SWITCH, "full_pages": _SWITCH}
_ID: Final[Mapping[str, Check]] = {"id": _number()}
_PROMPT: Final[Mapping[str, Check]] = {
    **_ID,
    "rank": _number(),
    "stream": _number(0, len(PARENTS) - 1),
    "scope": _number(0, len(SCOPES) - 1),
    "tokens": _number(1),
}
_TIER: Final[Mapping[str, Check]] = {"tier": _number()}
_FAULTS: Final = (None, *(str(kind) for kind in FaultKind), "stale", "delay")
_BARRIERS: Final = ("landed", "visible", "durable", "loads", "reset", "handoff")

_NUMBER_OR_NONE: Final = _or_none(_number())
_WANTED: Final[Mapping[str, Check]] = {
    "prompt_end": _SWITCH,
    "branches": _SWITCH,
    "stops": _positions,
    "every": _or_none(_number(1)),
    "decoding": _SWITCH,
    "interior": _SWITCH,
}
OPTIONAL: Final[dict[str, Mapping[str, Check]]] = {
    "step": {"checkpoint": _SWITCH, "breaking": _NUMBER_OR_NONE},
}
"""Of each action, what is only said where something lies beside the full pages."""

FIELDS: Final[dict[str, Mapping[str, Check]]] = {
    "resolve": _PROMPT,
    "cancel": {**_ID, "how": _one_of("token", "task")},
    "drop": _ID,
    "begin": {**_ID, "new": _number(1)},
    "step": {**_ID, "size": _number(1), "revert": _SWITCH},
    "preempt": _ID,
    "resume": _ID,
    "seal": {**_ID, "handoff": _name, "again": _SWITCH},
    "retire": {**_ID, "handoff": _name},
    "release": _ID,
    "wait": {**_ID, "for": _one_of(*_BARRIERS), "deadline_s": _seconds},
    "leave": _ID,
    "release_handoff": {"handoff": _text},
    "pin": {**_PROMPT, "ttl_s": _seconds},
    "unpin": _ID,
    "switch": {"what": _one_of("cache", "keep"), "on": _SWITCH},
    "drain": {},
    "answer": {**_TIER, "call": _number(), "fault": _one_of(*_FAULTS), "at": _number()},
    "lane": {},
    "tick": {},
    "sleep": {"seconds": _seconds},
    "freeze": {**_TIER, "on": _SWITCH},
    "die": _TIER,
    "evict": {**_TIER, "at": _number()},
    "crash": {"mask": _number()},
    "close": {"deadline_s": _seconds},
}
"""Of each action, what it has besides `do` and `node`."""

_SETTING: Final[Mapping[str, Check]] = {
    "ranks": _number(1, _MOST_STORES),
    "pages": _number(2, MOST_PAGES),
    "manual": _SWITCH,
    "save_budget": _share,
}
_SINCE: Final[Mapping[str, Check]] = {"step_tokens": _number(1, MOST_PAGES), "deferred": _SWITCH}
"""What older traces do not say of their world."""

_TIER_SETTING: Final[Mapping[str, Check]] = {
    "name": _text,
    "shared": _SWITCH,
    "telling": _SWITCH,
    "pages": _number(0, MOST_PAGES),
    "back": _SWITCH,
    "load_s": _seconds_or_0,
    "saving": _number(0, MOST_PAGES),
}


def action_faults(actions: Any) -> Iterator[str]:
    """Everything that is wrong with the actions of a trace."""
    if not isinstance(actions, list):
        yield _wrong("actions", actions, "a list")
        return
    for number, action in enumerate(actions):
        where = f"actions[{number}]"
        verb = action.get("do") if isinstance(action, dict) else None
        if not isinstance(verb, str):
            yield _wrong(where, action, "an object with `do`")
        elif verb not in FIELDS:
            yield f"{where}: no such action: {verb}"
        else:
            yield from _action_faults(where, verb, action)


def _action_faults(where: str, verb: str, action: dict[str, Any]) -> Iterator[str]:
    fields: dict[str, Check] = {"do": _text, "node": _number(), **FIELDS[verb]}
    if verb == "answer" and action.get("fault") == "delay":
        fields["delay_s"] = _seconds
    if verb == "wait" and action.get("for") == "handoff":
        fields["handoff"] = _text
    fields |= {name: check for name, check in OPTIONAL.get(verb, {}).items() if name in action}
    policy, wanted = action.get("policy"), action.get("checkpoints")
    if verb == "begin" and wanted is not None:
        yield from _faults(f"{where}.checkpoints", wanted, _WANTED)
        action = {name: value for name, value in action.items() if name != "checkpoints"}
    if verb == "resolve":
        yield from _faults(f"{where}.policy", policy, _POLICY)
        action = {name: value for name, value in action.items() if name != "policy"}
    yield from _faults(where, action, fields)


def setting_faults(setting: Any) -> Iterator[str]:
    """Everything that is wrong with the world of a trace."""
    if not isinstance(setting, dict):
        yield _wrong("setting", setting, "an object")
        return
    lists: dict[str, Any] = {name: setting.get(name) for name in ("degrees", "tiers")}
    for name, value in lists.items():
        if not isinstance(value, list) or not 0 < len(value) <= _MOST_STORES:
            yield _wrong(f"setting.{name}", value, f"a list of 1 to {_MOST_STORES}")
            lists[name] = []
    for number, degree in enumerate(lists["degrees"]):
        expected = _one_of(*DEGREES)(degree)
        if expected:
            yield _wrong(f"setting.degrees[{number}]", degree, expected)
    for number, tier in enumerate(lists["tiers"]):
        yield from _faults(f"setting.tiers[{number}]", tier, _TIER_SETTING)
    top = lists["tiers"][:1]
    if top and isinstance(top[0], dict) and top[0].get("back") is True:
        yield _wrong("setting.tiers[0].back", True, "false: there is no tier above it")
    names = [str(tier.get("name")) for tier in lists["tiers"] if isinstance(tier, dict)]
    if len(set(names)) < len(names):
        yield _wrong("setting.tiers", names, "names of their own")
    blocks = setting.get("blocks", {})
    if not isinstance(blocks, dict):
        yield _wrong("setting.blocks", blocks, "an object")
    else:
        checks = dict.fromkeys(blocks, _SETTING["pages"])
        yield from _faults("setting.blocks", blocks, checks)
    rest = {name: value for name, value in setting.items() if name not in {*lists, "blocks"}}
    later = {name: check for name, check in _SINCE.items() if name in setting}
    yield from _faults("setting", rest, {**_SETTING, **later})


def model_faults(model: KvModel) -> Iterator[str]:
    """Everything that is wrong with the declaration of a trace."""
    findings = check_model(model)
    for item in findings:
        yield f"model.{item.path}: {item.message} ({item.clause})"
    if findings:
        return
    try:
        as_simulated = simulated(model) == model
    except UsageFault as fault:
        yield f"model: {fault}"
        return
    if not as_simulated:
        yield "model: not as a simulation writes it, with small pages and few arenas"
        return
    size = max(space.stride_bytes for space in layout(model, 0, 1).spaces)
    if size > _MOST_PAGE_BYTES:
        yield f"model: a block has {size:,} bytes; a world takes at most {_MOST_PAGE_BYTES:,}"


def found_faults(violation: Any) -> Iterator[str]:
    """Everything that is wrong with what a trace says was found."""
    if violation is not None:
        yield from _faults("violation", violation, {"clause": _text, "text": _text})


def seed_faults(seed: Any) -> Iterator[str]:
    """What is wrong with the seed of a trace."""
    if type(seed) is not int or seed < 0:
        yield _wrong("seed", seed, "a number from 0")


def _faults(where: str, given: Any, fields: Mapping[str, Check]) -> Iterator[str]:
    if not isinstance(given, dict):
        yield _wrong(where, given, f"an object with {', '.join(fields)}")
        return
    for name, check in fields.items():
        if name not in given:
            yield f"{where}.{name} is missing"
        elif (expected := check(given[name])) is not None:
            yield _wrong(f"{where}.{name}", given[name], expected)
    for name in given.keys() - fields.keys():
        yield f"{where}.{name}: there is no such field"


def _wrong(where: str, value: Any, expected: str) -> str:
    shown = repr(value)
    return f"{where} is {shown if len(shown) <= _SHOWN else shown[:_SHOWN] + '...'}; expected {expected}"

"""What a declaration must have for a clause to say anything of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvcontract.contract.clause import Capability, Clause
from kvcontract.contract.model import Chunk, KvModel, Window


@dataclass(frozen=True, slots=True)
class Asked:
    """One capability.

    Attributes:
        attribute: of which object of a declaration it is.
        words: when a declaration has it.
        of: whether one does.
    """

    attribute: str
    words: str
    of: Callable[[KvModel], bool]


def _bounded(model: KvModel) -> bool:
    return any(group.kind == "bounded" for group in model.groups)


def _snapshots(model: KvModel) -> bool:
    stored = any(group.kind == "bounded" and group.restore == "stored" for group in model.groups)
    return stored and model.prefix_caching


def _windows(model: KvModel) -> bool:
    reaches = [group.reach for group in model.groups if group.kind == "paged"]
    return any(isinstance(reach, Window | Chunk) for reach in reaches) and model.prefix_caching


CAPABILITIES: Final[dict[Capability, Asked]] = {
    "repack": Asked("KvModel.repack", "there is a repack", lambda model: model.repack is not None),
    "conversion": Asked(
        "Repack.conversion",
        "the repack names callables",
        lambda model: model.repack is not None and model.repack.conversion != "derived",
    ),
    "bounded": Asked("Group.kind", "a group is bounded", _bounded),
    "reuse": Asked("Group.restore", "no group is never restored", lambda model: model.prefix_caching),
    "snapshots": Asked(
        "Group.kind, .restore", "a bounded group is stored, and prefixes are reused", _snapshots
    ),
    "windows": Asked("Group.reach", "a paged group has a window or chunk, prefixes are reused", _windows),
    "beside": Asked(
        "Group.kind, .reach",
        "something stored is no page of full reach, prefixes are reused",
        lambda model: _snapshots(model) or _windows(model),
    ),
}


def applies(rule: Clause, model: KvModel) -> bool:
    """Whether a clause says anything of a declaration."""
    return rule.capability is None or CAPABILITIES[rule.capability].of(model)

"""kvcontract: declare a model's KV cache once; get prefix caching, offload and disaggregation, certified.

Every public name is imported when it is first used, so that ``import kvcontract`` loads nothing heavy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcontract.contract.executor import Adapter as Adapter
    from kvcontract.contract.executor import Attention as Attention
    from kvcontract.contract.executor import Combined as Combined
    from kvcontract.contract.executor import Executor as Executor
    from kvcontract.contract.executor import HfLayers as HfLayers
    from kvcontract.contract.executor import Limits as Limits
    from kvcontract.contract.executor import OwnsArenas as OwnsArenas
    from kvcontract.contract.executor import Recurrent as Recurrent
    from kvcontract.contract.executor import Step as Step
    from kvcontract.contract.executor import StepOutput as StepOutput
    from kvcontract.contract.executor import TakesAdapters as TakesAdapters
    from kvcontract.contract.hooks import hookimpl as hookimpl
    from kvcontract.contract.model import Arena as Arena
    from kvcontract.contract.model import Chunk as Chunk
    from kvcontract.contract.model import Conversion as Conversion
    from kvcontract.contract.model import Field as Field
    from kvcontract.contract.model import Full as Full
    from kvcontract.contract.model import Group as Group
    from kvcontract.contract.model import KvModel as KvModel
    from kvcontract.contract.model import Repack as Repack
    from kvcontract.contract.model import Scope as Scope
    from kvcontract.contract.model import StaticScale as StaticScale
    from kvcontract.contract.model import WeightIdentity as WeightIdentity
    from kvcontract.contract.model import Window as Window
    from kvcontract.contract.options import Config as Config
    from kvcontract.contract.options import Context as Context
    from kvcontract.contract.options import LaunchOptions as LaunchOptions
    from kvcontract.contract.stand_in import fill_in as fill_in
    from kvcontract.pool.events import EventLog as EventLog
    from kvcontract.pool.keys import FleetSecret as FleetSecret
    from kvcontract.pool.keys import Keyer as Keyer
    from kvcontract.pool.media import MediaItem as MediaItem
    from kvcontract.pool.pool import BlockPool as BlockPool
    from kvcontract.pool.queue import AdmissionQueue as AdmissionQueue
    from kvcontract.pool.request import RequestKv as RequestKv
    from kvcontract.pool.request import admit as admit
    from kvcontract.store.core import StoreOptions as StoreOptions
    from kvcontract.store.cost import CostFigures as CostFigures
    from kvcontract.store.events import TierEvents as TierEvents
    from kvcontract.store.policy import CancelToken as CancelToken
    from kvcontract.store.policy import KvPrefix as KvPrefix
    from kvcontract.store.policy import ResolvePolicy as ResolvePolicy
    from kvcontract.store.rank import Rank as Rank
    from kvcontract.store.store import KvStore as KvStore
    from kvcontract.store.tier_policy import TierPolicy as TierPolicy
    from kvcontract.tiers.base import SaveClass as SaveClass
    from kvcontract.tiers.cipher import Encryption as Encryption
    from kvcontract.tiers.dram import DramTier as DramTier

__version__ = "0.1.0"

_HOMES = {
    "kvcontract.contract.executor": (
        "Adapter",
        "Attention",
        "Combined",
        "Executor",
        "HfLayers",
        "Limits",
        "OwnsArenas",
        "Recurrent",
        "Step",
        "StepOutput",
        "TakesAdapters",
    ),
    "kvcontract.contract.hooks": ("hookimpl",),
    "kvcontract.contract.model": (
        "Arena",
        "Chunk",
        "Conversion",
        "Field",
        "Full",
        "Group",
        "KvModel",
        "Repack",
        "Scope",
        "StaticScale",
        "WeightIdentity",
        "Window",
    ),
    "kvcontract.contract.options": ("Config", "Context", "LaunchOptions"),
    "kvcontract.contract.stand_in": ("fill_in",),
    "kvcontract.pool.events": ("EventLog",),
    "kvcontract.pool.keys": ("FleetSecret", "Keyer"),
    "kvcontract.pool.media": ("MediaItem",),
    "kvcontract.pool.pool": ("BlockPool",),
    "kvcontract.pool.queue": ("AdmissionQueue",),
    "kvcontract.pool.request": ("RequestKv", "admit"),
    "kvcontract.store.core": ("StoreOptions",),
    "kvcontract.store.cost": ("CostFigures",),
    "kvcontract.store.events": ("TierEvents",),
    "kvcontract.store.policy": ("CancelToken", "KvPrefix", "ResolvePolicy"),
    "kvcontract.store.rank": ("Rank",),
    "kvcontract.store.store": ("KvStore",),
    "kvcontract.store.tier_policy": ("TierPolicy",),
    "kvcontract.tiers.base": ("SaveClass",),
    "kvcontract.tiers.cipher": ("Encryption",),
    "kvcontract.tiers.dram": ("DramTier",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)  # noqa: PLE0605 - one table is the single source


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])

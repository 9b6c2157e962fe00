"""What a store refuses when it is built, all of it at once (A26, B22, D3, D6, H10)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvcontract.contract.check import check_model
from kvcontract.contract.clauses import clause
from kvcontract.contract.errors import NotConformant, Undeclared, UsageFault
from kvcontract.contract.finding import Finding
from kvcontract.contract.layout import tp_faults
from kvcontract.contract.model import KvModel
from kvcontract.contract.wire import Part, parts, wire_record
from kvcontract.pool.keys import FleetSecret
from kvcontract.store.rank import Rank
from kvcontract.store.secret import fleet_secret
from kvcontract.store.tier_policy import TierPolicy, policy_faults, small_budget_faults
from kvcontract.tiers.base import Tier
from kvcontract.tiers.cipher import Encryption, leaves
from kvcontract.tiers.frame import header_bytes


@dataclass(frozen=True, slots=True)
class Allowed:
    """What a store is made with, once nothing speaks against it.

    Attributes:
        parts: what is saved and restored as one unit, each.
        secret: that keys are derived with.
        too_small: names of tiers that no record fits into; they are left alone (H7).
    """

    parts: tuple[Part, ...]
    secret: FleetSecret
    too_small: tuple[str, ...]


def refuse(
    model: KvModel,
    ranks: Sequence[Rank],
    tiers: Sequence[Tier],
    secret: FleetSecret | None,
    max_tp: int,
    policies: Mapping[str, TierPolicy],
    encryption: Encryption | None,
) -> Allowed:
    """Refuse what cannot be served.

    Args:
        model: the declaration.
        ranks: to be served.
        tiers: fastest first.
        secret: given by the caller.
        max_tp: most workers that may ever read the records.
        policies: by name of the tier.
        encryption: of records that leave the process.

    Raises:
        NotConformant: of the declaration; or all else is right, and unnamed weights meet a tier that lasts.
        UsageFault: names every fault.
        Undeclared: there is no other than that prefixes cannot be reused.
    """
    if findings := check_model(model):
        raise NotConformant(model.name, findings)
    undeclared = _undeclared(model)
    faults = [*_faults(model, ranks, tiers), *undeclared]
    faults += policy_faults(policies, [tier.name for tier in tiers])
    small: tuple[str, ...] = ()
    if model.prefix_caching:
        small, wrong = _sizes(model, tiers, policies, max_tp)
        faults += wrong
    if encryption is not None:
        served = [tier for tier in tiers if tier.name not in small]
        faults += [*encryption.faults(), *_unreadable(served, policies)]
    lasting = [tier for tier in tiers if tier.name in lasting_names(tiers)]
    unnamed = bool(lasting) and not model.weights.resolved
    if unnamed and faults:
        faults.append(_unnamed_weights(model, lasting_names(tiers)).line())
    if faults or unnamed:  # a secret that would not be used is not left behind
        lasting = []
    chosen, disagree = fleet_secret(secret, lasting)
    faults += disagree
    if faults:
        raise (Undeclared if faults == undeclared else UsageFault)("; ".join(faults))
    if unnamed:
        raise NotConformant(model.name, (_unnamed_weights(model, lasting_names(tiers)),))
    return Allowed(parts(model), chosen, small)


def _undeclared(model: KvModel) -> list[str]:
    """What the declaration does not offer, and a store is for."""
    never = [group.name for group in model.groups if not group.checkpointable]
    text = f"group {', '.join(never)} is never restored: no prefix can be reused; leave the store out"
    return [text] if never else []


def _faults(model: KvModel, ranks: Sequence[Rank], tiers: Sequence[Tier]) -> list[str]:
    """What is wrong with the ranks, with names, and with what the tiers cannot do."""
    faults = [] if ranks else ["a store has at least one rank"]
    for what, names in (("rank", [rank.name for rank in ranks]), ("tier", [tier.name for tier in tiers])):
        faults += [f"two {what}s are named {name!r}" for name in sorted(set(names)) if names.count(name) > 1]
    faults += _rank_faults(model, ranks)
    mixing = [tier.name for tier in tiers if not tier.capabilities.scopes]
    if mixing:
        faults.append(f"tier {', '.join(mixing)} cannot keep scopes apart; every tier of a store must (D3)")
    return faults


def _rank_faults(model: KvModel, ranks: Sequence[Rank]) -> list[str]:
    faults = []
    if len({id(rank.pool) for rank in ranks}) < len(ranks):
        faults.append("two ranks share a pool; each has its own")
    for rank in ranks:
        bound = {
            key if rank.tp == 1 else f"{key} of worker {number}": binding.blocks
            for number, memory in enumerate(rank.memory)
            for key, binding in memory.items()
        }
        spaces, pooled = {part.space for part in parts(model)}, {side.index.key for side in rank.pool.sides}
        if missing := sorted(spaces - pooled - {"full"}):
            faults.append(f"rank {rank.name!r}: no pool for {', '.join(missing)}; see `make_sides`")
        try:
            rank.pool.check_capacity(bound)
        except UsageFault as fault:
            faults.append(str(fault))
        if rank.pool.page_tokens != model.page_tokens:
            faults.append(f"rank {rank.name!r}: its pool's page differs from {model.page_tokens} tokens")
        faults += [f"rank {rank.name!r}: {fault}" for fault in tp_faults(model, rank.tp)]
    return faults


def lasting_names(tiers: Sequence[Tier]) -> list[str]:
    """Names of the tiers whose records outlive this process or leave it."""
    return [tier.name for tier in tiers if tier.capabilities.persistent or tier.capabilities.shared]


def _sizes(
    model: KvModel, tiers: Sequence[Tier], policies: Mapping[str, TierPolicy], max_tp: int
) -> tuple[tuple[str, ...], list[str]]:
    """Tiers that no record fits into, and what is wrong with that: they are all, or a page is over a budget.

    A record that is too large for one tier is served by the others (H7); if it is for all of them, none would
    ever be of use (H10).
    """
    small: dict[str, int] = {}
    faults, told = [], []
    for part in parts(model):
        shards = part.shards(max_tp)
        records = [wire_record(model, part, shard, shards) for shard in range(shards)]
        sizes = [record.payload_bytes + header_bytes(len(record.segments)) for record in records]
        limits = {tier.name: tier.capabilities.max_record_bytes for tier in tiers}
        tight = {name: limit for name, limit in limits.items() if limit is not None and limit < max(sizes)}
        small |= tight
        told += [f"one record of part {part.name!r} needs {max(sizes):,} B"] if tight else []
        faults += small_budget_faults(policies, sum(sizes))
    if small and len(small) == len(tiers):
        takes = [f"tier {name!r} takes records of at most {limit:,} B" for name, limit in small.items()]
        faults.append("; ".join([*takes, *told]))
    return tuple(small), faults


def _unreadable(tiers: Sequence[Tier], policies: Mapping[str, TierPolicy]) -> list[str]:
    """Private tiers that would be given, by the tier above them, what only those that encrypt can read."""
    return [
        f"tier {below.name!r} stays in this process and is written back from tier {above.name!r}, whose"
        " records are encrypted; write it through, or put it above"
        for above, below in pairwise(tiers)
        if leaves(above.capabilities) and not leaves(below.capabilities)
        if isinstance(policy := policies.get(below.name), TierPolicy) and policy.back
    ]


def _unnamed_weights(model: KvModel, lasting: Sequence[str]) -> Finding:
    message = f"tier {', '.join(lasting)} keeps records beyond this process"
    rule = clause("KVC-OFFLOAD-05")
    return Finding(rule.id, "weights.kind", model.weights.kind, "digest or revision", message, model.where)

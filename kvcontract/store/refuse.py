"""What a store refuses when it is built, all of it at once (A26, B22, D3, D6, H10)."""

from __future__ import annotations

from collections.abc import Sequence

from kvcontract.contract.check import check_model
from kvcontract.contract.clauses import clause
from kvcontract.contract.errors import NotConformant, UsageFault
from kvcontract.contract.finding import Finding
from kvcontract.contract.layout import tp_faults
from kvcontract.contract.model import KvModel
from kvcontract.contract.wire import Part, parts, wire_record
from kvcontract.pool.keys import FleetSecret
from kvcontract.store.rank import Rank
from kvcontract.tiers.base import Tier
from kvcontract.tiers.frame import header_bytes


def refuse(model: KvModel, ranks: Sequence[Rank], tiers: Sequence[Tier], secret: FleetSecret | None) -> Part:
    """Refuse what cannot be served; returns what is saved and restored as one unit.

    Raises:
        NotConformant: the declaration has findings, or weights are unnamed for a tier that lasts
            (KVC-OFFLOAD-05).
        UsageFault: names every fault.
    """
    findings = check_model(model)
    if findings:
        raise NotConformant(model.name, findings)
    faults = [] if ranks else ["a store has at least one rank"]
    for what, names in (("rank", [rank.name for rank in ranks]), ("tier", [tier.name for tier in tiers])):
        faults += [f"two {what}s are named {name!r}" for name in sorted(set(names)) if names.count(name) > 1]
    faults += _rank_faults(model, ranks)
    never = [group.name for group in model.groups if not group.checkpointable]
    if never:
        faults.append(
            f"group {', '.join(never)} is never restored: no prefix can be reused; leave the store out"
        )
    lasting = lasting_names(tiers)
    if lasting and secret is None:
        faults.append(f"tier {', '.join(lasting)} outlives or leaves this process: give the fleet's secret")
    mixing = [tier.name for tier in tiers if not tier.capabilities.scopes]
    if mixing:
        faults.append(f"tier {', '.join(mixing)} cannot keep scopes apart; every tier of a store must (D3)")
    if faults:
        raise UsageFault("; ".join(faults))
    for rank in ranks:
        bound = {
            key if rank.tp == 1 else f"{key} of worker {number}": binding.blocks
            for number, memory in enumerate(rank.memory)
            for key, binding in memory.items()
        }
        rank.pool.check_capacity(bound)
    if lasting and not model.weights.resolved:
        raise NotConformant(model.name, (_unnamed_weights(model, lasting),))
    return parts(model)[0]


def _rank_faults(model: KvModel, ranks: Sequence[Rank]) -> list[str]:
    faults = []
    if len({id(rank.pool) for rank in ranks}) < len(ranks):
        faults.append("two ranks share a pool; each has its own")
    for rank in ranks:
        if rank.pool.page_tokens != model.page_tokens:
            faults.append(f"rank {rank.name!r}: its pool's page differs from {model.page_tokens} tokens")
        faults += [f"rank {rank.name!r}: {fault}" for fault in tp_faults(model, rank.tp)]
    return faults


def lasting_names(tiers: Sequence[Tier]) -> list[str]:
    """Names of the tiers whose records outlive this process or leave it."""
    return [tier.name for tier in tiers if tier.capabilities.persistent or tier.capabilities.shared]


def refuse_small_tiers(model: KvModel, part: Part, tiers: Sequence[Tier], max_tp: int) -> None:
    """A tier that no record fits into would never be of use (H10).

    Raises:
        UsageFault: names every such tier.
    """
    shards = part.shards(max_tp)
    records = [wire_record(model, part, shard, shards) for shard in range(shards)]
    largest = max(record.payload_bytes + header_bytes(len(record.segments)) for record in records)
    small = [
        f"tier {tier.name!r} takes records of at most {limit:,} B"
        for tier in tiers
        if (limit := tier.capabilities.max_record_bytes) is not None and limit < largest
    ]
    if small:
        raise UsageFault(f"{'; '.join(small)}; one record of part {part.name!r} needs {largest:,} B")


def _unnamed_weights(model: KvModel, lasting: Sequence[str]) -> Finding:
    message = f"tier {', '.join(lasting)} keeps records beyond this process"
    rule = clause("KVC-OFFLOAD-05")
    return Finding(rule.id, "weights.kind", model.weights.kind, "digest or revision", message, model.where)

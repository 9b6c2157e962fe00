"""What a store has for each part: what is known of it in the tiers, who saves it, and who copies it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcontract.contract.model import KvModel
from kvcontract.contract.wire import Part
from kvcontract.core.pending import Pending
from kvcontract.pool.index import Keys, Pages
from kvcontract.store.events import TierEvents
from kvcontract.store.known import Known
from kvcontract.store.marks import Generations
from kvcontract.store.rank import Berth, Rank, SideBerth
from kvcontract.store.relay import Records, RelayClock, Relays
from kvcontract.store.stats import Tally
from kvcontract.store.tier_policy import TierPolicy
from kvcontract.store.workers import Crew, Workers
from kvcontract.tiers.base import Tier
from kvcontract.tiers.cipher import RecordCipher
from kvcontract.tiers.guard import GuardedTier


@dataclass(frozen=True, slots=True)
class Ground:
    """What all parts of a store share.

    Attributes:
        tiers: fastest first.
        policies: of each.
        tally: where everything is counted.
        clock: the store's.
        loads: those in flight, which relays let go first.
        cipher: of what leaves the process; None: nothing is encrypted.
    """

    tiers: Sequence[GuardedTier]
    policies: Sequence[TierPolicy]
    tally: Tally
    clock: RelayClock
    loads: Callable[[], Sequence[Pending[None]]]
    cipher: RecordCipher | None


class PartStore:
    """One part.

    Args:
        part: what is saved and restored as one unit.
        berths: by name of the rank, where its blocks are, and who copies them.
        ground: what it shares with others.
        events: told what tiers hold; None: nobody is.

    Attributes:
        workers: by name of the rank.
        known: what is known of each tier.
        relays: bring records to the tiers that are written back.
    """

    def __init__(
        self,
        part: Part,
        berths: Mapping[str, tuple[Berth, Workers]],
        ground: Ground,
        events: TierEvents | None = None,
    ) -> None:
        self.part = part
        self.berths = dict(berths)
        self.workers = {name: workers for name, (_, workers) in berths.items()}
        places = [berth for berth, _ in berths.values()]
        self.known = [Known(tier, places, part.id, events, ground.clock.time) for tier in ground.tiers]
        first = next(iter(self.workers.values()))  # records are the same, whichever rank writes them
        self.relays = Relays(
            self.known,
            ground.policies,
            Records(first.record_keys, first.shard_bytes, first.record_pages),
            ground.tally,
            ground.clock,
            ground.loads,
            ground.cipher,
        )

    def came(self, berth: Berth, records: tuple[Pages, Keys, Generations], tier: Tier, begun: float) -> int:
        """A tier has given records: it has them (C3), and others may.

        Args:
            berth: where they are now.
            records: int32[n] their last blocks, uint64[n, 2] their keys, uint32[n] the blocks' occupants.
            tier: that gave all of each.
            begun: when that began, on the store's clock.

        Returns:
            The number of the tier.
        """
        for known in self.known:
            if known.tier is tier:
                known.restored(berth, *records, begun)
            else:
                known.recall(berth, *records)
        return next(number for number, known in enumerate(self.known) if known.tier is tier)

    @property
    def pending(self) -> tuple[Pending[Any], ...]:
        """Relays that have not ended."""
        return self.relays.pending


def make_parts(
    model: KvModel,
    parts: Sequence[Part],
    crews: Mapping[str, tuple[Rank, Crew]],
    max_tp: int,
    ground: Ground,
    events: TierEvents | None,
) -> tuple[PartStore, dict[str, PartStore]]:
    """Full pages, and by key of its space what is kept beside them; events tell of full pages alone.

    Raises:
        UsageFault: a shard of a part would be written by nobody.
    """
    pages: list[PartStore] = []
    beside: dict[str, PartStore] = {}
    for part in parts:
        berths: dict[str, tuple[Berth, Workers]] = {}
        for name, (rank, crew) in crews.items():
            pools = {side.index.key: side.index for side in rank.pool.sides}
            berth = SideBerth(name, pools[part.space]) if part.space in pools else rank
            berths[name] = berth, Workers(model, part, crew, max_tp=max_tp)
        if not any(isinstance(berth, SideBerth) for berth, _ in berths.values()):
            pages.append(PartStore(part, berths, ground, events))
        else:
            beside[part.space] = PartStore(part, berths, ground)
    return pages[0], beside

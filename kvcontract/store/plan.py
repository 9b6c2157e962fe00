"""What of a run of records is to go to which tier, and how much of that may begin now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcontract.store.handoffs import Handoff
from kvcontract.store.rank import Berth
from kvcontract.store.saves import Batch, Run, SavingBudgets
from kvcontract.tiers.base import SaveClass


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What of a run is to go where.

    Attributes:
        save: bool[tiers, n], from the device.
        relay: bool[tiers, n], from the tier above.
        back: numbers of the tiers that are written back, in order.
    """

    save: NDArray[np.bool_]
    relay: NDArray[np.bool_]
    back: Sequence[int]

    def keep(self, these: NDArray[np.bool_]) -> None:
        """Only these, bool[tiers, n]."""
        np.logical_and(self.save, these, out=self.save)
        np.logical_and(self.relay, these, out=self.relay)

    def of(self, tier: int) -> NDArray[np.bool_]:
        """bool[n], what a tier is given the usual way; to be written to."""
        found: NDArray[np.bool_] = (self.relay if tier in self.back else self.save)[tier]
        return found


def chosen(
    rank: Berth,
    run: Run,
    todo: NDArray[np.bool_],
    classes: Sequence[SaveClass],
    budgets: SavingBudgets,
    *,
    left: int | None,
    handoff: Handoff | None,
) -> Batch | None:
    """What of the records that are to be saved may begin; None if there are none at all (C5).

    Args:
        rank: whose pages.
        run: of the pages.
        todo: bool[tiers, n].
        classes: by tier.
        budgets: of what each tier is being given.
        left: records that may still be pinned; None: any number, since nothing of it may be shed.
        handoff: that it belongs to.
    """
    wanted = np.asarray(todo.any(axis=0))
    rows = np.flatnonzero(wanted)
    if not len(rows):
        return None
    kept, capped = rows, np.zeros((0, 0), np.bool_)
    if budgets.limited and handoff is None and left is not None:  # C5
        over = np.stack([budgets.cap(number, todo[number]) for number in range(len(todo))])
        todo = todo & ~over
        kept = np.flatnonzero(todo.any(axis=0))
        capped = over if over.any() else capped
    if left is not None:
        kept = kept[:left]
    if len(kept) < len(rows):
        wanted[kept] = False
        shed = np.flatnonzero(wanted) + run.first
    else:
        shed = kept[:0]
    held_back = capped[:, kept] if capped.size else capped
    budgeted = left is not None
    return Batch(
        rank, run, kept + run.first, todo[:, kept], classes, budgeted, handoff, shed=shed, capped=held_back
    )

"""How a store uses each of its tiers: what goes there, how much at a time, and how long it may take."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

Write = Literal["through", "back"]

SAVE_DEADLINE_S: Final = 60.0
"""A save that has not begun by then is given up and tried again at retire."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPolicy:
    """How one tier is used.

    Attributes:
        write: ``through``: pages are saved here straight from the device.  ``back``: they are saved to the
            tier above, and copied from there in the background, so that no device page is pinned for a slow
            tier; what the tier above loses before is saved anew.  A handoff's pages always go straight to
            where another process looks for them.
        most_saving_bytes: most bytes of records on their way here at a time, handoffs apart; what is above is
            shed and tried again later (C5).  None: no limit of its own.
        load_deadline_s: longest time that a look-up or a load may take; a resolve waits for neither beyond
            its own deadline (A20).  None: until that.
        save_deadline_s: a save or copy that has not begun by then is given up, and tried again at retire.
        promote: pages that come from a tier below are saved here as well.
    """

    write: Write = "through"
    most_saving_bytes: int | None = None
    load_deadline_s: float | None = None
    save_deadline_s: float = SAVE_DEADLINE_S
    promote: bool = True

    @property
    def back(self) -> bool:
        """Whether pages come from the tier above."""
        return self.write == "back"

    def faults(self) -> Iterable[str]:
        """Values out of range."""
        if self.write not in get_args(Write):
            yield f"write {self.write!r}: expected {' or '.join(get_args(Write))}"
        if self.most_saving_bytes is not None and not _above_0(self.most_saving_bytes, int):
            yield f"most_saving_bytes {self.most_saving_bytes!r}: expected a number of bytes above 0, or None"
        if self.load_deadline_s is not None and not _above_0(self.load_deadline_s, float):
            yield f"load_deadline_s {self.load_deadline_s!r}: expected seconds above 0, or None"
        if not _above_0(self.save_deadline_s, float):
            yield f"save_deadline_s {self.save_deadline_s!r}: expected seconds above 0"
        if not isinstance(self.promote, bool):
            yield f"promote {self.promote!r}: expected True or False"


DEFAULT: Final = TierPolicy()


def _above_0(value: object, kind: type[int | float]) -> bool:
    """Whether it is such a number, and more than 0; whole numbers are seconds too."""
    return isinstance(value, kind | int) and not isinstance(value, bool) and value > 0


def policy_faults(policies: Mapping[str, TierPolicy], names: Sequence[str]) -> list[str]:
    """Everything that is wrong with the policies of a store.

    Args:
        policies: by name of the tier.
        names: of the tiers, fastest first.
    """
    faults = []
    for name, policy in policies.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"tiers are {', '.join(names) or 'none'}"
            faults.append(f"a policy for tier {name!r}, which there is not; {hint}")
        if not isinstance(policy, TierPolicy):
            faults.append(f"the policy of tier {name!r} is {policy!r}; expected a TierPolicy")
            continue
        faults += [f"tier {name!r}: {fault}" for fault in policy.faults()]
        if policy.back and name in names[:1]:
            faults.append(f"tier {name!r} is written back, and no tier is above it to copy from")
    return faults


def small_budget_faults(policies: Mapping[str, TierPolicy], record_bytes: int) -> list[str]:
    """Budgets that not even one record fits into, so that every one would be shed for ever.

    Args:
        policies: by name of the tier.
        record_bytes: of all shards of one record.
    """
    return [
        f"tier {name!r}: most_saving_bytes {limit:,} is less than one record, {record_bytes:,} B"
        for name, policy in policies.items()
        if isinstance(policy, TierPolicy)
        and isinstance(limit := policy.most_saving_bytes, int)
        and 0 < limit < record_bytes
    ]

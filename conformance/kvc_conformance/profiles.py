"""How much is tried of what has no end: while writing a plugin, in its CI, or through a night."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

ProfileName = Literal["quick", "ci", "deep"]


@dataclass(frozen=True, slots=True)
class Profile:
    """The lengths of a run.

    Attributes:
        about: when it is meant for.
        mixes: seeded mixes of requests (KVC-PREFIX-07), of each page size.
        mix_steps: steps of each.
        worlds: simulated worlds under faults (KVC-OFFLOAD-06).
        drawn: the seed is drawn anew each time, unless it is given.
    """

    about: str
    mixes: int
    mix_steps: int
    worlds: int
    drawn: bool = False


PROFILES: Final[dict[ProfileName, Profile]] = {
    "quick": Profile("while a plugin is being written", mixes=1, mix_steps=150, worlds=40),
    "ci": Profile("before a change is let in", mixes=4, mix_steps=300, worlds=400),
    "deep": Profile("through a night", mixes=40, mix_steps=600, worlds=10_000, drawn=True),
}
"""Same clauses, same judgement; only the numbers differ."""

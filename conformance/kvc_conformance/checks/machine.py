"""KVC-PREFIX-07: a seeded random mix of requests over a small pool, compared with a dict of token lists."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvc_conformance.bench import Bench, Failed
from kvc_conformance.beside import Beside
from kvc_conformance.channel import Message
from kvc_conformance.content import Content
from kvc_conformance.driver import ProbeFailed
from kvc_conformance.rig import TOKEN_IDS, Rig, Scope, model_for, prompt, whose

TRACED: Final = 12
POOL_PAGES: Final = 25
SLOTS: Final = 7
"""Of each bounded group: a few requests, or fewer and a few snapshots."""

STEP_PAGES: Final = 3
BOUNDARY_TOKENS: Final = 4
FAMILIES: Final = 4
SCOPES: Final[tuple[Scope, ...]] = ({}, {"salt": "x"})
TIER_PAGES: Final = 20
_FRAME_BYTES: Final = 256
ROOM_S: Final = 0.2
"""How long a resolve may wait for room: nobody else is there to make any."""


@dataclass(slots=True)
class _Live:
    """What the model knows of a request: no more than its tokens, and whether it has run any itself."""

    tokens: list[int]
    prompt_len: int
    max_new: int
    scope: Scope
    committed: int
    begun: bool = False

    @property
    def sampled(self) -> int:
        return len(self.tokens) - self.prompt_len


class Machine:
    """Draws steps, has them executed, and compares.

    Args:
        bench: the workbench.
        page: tokens of a page.
        number: of the mix; each draws others.
    """

    def __init__(self, bench: Bench, page: int, number: int) -> None:
        self._seed, self._page, self._steps = bench.seed + number, page, bench.profile.mix_steps
        self._rng = np.random.default_rng([self._seed, page])
        model = model_for(bench, page, limit_bytes=512, boundary_tokens=BOUNDARY_TOKENS)
        content, beside = Content(model), Beside.of(model)
        size = page * content.row_bytes + content.state_bytes + _FRAME_BYTES * (1 + bool(beside))
        few = {f"slots-{name}": SLOTS for name in beside.slots}
        more: dict[str, Any] = {"tiers": [{"capacity_bytes": TIER_PAGES * size}], "beside": few}
        self.rig = Rig(bench, model, pages=POOL_PAGES, step_pages=STEP_PAGES, inline=True, **more)
        self._live: dict[str, _Live] = {}
        self._trace: deque[str] = deque(maxlen=TRACED)
        self._number = 0
        self.figures = {"requests": 0, "hits": 0, "steps": 0}
        self._verbs: dict[Callable[[], bool], int] = {
            self._admit: 4,
            self._prefill: 6,
            self._decode: 5,
            self._revert: 1,
            self._seal: 2,
            self._retire: 3,
            self._drain: 1,
        }

    def run(self) -> None:
        """All steps, then retire what is left.

        Raises:
            Failed: with the seed and the last steps.
        """
        verbs = list(self._verbs)
        weights = np.array(list(self._verbs.values()), float)
        try:
            for _ in range(self._steps):
                while not verbs[self._rng.choice(len(verbs), p=weights / weights.sum())]():
                    """Nothing to do it to: draw another."""
                self._look()
            for name in list(self._live):
                self._retire_one(name)
                self._look()
            self.rig.evict()
        except Failed as failed:
            self._fail(failed.evidence.saw)
        except ProbeFailed as error:
            self._fail(f"{error.kind}: {error.text}")

    def _fail(self, saw: str) -> None:
        where = f"seed {self._seed}, pages of {self._page}, pool of {POOL_PAGES - 1}"
        raise Failed(f"{saw}\n({where})", trace=tuple(self._trace))

    def _draw(self, below: int) -> int:
        return int(self._rng.integers(below))

    def _pick(self, fits: Callable[[_Live], bool]) -> str | None:
        names = [name for name, live in self._live.items() if fits(live)]
        return names[self._draw(len(names))] if names else None

    # Steps: each says whether there was anything to do

    def _admit(self) -> bool:
        """A prompt of some family, cut somewhere, sometimes with an end of its own."""
        family, scope = self._draw(FAMILIES), SCOPES[self._draw(len(SCOPES))]
        whole = prompt(self._seed, self._page, 400 + family, length=8 * self._page)
        tokens = whole[: 1 + self._draw(len(whole))]
        if self._draw(2):
            self._number += 1
            tokens += prompt(
                self._seed, self._page, 500 + self._number, length=1 + self._draw(2 * self._page)
            )
        max_new = 1 + self._draw(3 * self._page)
        hit = self.rig.resolve(tokens, scope, deadline_s=ROOM_S)
        self._trace.append(f"{hit.id}: {len(tokens)} tokens of family {family}, hit {hit.tokens}")
        if hit.wrong is not None:
            raise Failed(f"{hit.id}: a hit of {hit.tokens} tokens has wrong content: {hit.wrong}")
        unit = self.rig.beside.granule_tokens
        if hit.tokens % unit or hit.tokens >= len(tokens):
            raise Failed(f"{hit.id}: a hit of {hit.tokens} of {len(tokens)} tokens, in steps of {unit}")
        self.figures["hits"] += hit.tokens > 0
        answer = self.rig.ask(hit.id, tokens, scope, max_new)
        self._trace[-1] += f", + {max_new} new: {answer}"
        if answer == "RequestKv":
            self.figures["requests"] += 1
            self._live[hit.id] = _Live(tokens, len(tokens), max_new, scope, hit.tokens)
        return True

    def _prefill(self) -> bool:
        name = self._pick(lambda live: live.committed < live.prompt_len)
        if name is None:
            return False
        live = self._live[name]
        limit = 1 + self._draw(STEP_PAGES * self._page)
        end = self._end(live, limit)
        token = self._draw(TOKEN_IDS)
        self._step(name, end, max_tokens=limit, token=token)
        live.committed, live.begun = end, True
        if end == live.prompt_len:
            live.tokens.append(token)
        return True

    def _decode(self) -> bool:
        name = self._pick(lambda live: 0 < live.sampled < live.max_new)
        if name is None:
            return False
        live, token = self._live[name], self._draw(TOKEN_IDS)
        self._step(name, live.committed + 1, token=token)
        live.committed += 1
        live.tokens.append(token)
        return True

    def _revert(self) -> bool:
        """A step whose rows were written, and which then came to nothing."""
        name = self._pick(lambda live: live.committed < live.prompt_len)
        if name is not None:
            live = self._live[name]
            end = self._end(live, 2 * self._page)
            self._step(name, end, max_tokens=2 * self._page, token=0, revert=True)
        return name is not None

    def _end(self, live: _Live, limit: int) -> int:
        """Where a prefill of so many tokens ends."""
        most = min(live.prompt_len, live.committed + limit)
        return self.rig.beside.step_end(live.committed, most, self.rig.beside.stops(live.prompt_len))

    def _step(self, name: str, end: int, **arguments: Any) -> None:
        live = self._live[name]
        verb = "revert" if arguments.get("revert") else "prefill" if "max_tokens" in arguments else "decode"
        self._trace.append(f"{name}: {verb} tokens {live.committed} .. {end - 1}")
        body = self.rig.step(name, live.tokens, live.committed, end, whose(live.scope), **arguments).body
        pages = -(-end // self._page)
        wanted = (live.committed, end, dict.fromkeys(body["pages"], pages))
        found = (body["start"], body["end"], {key: len(table) for key, table in body["pages"].items()})
        if found != wanted:  # B17
            raise Failed(
                f"{name}: a step over tokens {found[0]} .. {found[1] - 1} on {found[2]} pages;"
                f" expected {wanted[0]} .. {wanted[1] - 1} on {pages} in each space"
            )
        self.figures["steps"] += 1

    def _seal(self) -> bool:
        name = self._pick(lambda live: live.committed >= self._page)
        if name is not None:
            self._trace.append(f"{name}: seal")
            self.rig.call("seal", id=name)
        return name is not None

    def _retire(self) -> bool:
        name = self._pick(lambda _: True)
        if name is not None:
            self._retire_one(name)
        return name is not None

    def _retire_one(self, name: str) -> None:
        live = self._live.pop(name)
        self._trace.append(f"{name}: retire at {live.committed} of {live.prompt_len} + {live.max_new} tokens")
        self.rig.call("retire", id=name)

    def _drain(self) -> bool:
        self._trace.append("drop everything cached on the device")
        self.rig.call("drain")
        return True

    # Comparison

    def _look(self) -> None:
        answer = self.rig.call("look")
        if answer.body["books"] is not None:
            raise Failed(answer.body["books"])
        self._check_slots(answer.body["slots"])
        owners: dict[tuple[str, int], tuple[str, int]] = {}
        for name, tables in answer.body["pages"].items():
            for key, table in tables.items():
                self._check_owners(owners, name, key, table)
            wrong = self._wrong(name, tables, answer)
            if wrong is not None:
                raise Failed(f"{name}: what a request has written has changed: {wrong}")

    def _wrong(self, name: str, tables: dict[str, list[int]], answer: Message) -> str | None:
        """What is wrong with the memory of a live request, in every space."""
        live, rig, wrong = self._live[name], self.rig, None
        who, end = whose(live.scope), live.committed
        for key, table in tables.items():
            numbers = [number for number, block in enumerate(table) if block]
            needed = set(rig.beside.needed(key, end)) if key in rig.beside.windows else set(range(len(table)))
            lost = sorted(number for number in needed - set(numbers) if number * self._page < end)
            if lost:
                return f"{key}: pages {lost} are gone, and steps from {end} tokens on read them"
            wrong = wrong or rig.wrong_pages(
                key, numbers, answer.arrays[f"{name} {key}"], live.tokens, who, end
            )
        if wrong is None and live.begun and rig.content.state_bytes:
            wrong = rig.content.wrong_state(answer.arrays[f"{name} state"], live.tokens, end, who)
        return wrong

    def _check_slots(self, slots: dict[str, dict[str, int]]) -> None:
        """The live slot of a request is its own (F1)."""
        owners: dict[tuple[str, int], str] = {}
        for name, mine in slots.items():
            for place in mine.items():
                if place[1] == 0 or owners.setdefault(place, name) != name:
                    other = "padding" if place[1] == 0 else owners[place]
                    raise Failed(f"slot {place[1]} of {place[0]} is {name}'s and {other}'s at once")

    def _check_owners(
        self, owners: dict[tuple[str, int], tuple[str, int]], name: str, key: str, pages: list[int]
    ) -> None:
        """Two requests share a page only where it is complete, and the same tokens lead to it."""
        if 0 in pages and key not in self.rig.beside.windows:
            raise Failed(f"{name} was given page 0, which is padding")  # B21
        for number, page in enumerate(pages):
            other, place = owners.setdefault((key, page), (name, number)) if page else (name, number)
            if (other, place) == (name, number):
                continue
            mine, theirs, end = self._live[name], self._live[other], (number + 1) * self._page
            complete = min(mine.committed, theirs.committed) >= end and place == number
            if not complete or mine.scope != theirs.scope or mine.tokens[:end] != theirs.tokens[:end]:
                raise Failed(
                    f"page {page} of {key} is page {number} of {name} and page {place} of {other} at once"
                )


def run_machine(bench: Bench, page: int) -> str:
    """Run as many mixes as the profile wants; returns figures."""
    figures = Counter[str]()
    for number in range(bench.profile.mixes):
        machine = Machine(bench, page, number)
        machine.run()
        leaks = [leak for leak in machine.rig.leaks() if leak.startswith("pool")]  # others: KVC-OFFLOAD-04
        machine.rig.close()
        if leaks:
            raise Failed(f"after every request has ended: {', '.join(leaks)} (seed {bench.seed + number})")
        figures.update(machine.figures)
    return ", ".join(f"{number} {name}" for name, number in figures.items())

"""A child that is none: probes are executed in this process, and chosen answers of theirs are changed."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvc_conformance.channel import Message
from kvc_conformance.child import PROBES, Session, describe
from kvc_conformance.driver import ProbeFailed
from kvcontract.contract.errors import KvContractError

Change = Callable[[Message], None]


@dataclass
class Spoilt:
    """One answer to be changed.

    Attributes:
        probe: which probe's; with "peer " before it, the second process's alone.
        nth: from which of its answers on; negative: this one alone.
        change: how.
        instead: whether nothing is done before.
    """

    probe: str
    nth: int
    change: Change
    instead: bool = False


class Near:
    """What a child does, done here."""

    def __init__(self, job: dict[str, Any], spoilt: tuple[Spoilt, ...], whose: str = "first") -> None:
        self.session, self.spoilt, self.counts = Session(job=job), spoilt, Counter[str]()
        self.whose = whose

    def call(
        self, probe: str, arguments: Mapping[str, Any], arrays: Mapping[str, Any] | None = None
    ) -> Message:
        """Execute a probe; change its answer if it is to be."""
        family, _, name = probe.partition(".")
        self.counts[name] += 1
        due = [item for item in self.spoilt if self._is_due(item, name)]
        answer = Message({})
        if not any(item.instead for item in due):
            function = getattr(importlib.import_module(PROBES[family]), name)
            try:
                answer = function(self.session, dict(arguments), arrays or {})
            except KvContractError as error:
                raise ProbeFailed(describe(error, {})) from error
        for item in due:
            item.change(answer)
        return answer

    def _is_due(self, item: Spoilt, name: str) -> bool:
        mine = item.probe in {name, f"{self.whose} {name}"}
        return mine and (self.counts[name] >= item.nth if item.nth > 0 else self.counts[name] == -item.nth)

    def close(self) -> None:
        """Whatever tier or store is left."""
        for made in self.session.objects.values():
            if hasattr(made, "tier"):
                for lease in made.leases.values():
                    lease.release()
                made.tier.close(made.clock() + 1)
            elif hasattr(made, "store"):
                for prefix in made.prefixes.values():
                    prefix.release()
                for request in made.requests.values():
                    made.store.retire(request)
                made.store.close()
                for lane in made.lanes:
                    lane.close(10.0)


def told(**values: Any) -> Change:
    """Other values."""
    return lambda answer: answer.body.update(values)

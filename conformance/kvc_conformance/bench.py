"""What every check gets: the declaration, children to execute in, a seed, a folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvc_conformance.driver import Child, scrubbed
from kvc_conformance.outcomes import Evidence
from kvc_conformance.profiles import PROFILES, Profile
from kvc_conformance.spawning import nursery
from kvcontract.contract.finding import Finding
from kvcontract.contract.layout import layout
from kvcontract.contract.model import KvModel
from kvcontract.contract.stand_in import StandIn
from kvcontract.core.shrink import shrink

REFERENCE_TIMEOUT_S: Final = 240.0
PAGE_LIMIT_BYTES: Final = 64 << 20
"""A page of which every byte can be told about."""


class Failed(Exception):
    """A check found the clause broken."""

    def __init__(
        self, saw: str, *, where: str | None = None, trace: tuple[str, ...] = (), fault: Any = None
    ) -> None:
        self.evidence = Evidence(saw, where, trace, fault)
        super().__init__(saw)


class CouldNotRun(Exception):
    """Something the check needs is missing; it is never green."""

    def __init__(self, needs: str, *, where: str | None = None) -> None:
        self.where = where
        super().__init__(needs)


class NotApplicable(Exception):
    """The declaration does not use what the clause is about."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check of one clause.

    Attributes:
        clause: its id.
        run: raises `Failed`, `CouldNotRun` or `NotApplicable`; returns figures worth knowing, or None.
        cases: names of the cases to run it for; planned before anything of the check runs.
    """

    clause: str
    run: Callable[[Bench, str], str | None]
    cases: Callable[[Bench], tuple[str, ...]] = lambda _: ("",)


@dataclass(slots=True)
class Bench:
    """The suite's workbench for one plugin.

    Attributes:
        job: what a child needs to load the plugin: see `kvc_conformance.probes.declare`.
        folder: for small checkpoints and other files of this run.
        seed: all randomness comes from it.
        profile: how much is tried of what has no end.
        given_checkpoint: the checkpoint the user gave, used as it is.
        model: what the plugin declares for the facts given; None if there is nothing to speak of.
        findings: what is wrong with it, statically.
        stand_ins: facts that the plugin marks as still to be filled in.
        samples: configs to build small checkpoints from.
        variables: of the environment, those that the plugin's own code looks at.
        runs: whether the plugin brings an executor or asks for the generic one.
        built_in: whether it is part of this distribution, whose fault a failure then is.
        shrunk: what was changed to make the small model, by key.
        kept: what checks of several clauses look at, by a name of theirs.
    """

    job: dict[str, Any]
    folder: Path
    seed: int = 0
    given_checkpoint: Path | None = None
    profile: Profile = PROFILES["quick"]
    model: KvModel | None = None
    findings: tuple[Finding, ...] = ()
    stand_ins: tuple[StandIn, ...] = ()
    samples: tuple[dict[str, Any], ...] = ()
    variables: tuple[str, ...] = ()
    runs: bool = False
    built_in: bool = False
    shrunk: dict[str, Any] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)
    _children: dict[str, Child] = field(default_factory=dict)
    _checkpoint: Path | None = None
    _small: KvModel | None = None

    @property
    def plugin(self) -> Child:
        """The child that has the plugin, for the facts given."""
        return self._child("plugin", self.job)

    @property
    def peer(self) -> Child:
        """A second child that has the plugin, for the same facts, and finds others in its environment."""
        return self._child("peer", self.job)

    @property
    def small_plugin(self) -> Child:
        """The child that has the plugin, for the small checkpoint."""
        checkpoint = str(self.checkpoint)
        return self._child("small", {**self.job, "config": None, "checkpoint": checkpoint})

    @property
    def reference(self) -> Child:
        """A child that never sees the plugin: it runs the unmodified model."""
        return self._child("reference", {})

    @property
    def checkpoint(self) -> Path:
        """A folder of config.json and weights: the one given, or a small one with seeded random weights.

        Raises:
            CouldNotRun: there is no executor to run one, or no config to build one from.
        """
        if not self.runs:
            raise CouldNotRun("needs an executor (the plugin has no kvc_executor)")
        if self.given_checkpoint is not None:
            return self.given_checkpoint
        if self._checkpoint is None:
            self._checkpoint = self._build_checkpoint()
        return self._checkpoint

    def _build_checkpoint(self) -> Path:
        folder = self.folder / "checkpoint"
        arguments = {"config": self.small_config, "folder": str(folder), "seed": self.seed}
        self.reference.call("reference.build", arguments, timeout_s=REFERENCE_TIMEOUT_S)
        return folder

    @property
    def small_config(self) -> dict[str, Any]:
        """The config of a small model of the kind.

        Raises:
            CouldNotRun: there is none to make it from.
        """
        if not self.samples:
            raise CouldNotRun("needs a config (give --config or --checkpoint, or bring kvc_samples)")
        small = shrink(self.samples[0])
        self.shrunk = {key: list(change) for key, change in small.changes.items()}
        return dict(small.config)

    @property
    def small(self) -> KvModel:
        """The declaration for a small model of the kind; without a config, the one for the facts given.

        Raises:
            CouldNotRun: it is not sound, which the clauses on declarations have said.
        """
        if self._small is None:
            if not self.samples:
                return self.declared
            small, findings = parse(self.small_child.call("declare.declare").body)
            if small is None or findings:
                raise CouldNotRun(f"needs the declaration of a small model of the kind: {told(findings)}")
            self._small = small
        return self._small

    @property
    def small_child(self) -> Child:
        """The child whose declaration is `small`; it needs no weights."""
        return self._child("bytes", self._small_job) if self.samples else self.plugin

    @property
    def small_peer(self) -> Child:
        """A second child whose declaration is `small`."""
        return self._child("bytes of a peer", self._small_job) if self.samples else self.peer

    @property
    def _small_job(self) -> dict[str, Any]:
        file = self.folder / "small.json"
        if not file.exists():
            file.write_text(json.dumps(self.small_config))
        return {**self.job, "config": str(file), "checkpoint": None}

    @property
    def whole_child(self) -> Child:
        """A child whose declaration is `declared`, for bytes; it needs no weights."""
        return self._child("whole", self.job)

    @property
    def declared(self) -> KvModel:
        """The declaration for the facts given.

        Raises:
            CouldNotRun: there is none.
        """
        if self.model is None:
            raise CouldNotRun("needs a declaration")
        return self.model

    def close(self) -> None:
        """End all children."""
        for child in self._children.values():
            child.close()
        self._children.clear()

    def _child(self, name: str, job: Mapping[str, Any]) -> Child:
        child = self._children.get(name)
        if child is None or not child.alive:
            if child is not None:
                child.close()
            # Those that are compared come from interpreters of their own: what depends on hashes differs.
            forked = name not in {"plugin", "peer"}
            swayed = self.swayed if name == "peer" else {}
            child = self._children[name] = Child(job, threads=self._threads, forked=forked, swayed=swayed)
        return child

    @property
    def swayed(self) -> dict[str, str]:
        """The variables that the plugin looks at, each with a value that it does not have here."""
        here = scrubbed(self._threads)
        return {name: "2" if here.get(name) == "1" else "1" for name in self.variables}

    @property
    def _threads(self) -> int | None:
        """Small models run fastest on one thread, and do not fight over cores with whatever else runs."""
        return 1 if self.given_checkpoint is None else None

    def expect_children(self) -> None:
        """Those that run models will be wanted: what they need may be imported by now."""
        nursery(scrubbed(self._threads), self._threads)


def small_enough(model: KvModel) -> KvModel:
    """The same declaration, if the suite can hold a few of its pages.

    Raises:
        CouldNotRun: a page is too large.
    """
    size = sum(space.stride_bytes for space in layout(model).spaces)
    if size > PAGE_LIMIT_BYTES:
        raise CouldNotRun(
            f"needs pages of at most {PAGE_LIMIT_BYTES:,} B; one of {model.page_tokens} tokens has {size:,} B"
            " (a config, given or from kvc_samples, lets the suite take a small model of the kind)"
        )
    return model


def first_few(faults: Sequence[str], limit: int = 3) -> str:
    """The first faults in full, and how many more there are."""
    more = [f"and {len(faults) - limit} more"] if len(faults) > limit else []
    return "\n".join([*faults[:limit], *more])


def told(findings: Sequence[Finding]) -> str:
    """Findings in words; those that say the same of other places are told once."""
    alike: dict[tuple[str, str, str], list[Finding]] = {}
    for item in findings:
        alike.setdefault((repr(item.value), str(item.message), str(item.allowed)), []).append(item)
    lines = []
    for (value, message, allowed), items in alike.items():
        more = f" (the same of {len(items) - 1} more, to {items[-1].path})" if len(items) > 1 else ""
        lines.append(f"{items[0].path} = {value}: {message}; allowed: {allowed}{more}")
    return first_few(lines)


def parse(body: Mapping[str, Any]) -> tuple[KvModel | None, tuple[Finding, ...]]:
    """A declaration and the child's findings from an answer of ``declare.declare``."""
    model = None if body["model"] is None else KvModel.model_validate_json(body["model"])
    return model, tuple(Finding(**item) for item in body["findings"])

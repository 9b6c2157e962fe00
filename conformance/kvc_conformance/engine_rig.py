"""The parent's handle on an engine in the child: prompts go in, runs with their logits come out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

import numpy as np

from kvc_conformance.bench import Bench, CouldNotRun, Failed
from kvc_conformance.channel import Message
from kvc_conformance.driver import ProbeFailed
from kvc_conformance.footprint import Batch, Place
from kvc_conformance.golden import Run, nan_words
from kvcontract.contract.model import KvModel

OWN: Final = "as declared"
"""The cache as it is kept when nobody asks for a type."""

DTYPES: Final = {"fp32": "float32", "bf16": "bfloat16", OWN: "bfloat16"}
"""Short names of precisions, as torch spells what is computed in."""

TIMEOUT_S: Final = 240.0


@dataclass(frozen=True, slots=True)
class Job:
    """One request to run.

    Attributes:
        prompt_tokens: length of its prompt.
        new_tokens: how many to sample.
        after: the step before which it comes.
        seed: of its prompt; equal seeds give equal beginnings.
    """

    prompt_tokens: int
    new_tokens: int
    after: int = 0
    seed: int = 0

    @property
    def tokens(self) -> int:
        """Of its whole life."""
        return self.prompt_tokens + self.new_tokens

    def pages(self, page_tokens: int) -> int:
        """Pages of its whole life."""
        return -(-self.tokens // page_tokens)


@dataclass(frozen=True, slots=True)
class Batches:
    """What one call of `Rig.run` did.

    Attributes:
        runs: each request.
        batches: each step.
        images: memory after each step, by region, if it was asked for.
    """

    runs: list[Run]
    batches: list[Batch]
    images: list[list[Any]]


class Rig:
    """An engine in the child that runs the plugin's executor.

    Attributes:
        model: the declaration it runs.
        dtype: computed in.
        where: the author's line.
        max_requests: of one step.
        max_batch_tokens: of one step.
        emits: whether the executor writes states inside steps.
        places: where each arena lies in dumped memory.
    """

    def __init__(self, bench: Bench, key: str, dtype: str, answer: Message) -> None:
        self._bench = bench
        self._key = key
        self._text_ids = np.setdiff1d(np.arange(answer.body["vocab_size"]), answer.body["placeholder_ids"])
        self._longest = int(answer.body["max_context_tokens"])
        self.model = KvModel.model_validate_json(answer.body["model"])
        self.dtype = dtype
        self.where: str | None = answer.body["where"]
        self.max_requests = int(answer.body["max_requests"])
        self.max_batch_tokens = int(answer.body["max_batch_tokens"])
        self.emits = bool(answer.body["emits"])
        self.places = {name: Place(*place) for name, place in answer.body["arenas"].items()}

    def run(self, jobs: Sequence[Job], *, poison: int | None = None, dump: bool = False) -> Batches:
        """Run requests together, to their ends.

        Raises:
            Failed: one of them came to another end than its full length.
        """
        longest = max(job.tokens for job in jobs)
        if longest > self._longest:
            raise CouldNotRun(f"needs a context of {longest} tokens; the executor takes {self._longest}")
        prompts = [self._prompt(job) for job in jobs]
        arguments = {
            "id": self._key,
            "requests": [{"new_tokens": job.new_tokens, "after": job.after} for job in jobs],
            "poison": poison,
            "dump": dump,
        }
        arrays = {f"prompt_{number}": prompt for number, prompt in enumerate(prompts)}
        answer = self._bench.small_plugin.call("engine.run", arguments, arrays, timeout_s=TIMEOUT_S)
        runs = [
            self._read(answer, number, job, prompt)
            for number, (job, prompt) in enumerate(zip(jobs, prompts, strict=True))
        ]
        steps = answer.body["steps"]
        batches = [
            Batch(
                step["sizes"],
                step["context"],
                _named(answer, f"table_{number}_"),
                _named(answer, f"slots_{number}_"),
            )
            for number, step in enumerate(steps)
        ]
        states = _states(runs, batches, answer)
        runs = [replace(run, states=mine) for run, mine in zip(runs, states, strict=True)]
        regions = len({place.region for place in self.places.values()}) if dump else 0
        images = [
            [answer.arrays[f"image_{number}_{region}"] for region in range(regions)]
            for number in range(len(steps))
        ]
        return Batches(runs, batches, images)

    def takes(self, tokens: int) -> bool:
        """Whether a request of so many tokens fits the model's context."""
        return tokens <= self._longest

    def flush(self) -> None:
        """Wait until every save has landed."""
        if not self._bench.small_plugin.call("engine.flush", {"id": self._key}).body["landed"]:
            raise Failed("the store's saves did not land within a minute", fault="runtime")

    def drop(self) -> None:
        """Have nothing cached on the device any more."""
        held = self._bench.small_plugin.call("engine.drop", {"id": self._key}).body["held"]
        if held:
            raise Failed(f"{held} blocks are held although no request is running", fault="runtime")

    def fail(self, saw: str) -> NoReturn:
        """Fail with the author's line."""
        raise Failed(saw, where=self.where)

    def _prompt(self, job: Job) -> Any:
        rng = np.random.default_rng([self._bench.seed, job.seed])
        return self._text_ids[rng.integers(0, len(self._text_ids), job.prompt_tokens)]

    def _read(self, answer: Message, number: int, job: Job, prompt: Any) -> Run:
        told = answer.body["requests"][number]
        label = f"request {number} (prompt of {job.prompt_tokens} tokens, {job.new_tokens} new)"
        if told["finish"] != "length":
            reason = str(told["reason"])
            words = nan_words(reason) if "NaN" in reason else reason
            self.fail(f"{label} ended as {told['finish']}: {words}")
        return Run(
            label=label,
            prompt=prompt,
            tokens=tuple(told["tokens"]),
            logits=answer.arrays[f"logits_{number}"],
            positions=answer.arrays[f"positions_{number}"],
            split=tuple(told["split"]),
            hit_tokens=int(told["hit_tokens"]),
            sources=told["sources"],
        )


def _named(answer: Message, prefix: str) -> dict[str, Any]:
    """Arrays of an answer by what follows in their names."""
    found = answer.arrays.items()
    return {name.removeprefix(prefix): array for name, array in found if name.startswith(prefix)}


def _states(
    runs: Sequence[Run], batches: Sequence[Batch], answer: Message
) -> list[dict[int, tuple[Any, Any]]]:
    """What lay in each run's slots before and after each step of its, by the step's first position.

    Whose step it is, its slots tell: at one position two requests may have one token.
    """
    found: list[dict[int, tuple[Any, Any]]] = [{} for _ in runs]
    reached = [run.hit_tokens for run in runs]
    owned: list[tuple[int, ...] | None] = [None for _ in runs]
    for number, batch in enumerate(batches if batches and batches[0].slots else ()):
        tokens, at = answer.arrays[f"tokens_{number}"], 0
        for row, (size, context) in enumerate(zip(batch.sizes, batch.context, strict=True)):
            here, slots = tokens[at : at + size], tuple(int(ids[row]) for ids in batch.slots.values())
            at += size
            fits = [
                mine
                for mine, run in enumerate(runs)
                if reached[mine] == context and np.array_equal(here, run.stream[context : context + size])
            ]
            whose = [mine for mine in fits if owned[mine] == slots] or [
                mine for mine in fits if owned[mine] is None
            ]
            if whose:
                mine = whose[0]
                before, after = (answer.arrays[f"{name}_{number}"][row] for name in ("before", "after"))
                found[mine][context] = before, after
                reached[mine], owned[mine] = context + size, slots
    return found


@contextmanager
def engine_rig(bench: Bench, key: str, dtype: str, page_tokens: int, **settings: Any) -> Iterator[Rig]:
    """An engine in the child, for as long as it is used.

    Args:
        bench: whose small checkpoint is run.
        key: the engine's name.
        dtype: a key of `DTYPES`.
        page_tokens: tokens of a page.
        settings: further arguments of the probe ``engine.start``.

    Raises:
        Failed: the plugin's executor, map and declaration do not fit together.
    """
    arguments = {
        "id": key,
        "dtype": DTYPES[dtype],
        "asked": dtype != OWN,
        "page_tokens": page_tokens,
        "tier_bytes": 0,
        "disk": None,
        "prefix_cache": False,
        "max_requests": 4,
        **settings,
    }
    _ = bench.checkpoint
    try:
        answer = bench.small_plugin.call("engine.start", arguments, timeout_s=TIMEOUT_S)
    except ProbeFailed as error:
        if error.kind == "PluginFault":
            raise Failed(error.text, where=error.where, fault="plugin") from error
        raise
    try:
        yield Rig(bench, key, DTYPES[dtype], answer)
    finally:
        bench.small_plugin.call("engine.stop", {"id": key})

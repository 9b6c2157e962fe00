"""States that are rewritten at each token, as they lay in slots after each step: compared, and told apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvc_conformance.golden import MAX_DIFFERENCE, Run
from kvcontract.contract.dtypes import DTYPE_BITS
from kvcontract.contract.model import KvModel

Image = NDArray[np.uint8]
FLOAT32: Final = "float32"


@dataclass(frozen=True, slots=True)
class StateField:
    """One field of a slot, in the bytes that a probe reads: all bounded arenas side by side as declared."""

    arena: str
    name: str
    layer: int | None
    dtype: str
    shape: tuple[int, ...]
    first: int
    end: int

    def __str__(self) -> str:
        where = f"arena {self.arena}" if self.layer is None else f"layer {self.layer}"
        return f"{where} {self.name}"

    def floats(self, state: Image) -> NDArray[np.float32]:
        """Its numbers, where it is kept in float32."""
        mine = np.ascontiguousarray(state[self.first : self.end])
        found: NDArray[np.float32] = mine.view(np.float32).reshape(self.shape)
        return found


def state_fields(model: KvModel) -> list[StateField]:
    """Every field of every bounded group, in order."""
    bounded = {group.name for group in model.groups if group.kind == "bounded"}
    found: list[StateField] = []
    for arena in model.arenas:
        for item in arena.fields if arena.group in bounded else ():
            shape, first = tuple(item.axes.values()), found[-1].end if found else 0
            size = math.prod(shape) * DTYPE_BITS[item.dtype] // 8
            found.append(
                StateField(arena.name, item.name, arena.layer, item.dtype, shape, first, first + size)
            )
    return found


def wrong_states(warm: Run, cold: Run, model: KvModel) -> str | None:
    """A run that began with a hit against the same request's cold run: bit for bit, at each end of a step."""
    fields = state_fields(model)
    for first, (before, after) in sorted(warm.states.items()):
        if first not in cold.states:
            return f"{warm.label}: no step of the cold run began at position {first}"
        theirs = cold.states[first]
        held = [("before", before, theirs[0])] if first else []
        for when, mine, other in (*held, ("after", after, theirs[1])):
            differs = np.flatnonzero(mine != other)
            if len(differs):
                item = next(item for item in fields if item.first <= differs[0] < item.end)
                return (
                    f"{warm.label}: began after {warm.hit_tokens} tokens; the state {when} the step from"
                    f" position {first} on is not the cold run's ({item}, {len(differs):,} B differ in all),"
                    " and not one bit may differ"
                )
    return None


@dataclass(frozen=True, slots=True)
class Kept:
    """Where a layer of the model keeps its state.

    Attributes:
        layer: index.
        state: field of the recurrent state, or None.
        conv: fields of the convolution's channels, one after another.
    """

    layer: int
    state: StateField | None
    conv: tuple[StateField, ...]

    @classmethod
    def of(cls, model: KvModel, told: Sequence[Any]) -> Kept:
        """From what ``engine.layer_map`` tells of a layer."""
        fields = {(item.arena, item.name): item for item in state_fields(model)}
        layer, state, conv = told
        return cls(
            layer, None if state is None else fields[tuple(state)], tuple(fields[tuple(r)] for r in conv)
        )


def unlike_original(
    run: Run, number: int, kept: Sequence[Kept], arrays: Mapping[str, NDArray[Any]]
) -> tuple[str | None, float]:
    """A float32 run's states against those that the unmodified model kept, after each step.

    Args:
        run: from position 0.
        number: of its stream, in the names of the arrays.
        kept: every layer that keeps a state.
        arrays: what ``reference.run`` returned.

    Returns:
        What is wrong, and the largest difference, in units of the largest number of its tensor.
    """
    worst = 0.0
    for step, (first, (_, after)) in enumerate(sorted(run.states.items())):
        for layer in kept:
            for what, item, ours, theirs in _pairs(layer, after, number, step, arrays):
                if ours.shape != theirs.shape:
                    said = f"{item} has shape {list(ours.shape)}; the model keeps {list(theirs.shape)}"
                    return f"{run.label}: {said}", math.inf
                scale = max(1.0, float(np.abs(theirs).max(initial=0)))
                gap = np.abs(ours.astype(np.float64) - theirs)
                largest = float(np.where(np.isnan(gap), np.inf, gap).max(initial=0)) / scale
                worst = max(worst, largest)
                if largest > MAX_DIFFERENCE:
                    return _words(run, first, what, item, largest), worst
    return None, worst


def _words(run: Run, first: int, what: str, item: StateField, largest: float) -> str:
    size = run.step_of(first)[1] - first + 1
    return (
        f"{run.label}: after the step of positions {first}..{first + size - 1}, the {what} in {item} differs"
        f" from what the unmodified model's own cache holds by {largest:.2g} of its largest number;"
        f" {MAX_DIFFERENCE:g} is allowed\nlogits may not show it for many tokens: look at when the slot is"
        " written, and at which columns of a convolution it holds (all but the oldest)"
    )


def _pairs(
    layer: Kept, after: Image, number: int, step: int, arrays: Mapping[str, NDArray[Any]]
) -> Iterator[tuple[str, StateField, NDArray[np.float32], NDArray[np.float32]]]:
    if layer.state is not None:
        theirs = arrays[f"state_{number}_{layer.layer}"][step]
        yield "recurrent state", layer.state, layer.state.floats(after), theirs
    at = 0
    for item in layer.conv:
        ours = item.floats(after).reshape(-1, item.shape[-1])
        theirs = arrays[f"conv_{number}_{layer.layer}"][step][at : at + len(ours)]
        at += len(ours)
        yield "state of the convolution", item, ours, theirs

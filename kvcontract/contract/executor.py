"""What the engine asks of code that runs a model: typing only.

An executor is handed views of the arenas once (`bind`), then one `Step` at a time.  A plugin may bring its
own, or describe by `HfLayers` how the layers of a Hugging Face model map onto its arenas and get the generic
one.  An executor that also implements `OwnsArenas` brings the memory; else it is allocated for it.  One that
also implements `TakesAdapters` runs requests through adapters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

FieldRef = tuple[str, str]
"""(arena name, field name)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step of an executor can take.

    Attributes:
        max_requests: requests in one step.
        max_tokens: tokens in one step.
        max_context_tokens: longest context of a request.
        vocab_size: width of the logits; token ids lie below it.
        placeholder_ids: token ids that stand for what it cannot take (an image, a sound): refused in prompts.
    """

    max_requests: int
    max_tokens: int
    max_context_tokens: int
    vocab_size: int
    placeholder_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass over a mixed batch of prefill chunks and decodes; `b` requests, `n` tokens.

    Attributes:
        token_ids: int64[n], requests one after another.
        positions: int64[n], position of each token in its request.
        query_start: int64[b + 1], where each request's tokens begin in `token_ids`.
        context_len: int64[b], tokens of each request already in the cache before this step.
        page_table: per space key, int32[b, p]: block ids covering exactly context and step (B17); 0 pads.
        slots: per bounded group, int32[b]: the live slot of each request, from 1 on, none of them twice.
        want: int64[k], rows of `token_ids` whose logits are wanted.
        adapters: for each request the name of its adapter, or None; empty where no request has one.
        snapshots: per bounded group, int64[m, 3]: a request's number, a position in it, and a slot: there the
            state after the token before that position is written.  Only for executors that can
            (`EmitsSnapshots`).
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    query_start: NDArray[np.int64]
    context_len: NDArray[np.int64]
    page_table: Mapping[str, NDArray[np.int32]]
    want: NDArray[np.int64]
    slots: Mapping[str, NDArray[np.int32]] = field(default_factory=dict)
    adapters: tuple[str | None, ...] = ()
    snapshots: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step produced.

    Attributes:
        logits: [k, vocab], one row per entry of `Step.want`.
        drafts: proposed tokens per wanted row, or None.
    """

    logits: Tensor
    drafts: Any | None = None


class Executor(Protocol):
    """Runs a model over bound arenas; writes the state of exactly the step's positions, and no other byte.

    A request whose context is empty begins with empty bounded state: its slot is not read, whatever lies
    there.  Any other slot is read as it is: a restored one is never cleared first (E5).
    """

    @property
    def limits(self) -> Limits:
        """What one step can take."""
        ...

    def bind(self, views: Mapping[FieldRef, Tensor]) -> None:
        """Receive the arenas: per field a tensor [blocks, tokens, ...] with the field's axes in order.

        A bounded group's fields are [slots, ...]: they have no tokens.  Called once, before the first step;
        the memory stays the caller's.
        """
        ...

    def forward(self, step: Step) -> StepOutput:
        """Run one step."""
        ...


@runtime_checkable
class OwnsArenas(Protocol):
    """An executor whose kernels want memory of their own making, in any order and at any stride."""

    def arenas(self, blocks: Mapping[str, int]) -> Mapping[str, Tensor]:
        """The memory of every arena, by its name; called once, before `bind`.

        Each is one tensor [blocks, ...]: a block contiguous and as declared, blocks at any constant distance,
        of the fields' dtype or uint8.  What does not hold every block is refused (KVC-LAYOUT-05).

        Args:
            blocks: needed, by space key; block 0, the padding, is counted.
        """
        ...


@runtime_checkable
class EmitsSnapshots(Protocol):
    """An executor whose kernels can write a state at positions inside a step: nothing is cut for it (F1)."""

    @property
    def emits(self) -> Mapping[str, int]:
        """Bounded groups that it can do so for: at multiples of how many tokens, counted from position 0."""
        ...


class Adapter(Protocol):
    """What an executor has read of an adapter's folder; the rest of it is the executor's own."""

    @property
    def digest(self) -> str:
        """Of everything in it that changes a number: equal digests compute equal state."""
        ...


@runtime_checkable
class TakesAdapters(Protocol):
    """An executor that runs each request of a step through an adapter (LoRA) of its own, if it names one.

    An adapter changes what is written into the arenas; that it never meets another's pages is the engine's to
    see to, by the scope of its requests (D1).
    """

    def read_adapter(self, folder: Path) -> Adapter:
        """Read and judge an adapter's folder; changes nothing.  Called on any thread, beside steps.

        Raises:
            UsageFault: it cannot be served; every fault is named.
        """
        ...

    def load_adapter(self, name: str, adapter: Any) -> None:
        """Serve what `read_adapter` gave under a name that is not taken.  No step is running."""
        ...

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter.  No step is running."""
        ...


@dataclass(frozen=True, slots=True)
class Attention:
    """Where one attention layer of a Hugging Face model keeps what its `Cache` is handed.

    Attributes:
        keys: field for the first tensor of `Cache.update` (keys, or the MLA latent).
        values: field for the second (values, or the rotated rope key).
        index_keys: field for the tensor of `Cache.update_indexer`, if the layer has an indexer.
    """

    keys: FieldRef
    values: FieldRef
    index_keys: FieldRef | None = None

    @property
    def refs(self) -> tuple[FieldRef, ...]:
        """The fields that are named."""
        return tuple(ref for ref in (self.keys, self.values, self.index_keys) if ref is not None)


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Where one linear-attention layer of a Hugging Face model keeps its state: a slot of a bounded group.

    All fields belong to one group.  The axes of a field lie in the order of the model's own tensor.

    Attributes:
        state: field for the tensor of `Cache.update_recurrent_state`, without its batch axis; None where the
            layer keeps none.  Its dtype is what the model keeps (often float32 beside a bfloat16 model).
        conv: fields for the tensor of `Cache.update_conv_state`, [channels, columns]: its channels one field
            after another.  The columns are the last axis of each, one fewer than the kernel is wide: a
            Hugging Face cache holds one more, its oldest, which nothing reads.
    """

    state: FieldRef | None = None
    conv: tuple[FieldRef, ...] = ()

    @property
    def refs(self) -> tuple[FieldRef, ...]:
        """The fields that are named."""
        return self.conv if self.state is None else (self.state, *self.conv)


@dataclass(frozen=True, slots=True)
class Combined:
    """A layer that keeps both: attention and linear-attention state side by side.

    Attributes:
        attention: where its keys and values lie.
        recurrent: where its state does.
    """

    attention: Attention
    recurrent: Recurrent

    @property
    def refs(self) -> tuple[FieldRef, ...]:
        """The fields that are named."""
        return (*self.attention.refs, *self.recurrent.refs)


@dataclass(frozen=True, slots=True)
class HfLayers:
    """Ask for the generic executor: layer index -> where its state lives.

    Attributes:
        layers: those that keep nothing of their own (they share another's, or are stateless) are left out.
        placeholder_ids: token ids that stand for an image or a sound.  The generic executor takes text alone,
            so prompts that hold one are refused.
    """

    layers: Mapping[int, Attention | Recurrent | Combined]
    placeholder_ids: frozenset[int] = frozenset()

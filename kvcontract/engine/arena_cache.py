"""A Hugging Face `Cache` whose bytes lie in our arenas.

Attention modules hand each layer of a `Cache` the new rows and get back all rows they read.  So a layer that
writes the new rows into the pages of a request, and gathers the rows it reaches back from them, serves any
attention, whatever it keeps: keys and values, an MLA latent with its rotated key, index keys.  The modules
stay untouched, and nothing is kept outside the arenas.

The parts: `ArenaField` moves rows of one field; `Rows` says where the rows of one request lie, once for all
layers of a space; a cache layer joins them.  Another kind of layer is another small class beside
`PagedLayer`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcontract.contract.errors import PluginFault, require
from kvcontract.contract.model import TOKEN_AXIS, Field, Reach

require("transformers", "hf")
from transformers.cache_utils import CacheLayerMixin, DummyLayer  # noqa: E402 - after the extra was asked for

HEAD_AXIS: Final = "head"
"""The axis that stands for the heads of a Hugging Face tensor; a field without it has one head."""

_BITS_OF: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the rows of one request lie in one space, for one step.

    Attributes:
        context_len: tokens in the cache before the step.
        tokens: tokens of the step.
        first: position of the first row that is read back.
        write: (blocks, rows in the block), int64[tokens] each.
        read: the same for positions `first` to the end of the step.
    """

    context_len: int
    tokens: int
    first: int
    write: tuple[Tensor, Tensor]
    read: tuple[Tensor, Tensor]

    @classmethod
    def place(
        cls,
        pages: NDArray[np.int32],
        *,
        context_len: int,
        tokens: int,
        reach: Reach,
        page_tokens: int,
        device: torch.device,
    ) -> Rows:
        """Work out the rows of one request.

        Args:
            pages: int32[p], block ids by page of the request.
            context_len: tokens in the cache before the step.
            tokens: tokens of the step.
            reach: which past tokens are read.
            page_tokens: tokens of a page.
            device: of the arenas.
        """
        spans = reach.needed(context_len)
        first = spans[0][0] if spans else context_len
        positions = np.arange(first, context_len + tokens)
        blocks = torch.from_numpy(pages[positions // page_tokens].astype(np.int64)).to(device)
        rows = torch.from_numpy(positions % page_tokens).to(device)
        new = slice(context_len - first, None)
        return cls(context_len, tokens, first, (blocks[new], rows[new]), (blocks, rows))


class ArenaField:
    """One bound field: moves rows between an arena and the layout that attention modules use.

    Args:
        view: [blocks, tokens, ...], the field's axes in declared order after those two.
        field: its declaration, which names the axes.
        arena: whose it is.
    """

    def __init__(self, view: Tensor, field: Field, arena: str) -> None:
        self._name = f"{field.name} of arena {arena}"
        self._axes = axes = [axis for axis in field.axes if axis != TOKEN_AXIS]
        self._dtype = view.dtype
        # Bits, not numbers: index operations exist for every integer width and keep NaN payloads.
        self._bits = view.view(_BITS_OF[view.element_size()])
        self._shape = tuple(view.shape[2:])
        self._heads_first = [axes.index(HEAD_AXIS)] if HEAD_AXIS in axes else []
        self._rest = [index for index in range(len(axes)) if index not in self._heads_first]
        order = [*self._heads_first, *self._rest]
        self._back = [order.index(index) for index in range(len(axes))]

    @property
    def device(self) -> torch.device:
        """Where the arena lies."""
        return self._bits.device

    def write(self, rows: Rows, states: Tensor) -> None:
        """Write the step's rows.

        Args:
            rows: where they lie.
            states: [heads, n, width]; converted to the field's dtype, which is what was declared to be kept.
        """
        sizes = [self._shape[index] for index in self._rest]
        heads = [states.shape[0]] if self._heads_first else []
        width = int(np.prod(sizes))
        if states.shape[1:] != (rows.tokens, width) or [self._shape[i] for i in self._heads_first] != heads:
            axes = dict(zip(self._axes, self._shape, strict=True))
            raise PluginFault(
                f"field {self._name}: of {rows.tokens} tokens the model hands over [heads, tokens, width] ="
                f" {list(states.shape)}; the field's axes are {axes}. Is it declared with other axes than the"
                " model's tensor, or has the map exchanged two fields? (sizes are those of the config run)"
            )
        by_token = states.transpose(0, 1).to(self._dtype).reshape(rows.tokens, *heads, *sizes)
        ordered = by_token.permute(0, *(1 + index for index in self._back)).contiguous()
        self._bits.index_put_(rows.write, ordered.view(self._bits.dtype))

    def read(self, rows: Rows, dtype: torch.dtype) -> Tensor:
        """Gather the rows a step reads, its own included: [heads, rows, width]."""
        found = self._bits[rows.read].view(self._dtype)
        order = [*self._heads_first, *self._rest]
        by_token = found.permute(0, *(1 + index for index in order)).flatten(1 + len(self._heads_first))
        with_heads = by_token if self._heads_first else by_token.unsqueeze(1)
        return with_heads.transpose(0, 1).to(dtype).contiguous()


class PagedLayer(CacheLayerMixin):  # type: ignore[misc] # transformers is untyped here
    """One attention layer of one request: new rows go to its pages, reached rows come back from them.

    Args:
        rows: where the request's rows lie in the space of the layer's group.
        reach: of that group.
        keys: field for the first tensor of `update`.
        values: field for the second.
    """

    def __init__(self, rows: Rows, reach: Reach, keys: ArenaField, values: ArenaField) -> None:
        super().__init__()
        self._rows = rows
        self._fields = keys, values
        self._written = False
        self.is_initialized = True
        self.is_sliding = reach.kind != "full"

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the arenas exist."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write [1, heads, n, width] twice; return the same for every row that is reached."""
        found = []
        for field, states in zip(self._fields, (key_states, value_states), strict=True):
            field.write(self._rows, states[0])
            found.append(field.read(self._rows, states.dtype).unsqueeze(0))
        self._written = True
        return found[0], found[1]

    def get_seq_length(self) -> int:
        """Tokens kept so far, those of this step included once they are written."""
        return self._rows.context_len + (self._rows.tokens if self._written else 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(rows that `update` returns, position of the first of them)."""
        return self._rows.context_len - self._rows.first + query_length, self._rows.first

    def get_max_length(self) -> int:
        """No limit of its own."""
        return -1


class IndexedLayer(PagedLayer):
    """An attention layer that also keeps the keys of a sparse-attention indexer.

    Args:
        rows: as for `PagedLayer`.
        reach: as for `PagedLayer`.
        keys: as for `PagedLayer`.
        values: as for `PagedLayer`.
        index_rows: where rows lie in the space of the index keys' group.
        index_keys: field for the tensor of `update_indexer`.
    """

    def __init__(
        self,
        rows: Rows,
        reach: Reach,
        keys: ArenaField,
        values: ArenaField,
        *,
        index_rows: Rows,
        index_keys: ArenaField,
    ) -> None:
        super().__init__(rows, reach, keys, values)
        self._index = index_rows, index_keys

    def update_indexer(self, states: Tensor) -> Tensor:
        """Write [1, n, width]; return [1, rows, width]."""
        rows, field = self._index
        field.write(rows, states)
        return field.read(rows, states.dtype)


class UnmappedLayer(DummyLayer):  # type: ignore[misc] # transformers is untyped here
    """A layer that a plugin's map leaves out: it keeps nothing, and says so if the model disagrees.

    Args:
        index: of the layer in the model.
    """

    def __init__(self, index: int) -> None:
        super().__init__()
        self._index = index

    def update(self, key_states: Tensor, value_states: Tensor, *_args: object, **_kwargs: object) -> None:
        """Refuse: dropping the rows would be silent corruption."""
        raise PluginFault(
            f"layer {self._index} keeps rows of {list(key_states.shape)} and {list(value_states.shape)}, but"
            " the plugin's HfLayers maps it to no arena: add it"
        )

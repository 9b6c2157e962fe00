"""Cache layers of linear attention whose state lies in a slot of a bounded group.

A pass works on copies: they are read from the slot when it begins, and written back by `store` when it has
succeeded.  So whatever the model does to its own tensors, in place or not, the slot holds the state of a step
boundary.  A request that begins has no state: its slot is not read, and what an earlier occupant left there
does not matter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcontract.contract.errors import PluginFault, require
from kvcontract.contract.model import Reach
from kvcontract.engine.arena_cache import ArenaField, PagedLayer, Rows

require("transformers", "hf")
from transformers.cache_utils import LinearAttentionLayer  # noqa: E402 - after the extra was asked for


@dataclass(frozen=True, slots=True)
class Slot:
    """One layer's fields at one slot, seen as the tensors that a linear-attention module works on.

    Attributes:
        layer: index of the layer, for messages.
        state: the recurrent state; None where the layer keeps none.
        conv: parts of the convolution's state, [..., columns] each, one after another along the channels.
        dtype: of the module's activations, and so of the convolution's state.
    """

    layer: int
    state: Tensor | None
    conv: tuple[Tensor, ...]
    dtype: torch.dtype

    @property
    def conv_shape(self) -> tuple[int, int] | None:
        """[channels, columns] as the module keeps them; None where the layer keeps none."""
        if not self.conv:
            return None
        return sum(math.prod(part.shape[:-1]) for part in self.conv), self.conv[0].shape[-1] + 1

    def read_state(self) -> Tensor | None:
        """A copy of the recurrent state, [1, ...]."""
        return None if self.state is None else self.state.clone().unsqueeze(0)

    def read_conv(self) -> Tensor | None:
        """A copy of the convolution's state, [1, channels, columns]; the oldest column, never read, is 0."""
        if not self.conv:
            return None
        kept = torch.cat([part.flatten(0, -2) for part in self.conv]).to(self.dtype)
        return torch.nn.functional.pad(kept, (1, 0)).unsqueeze(0)

    def write(self, state: Tensor | None, conv: Tensor | None) -> None:
        """Write both, batch axes and the oldest column left out; converted to the fields' dtypes."""
        if self.state is not None and state is not None:
            self.state.copy_(state[0])
        if conv is not None:
            channels = [math.prod(part.shape[:-1]) for part in self.conv]
            for part, rows in zip(self.conv, torch.split(conv[0, :, 1:], channels), strict=True):
                part.copy_(rows.reshape(part.shape))


class SlotLayer(LinearAttentionLayer):  # type: ignore[misc] # transformers is untyped here
    """One linear-attention layer of one request, good for one pass.

    Args:
        slot: where its state lies.
        context_len: tokens of the request before the step; with none, the slot is not read.
    """

    def __init__(self, slot: Slot, context_len: int) -> None:
        super().__init__()
        self._slot = slot
        if context_len:
            self._begin(slot.read_state(), slot.read_conv())

    def _begin(self, state: Tensor | None, conv: Tensor | None) -> None:
        # What transformers keeps beside its tensors is state too, and follows from the context's length.
        self.has_previous_state[0] = True
        if state is not None:
            self.recurrent_states[0] = state
            self.is_recurrent_states_initialized[0] = True
        if conv is not None:
            self.conv_states[0] = conv
            self.conv_kernel_size[0] = conv.shape[-1]
            self.is_conv_states_initialized[0] = True

    def lazy_initialization(
        self,
        conv_states: Tensor | None = None,
        recurrent_states: Tensor | None = None,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> None:
        """Judge the first tensors of a kind, and make room for them.

        Raises:
            PluginFault: the declaration has other fields than the model keeps.
        """
        slot, faults = self._slot, []
        if state_idx:
            faults.append(f"layer {slot.layer} keeps state number {state_idx + 1}: one a layer is served")
        if recurrent_states is not None:
            found, declared = tuple(recurrent_states.shape[1:]), slot.state
            if declared is None or found != tuple(declared.shape):
                expected = "no field" if declared is None else list(declared.shape)
                faults.append(f"layer {slot.layer} keeps a state of {list(found)}; declared: {expected}")
        if conv_states is not None:
            shape = conv_states.shape[1], conv_kernel_size or conv_states.shape[-1]
            if slot.conv_shape != shape:
                own = slot.conv_shape
                expected = "no field" if own is None else [own[0], own[1] - 1]
                faults.append(
                    f"layer {slot.layer} convolves {shape[0]} channels by a kernel of {shape[1]}, which is"
                    f" [{shape[0]}, {shape[1] - 1}] to keep; declared: {expected}"
                )
        if faults:
            raise PluginFault("; ".join(faults))
        if recurrent_states is not None:
            self.recurrent_states[0] = torch.empty_like(recurrent_states)
            self.is_recurrent_states_initialized[0] = True
        if conv_states is not None:
            self.conv_kernel_size[0] = shape[1]
            self.conv_states[0] = conv_states.new_empty((*conv_states.shape[:-1], shape[1]))
            self.is_conv_states_initialized[0] = True

    def store(self) -> None:
        """Write the state back into the slot, once the pass has succeeded.

        Raises:
            PluginFault: the model kept nothing where the declaration has a field.
        """
        state, conv = self.recurrent_states[0], self.conv_states[0]
        missing = [
            name
            for name, declared, found in (
                ("recurrent", self._slot.state is not None, state),
                ("convolution", bool(self._slot.conv), conv),
            )
            if declared and found is None
        ]
        if missing:
            raise PluginFault(f"layer {self._slot.layer} keeps no {' and no '.join(missing)} state, declared")
        self._slot.write(state, conv)


class CombinedLayer(SlotLayer, PagedLayer):
    """A layer that keeps attention rows and linear-attention state at once.

    Args:
        slot: as for `SlotLayer`.
        rows: as for `PagedLayer`.
        reach: as for `PagedLayer`.
        keys: as for `PagedLayer`.
        values: as for `PagedLayer`.
    """

    # As its attention half is: it decides whether masks are made for fixed shapes.
    is_compileable = False

    def __init__(self, slot: Slot, rows: Rows, reach: Reach, keys: ArenaField, values: ArenaField) -> None:
        SlotLayer.__init__(self, slot, rows.context_len)
        PagedLayer.__init__(self, rows, reach, keys, values)

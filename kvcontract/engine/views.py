"""What an executor is handed: a binding's memory, seen field by field."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from kvcontract.contract.executor import FieldRef
from kvcontract.contract.model import TOKEN_AXIS
from kvcontract.memory.binding import Binding


def executor_views(bindings: Mapping[str, Binding]) -> dict[FieldRef, Tensor]:
    """Per field [blocks, tokens, ...]: the binding's view with the token axis moved behind the blocks."""
    views: dict[FieldRef, Tensor] = {}
    for binding in bindings.values():
        axes = {
            (arena.name, field.name): field.axes for arena in binding.space.arenas for field in arena.fields
        }
        for ref, view in binding.views.items():
            where = axes[ref].index(TOKEN_AXIS) if TOKEN_AXIS in axes[ref] else 0
            views[ref] = view.movedim(1 + where, 1)
    return views

"""An executor that brings its own memory, layer-first: held to the declaration, golden all the same."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from tiny_models import VOCAB, Tiny, tiny
from torch import Tensor

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.executor import FieldRef, Limits, OwnsArenas, Step, StepOutput
from kvcontract.contract.layout import layout
from kvcontract.engine.build import EngineLimits, assemble, bind_memory
from kvcontract.engine.hf import HfExecutor
from kvcontract.engine.request import Result

PAGES = 12


class LayerFirst:
    """The generic executor over one tensor a layer, blocks further apart than they are long."""

    def __init__(self, case: Tiny, *, short: int = 0, foreign: bool = False) -> None:
        self._inner = HfExecutor(case.model, case.layers, case.kv)
        self._kv = case.kv
        self._short = short
        self._foreign = foreign
        self.tensors: dict[str, Tensor] = {}

    @property
    def limits(self) -> Limits:
        """The generic executor's."""
        return self._inner.limits

    def bind(self, views: Mapping[FieldRef, Tensor]) -> None:
        """Pass on."""
        self._inner.bind(views)

    def forward(self, step: Step) -> StepOutput:
        """Pass on."""
        return self._inner.forward(step)

    def arenas(self, blocks: Mapping[str, int]) -> Mapping[str, Tensor]:
        """One tensor a layer, of which a block uses all but the last 64 bytes of each row."""
        for space in layout(self._kv).spaces:
            for arena in space.arenas:
                wide = torch.full((blocks[space.key] - self._short, arena.content_bytes + 64), 255).byte()
                self.tensors[arena.name] = wide[:, : arena.content_bytes]
        extra = {"scratch": torch.zeros(PAGES, 8)} if self._foreign else {}
        return {**self.tensors, **extra}


def run(case: Tiny, executor: HfExecutor | LayerFirst) -> list[Result]:
    """A prompt twice: cold, then after a hit on the device."""
    tokens = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    limits = EngineLimits(max_chunk_tokens=16)
    with assemble(case.kv, executor, pages=PAGES, limits=limits) as parts:
        found = []
        for _ in range(2):
            request = parts.engine.submit(tokens, 4, capture_logits="all")
            found.append(parts.engine.run()[request])
    return found


def test_own_layer_first_memory_gives_equal_logits() -> None:
    """Golden equality holds over memory of the executor's own, cold and after a hit; it is really used."""
    case = tiny("qwen3")
    own = LayerFirst(case)
    assert isinstance(own, OwnsArenas)
    plain = HfExecutor(case.model, case.layers, case.kv)
    assert not isinstance(plain, OwnsArenas)
    for ours, theirs in zip(run(case, own), run(case, plain), strict=True):
        assert (ours.tokens, ours.hit_tokens) == (theirs.tokens, theirs.hit_tokens)
        assert ours.logits is not None
        assert theirs.logits is not None
        assert torch.equal(ours.logits, theirs.logits)
    assert all(bool((tensor[1:] != 255).any()) for tensor in own.tensors.values())


def test_b22_own_memory_a_page_short_is_refused_with_the_sum() -> None:
    """Fewer blocks than the pool has pages: refused when bound, arena and clause named (B22, E8)."""
    case = tiny("qwen3")
    with pytest.raises(UsageFault, match=r"(?s)KVC-LAYOUT-05.*layer-0 needs 12 blocks.*holds 11 blocks"):
        assemble(case.kv, LayerFirst(case, short=1), pages=PAGES)


def test_own_memory_for_undeclared_arenas_is_refused() -> None:
    """Memory for an arena that nobody declared is a misunderstanding, not a gift."""
    case = tiny("qwen3")
    with pytest.raises(UsageFault, match=r"scratch: not declared \[KVC-LAYOUT-05\]"):
        bind_memory(case.kv, LayerFirst(case, foreign=True), {"full": PAGES})

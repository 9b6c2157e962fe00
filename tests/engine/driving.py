"""Drives a generic executor directly: requests with shuffled pages and slots over poisoned arenas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from tiny_models import Tiny
from torch import Tensor
from transformers import DynamicCache

from kvcontract.contract.executor import FieldRef, Recurrent, Step
from kvcontract.contract.layout import layout
from kvcontract.engine.hf import HfExecutor
from kvcontract.engine.views import executor_views
from kvcontract.memory.binding import Binding

POISON = 0xFF
"""Every byte of memory that nobody wrote: NaN in every dtype."""


@dataclass
class Driven:
    """One request: where its state lies, and its context so far."""

    pages: dict[str, list[int]]
    slots: dict[str, int]
    context: int = 0


@dataclass
class Rig:
    """An executor over poisoned memory, and places that nobody has taken yet.

    Attributes:
        case: model, declaration and map.
        runner: the executor, bound.
        bindings: the memory, by space.
    """

    case: Tiny
    blocks: int = 60
    slots: int = 9
    seed: int = 5
    bindings: dict[str, Binding] = field(init=False)
    runner: HfExecutor = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        spaces = layout(self.case.kv).spaces
        count = {space.key: self.blocks if space.kind == "paged" else self.slots for space in spaces}
        self.bindings = {space.key: Binding.allocate(space, count[space.key]) for space in spaces}
        for binding in self.bindings.values():
            next(iter(binding.arenas.values())).storage.fill_(POISON)
        self.free = {key: rng.permutation(np.arange(1, total)).tolist() for key, total in count.items()}
        self.views: dict[FieldRef, Tensor] = executor_views(self.bindings)
        self.runner = HfExecutor(self.case.model, self.case.layers, self.case.kv)
        self.runner.bind(self.views)

    def request(self, tokens: int) -> Driven:
        """A request with room for some tokens."""
        count = -(-tokens // self.case.kv.page_tokens)
        pages = {
            space.key: [self.free[space.key].pop() for _ in range(count)]
            for space in layout(self.case.kv).spaces
            if space.kind == "paged"
        }
        bounded = [group.name for group in self.case.kv.groups if group.kind == "bounded"]
        return Driven(pages, {name: self.free[f"slots-{name}"].pop() for name in bounded})

    def step(self, requests: Sequence[Driven], chunks: Sequence[Tensor]) -> Step:
        """One step that wants every row; pages behind a window stand as 0."""
        sizes = [len(chunk) for chunk in chunks]
        ends = [request.context + size for request, size in zip(requests, sizes, strict=True)]
        page_tokens = self.case.kv.page_tokens
        reaches = {group.reach.key: group.reach for group in self.case.kv.groups if group.kind == "paged"}
        tables = {}
        for key, reach in reaches.items():
            table = np.zeros((len(requests), max(-(-end // page_tokens) for end in ends)), np.int32)
            for row, (request, end) in enumerate(zip(requests, ends, strict=True)):
                for page in range(-(-end // page_tokens)):
                    if not reach.dead(page, page_tokens, request.context):
                        table[row, page] = request.pages[key][page]
            tables[key] = table
        slots = {
            name: np.array([request.slots[name] for request in requests], np.int32)
            for name in requests[0].slots
        }
        positions = [np.arange(request.context, end) for request, end in zip(requests, ends, strict=True)]
        return Step(
            token_ids=torch.cat(list(chunks)).numpy(),
            positions=np.concatenate(positions),
            query_start=np.cumsum([0, *sizes]),
            context_len=np.array([request.context for request in requests]),
            page_table=tables,
            want=np.arange(sum(sizes)),
            slots=slots,
        )

    def run(self, requests: Sequence[Driven], chunks: Sequence[Tensor]) -> list[Tensor]:
        """Logits [n, vocab] of each request's chunk; the contexts advance."""
        logits = self.runner.forward(self.step(requests, chunks)).logits
        sizes = [len(chunk) for chunk in chunks]
        for request, size in zip(requests, sizes, strict=True):
            request.context += size
        return list(logits.split(sizes))

    def prefill(self, request: Driven, tokens: Tensor, split: Sequence[int]) -> list[Tensor]:
        """Run a request alone through a split of its next tokens."""
        found, begin = [], 0
        for size in split:
            found += self.run([request], [tokens[begin : begin + size]])
            begin += size
        return found

    def poison_dead(self, request: Driven) -> int:
        """Poison what no later step of a request may read; how many pages that was."""
        poisoned = 0
        page_tokens = self.case.kv.page_tokens
        for group in self.case.kv.groups:
            if group.kind != "paged":
                continue
            for page, block in enumerate(request.pages[group.reach.key]):
                if group.reach.dead(page, page_tokens, request.context):
                    fill(self.bindings[group.reach.key], block)
                    poisoned += 1
        return poisoned

    def copy(self, source: Driven, target: Driven) -> None:
        """Copy everything one request holds to another's pages and slots."""
        for key, pages in source.pages.items():
            self.bindings[key].copy_blocks(zip(pages, target.pages[key], strict=False))
        for name, slot in source.slots.items():
            self.bindings[f"slots-{name}"].copy_blocks([(slot, target.slots[name])])
        target.context = source.context

    def outside(self, requests: Sequence[Driven]) -> dict[tuple[str, int], Tensor]:
        """The bytes of every block and slot that none of the requests holds."""
        held = {(key, block) for r in requests for key, pages in r.pages.items() for block in pages}
        held |= {(f"slots-{name}", slot) for r in requests for name, slot in r.slots.items()}
        return {
            (key, block): content(binding, block)
            for key, binding in self.bindings.items()
            for block in range(binding.blocks)
            if (key, block) not in held
        }

    def state(self, request: Driven, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """(recurrent state, convolution state) of a layer, shaped as the model's, without the batch axis."""
        entry = self.case.layers.layers[layer]
        recurrent = entry if isinstance(entry, Recurrent) else entry.recurrent  # type: ignore[union-attr]
        slot = next(iter(request.slots.values()))
        state = None if recurrent.state is None else self.views[recurrent.state][slot]
        conv = [self.views[ref][slot].flatten(0, -2) for ref in recurrent.conv]
        return state, torch.cat(conv) if conv else None


def content(binding: Binding, block: int) -> Tensor:
    """A copy of one block's bytes, all arenas."""
    return torch.cat([view[block].reshape(-1).view(torch.uint8) for view in binding.views.values()])


def fill(binding: Binding, block: int) -> None:
    """Poison one block of every arena."""
    for view in binding.views.values():
        view[block] = (
            torch.full((), -1, dtype=torch.int8).expand(view.element_size()).clone().view(view.dtype)
        )


def same(before: dict[tuple[str, int], Tensor], after: dict[tuple[str, int], Tensor]) -> bool:
    """Whether no byte outside changed."""
    return before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


@torch.no_grad()
def reference(case: Tiny, tokens: Tensor, split: Sequence[int]) -> tuple[list[Tensor], DynamicCache]:
    """Logits of every chunk from the unmodified model with its own cache, and that cache."""
    cache = DynamicCache(config=case.model.config)
    found, begin = [], 0
    for size in split:
        output = case.model(
            input_ids=tokens[begin : begin + size].unsqueeze(0),
            position_ids=torch.arange(begin, begin + size).unsqueeze(0),
            cache=cache,
            use_cache=True,
            # The same keyword as the executor's: the matrix product over the vocabulary has one shape then.
            logits_to_keep=torch.arange(size),
        )
        found.append(output.logits[0])
        begin += size
    return found, cache


def prompt(length: int, seed: int, vocab: int) -> Tensor:
    """Random token ids."""
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed))

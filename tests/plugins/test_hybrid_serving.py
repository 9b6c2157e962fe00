"""Hybrid models served from arenas by the generic executor, against transformers' own caches, same split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from declared import config, small
from driving import Rig, fill, prompt, reference, same
from torch import Tensor

from kvcontract.contract.errors import PluginFault
from kvcontract.contract.executor import HfLayers, Recurrent
from kvcontract.engine.hf import HfExecutor

SPLIT = [70, 33, 1, 1, 64, 1, 2, 5, 1, 1]
"""Chunked prefill, then single tokens; boundaries on and off multiples of pages and kernel chunks."""


def sharing() -> dict[str, Any]:
    """A config whose last layers share keys and values of earlier ones."""
    given = config("gemma4-12b")
    given["text_config"] |= {"num_kv_shared_layers": 24}
    return given


CONFIGS = {
    "qwen35": ("qwen35", config("qwen3.5-4b")),
    "gemma4": ("gemma4", config("gemma4-12b")),
    "gemma4-sharing": ("gemma4", sharing()),
}
EVERY = [
    pytest.param(name, dtype, page_tokens, id=f"{name}-{dtype}-{page_tokens}")
    for name in CONFIGS
    for dtype in ("float32", "bfloat16")
    for page_tokens in (16, 64)
]
every = pytest.mark.parametrize(("name", "dtype", "page_tokens"), EVERY)


def made(name: str, dtype: str, page_tokens: int) -> Rig:
    """A bound executor."""
    plugin, given = CONFIGS[name]
    return Rig(small(plugin, given, dtype=dtype, page_tokens=page_tokens))


def tokens(length: int, seed: int) -> Tensor:
    """Random text."""
    return prompt(length, seed, vocab=500)


def equal_states(rig: Rig, request: Any, cache: Any) -> None:
    """Every linear layer's slot holds what the model's own cache holds."""
    for layer, entry in rig.case.layers.layers.items():
        if not isinstance(entry, Recurrent):
            continue
        state, conv = rig.state(request, layer)
        own = cache.layers[layer]
        assert state is not None
        assert conv is not None
        assert state.dtype is torch.float32
        assert torch.equal(state, own.recurrent_states[0][0])
        assert torch.equal(conv, own.conv_states[0][0, :, 1:])


@every
def test_logits_and_states_are_those_of_the_models_own_cache(name: str, dtype: str, page_tokens: int) -> None:
    """Golden gate a: no bit differs in logits or state tensors, and nothing else is written (F1)."""
    rig = made(name, dtype, page_tokens)
    text = tokens(sum(SPLIT), seed=7)
    request = rig.request(len(text))
    before = rig.outside([request])
    expected, cache = reference(rig.case, text, SPLIT)
    found = rig.prefill(request, text, SPLIT)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    equal_states(rig, request, cache)
    assert same(before, rig.outside([request]))


@every
def test_a_copied_request_continues_as_the_source(name: str, dtype: str, page_tokens: int) -> None:
    """Golden gate b: pages and slots copied at a boundary give the same bits, each going its own way (E5)."""
    rig = made(name, dtype, page_tokens)
    text = tokens(150, seed=8)
    source, target = rig.request(len(text)), rig.request(len(text))
    rig.prefill(source, text, [70, 58])
    rig.copy(source, target)
    rest = text[128:]
    cold = rig.prefill(source, rest, [9, 1, 1, 11])
    restored = rig.prefill(target, rest, [9, 1, 1, 11])
    for ours, theirs in zip(restored, cold, strict=True):
        assert torch.equal(ours, theirs)


@every
def test_mixed_batches_equal_each_request_alone(name: str, dtype: str, page_tokens: int) -> None:
    """Requests that prefill and decode in one step touch neither each other's pages nor slots."""
    rig = made(name, dtype, page_tokens)
    splits = [[40, 1, 1, 9], [1, 50, 1, 1], [13, 13, 13, 13]]
    texts = [tokens(sum(split), seed=20 + index) for index, split in enumerate(splits)]
    expected = [reference(rig.case, text, split) for text, split in zip(texts, splits, strict=True)]
    requests = [rig.request(len(text)) for text in texts]
    before = rig.outside(requests)
    for turn in range(4):
        chunks = [
            text[request.context : request.context + split[turn]]
            for text, request, split in zip(texts, requests, splits, strict=True)
        ]
        for ours, (logits, _) in zip(rig.run(requests, chunks), expected, strict=True):
            assert torch.equal(ours, logits[turn])
    for request, (_, cache) in zip(requests, expected, strict=True):
        equal_states(rig, request, cache)
    assert same(before, rig.outside(requests))


@every
def test_an_earlier_occupant_does_not_matter(name: str, dtype: str, page_tokens: int) -> None:
    """A request that begins reads nothing of what lies in its pages and slots, NaN or another's state."""
    rig = made(name, dtype, page_tokens)
    text = tokens(30, seed=9)
    request = rig.request(80)
    first = rig.prefill(request, text, [3, 1, 26])
    rig.prefill(request, tokens(50, seed=10), [50])
    request.context = 0
    again = rig.prefill(request, text, [3, 1, 26])
    for ours, theirs in zip(again, first, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gemma4", "gemma4-sharing"])
@pytest.mark.parametrize("page_tokens", [16, 64])
def test_what_lies_behind_the_window_is_never_read(name: str, dtype: str, page_tokens: int) -> None:
    """Dead pages stand as 0 in the table and hold NaN: the same bits come out."""
    rig = made(name, dtype, page_tokens)
    text = tokens(sum(SPLIT), seed=7)
    request = rig.request(len(text))
    expected, _ = reference(rig.case, text, SPLIT)
    poisoned, begin = 0, 0
    for size, theirs in zip(SPLIT, expected, strict=True):
        poisoned += rig.poison_dead(request)
        fill(rig.bindings["window-32"], 0)  # what the table's zeros point to
        [ours] = rig.run([request], [text[begin : begin + size]])
        begin += size
        assert torch.equal(ours, theirs)
    assert poisoned


def test_a_lost_state_would_be_seen() -> None:
    """The small model's decays are slow enough: a slot that is zeroed moves logits far more than rounding."""
    rig = made("qwen35", "float32", 16)
    text = tokens(120, seed=7)
    kept, lost = rig.request(len(text)), rig.request(len(text))
    rig.prefill(kept, text, [100])
    rig.copy(kept, lost)
    for view in rig.bindings["slots-gdn"].views.values():
        view[lost.slots["gdn"]].zero_()
    [ours], [theirs] = (rig.prefill(request, text[100:], [20]) for request in (kept, lost))
    assert ((ours - theirs).abs().amax(-1) > 0.1).all()


@pytest.mark.parametrize("cut", [64, 128, 192])
def test_a_prefill_may_be_cut_between_chunks_of_the_kernel(cut: int) -> None:
    """At multiples of the declared boundary a cut changes no bit, in the precision that models are run in."""
    rig = made("qwen35", "bfloat16", 16)
    group = rig.case.kv.group("gdn")
    assert group.boundary_tokens is not None
    assert cut % group.boundary_tokens == 0
    text = tokens(250, seed=7)
    whole, parts = rig.request(len(text)), rig.request(len(text))
    [logits] = rig.prefill(whole, text, [250])
    assert torch.equal(torch.cat(rig.prefill(parts, text, [cut, 250 - cut])), logits)
    for layer in range(3):
        for ours, theirs in zip(rig.state(parts, layer), rig.state(whole, layer), strict=True):
            assert torch.equal(ours, theirs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("qwen35", ["gdn", "gdn", "gdn", "kv"]),
        ("gemma4", [*["win"] * 5, "full"]),
        ("gemma4-sharing", [*["win"] * 5, "full", *["none"] * 6]),
    ],
)
def test_small_models_have_every_kind_of_layer(name: str, kept: list[str]) -> None:
    """One full period, and where layers share, one of those that keep nothing."""
    plugin, given = CONFIGS[name]
    case = small(plugin, given, dtype="float32", page_tokens=16)
    groups = {arena.name: arena.group for arena in case.kv.arenas}
    entries = [case.layers.layers.get(i) for i in range(len(kept))]
    assert [groups[entry.refs[0][0]] if entry else "none" for entry in entries] == kept
    assert case.model.config.get_text_config().num_hidden_layers == len(kept)


def test_layers_that_share_are_not_mapped() -> None:
    """A layer that keeps nothing of its own has no arena to be mapped to; left out, all is well."""
    case = small(*CONFIGS["gemma4-sharing"], dtype="float32", page_tokens=16)
    entries = {**case.layers.layers, 7: case.layers.layers[0]}
    with pytest.raises(PluginFault, match="layer 7 keeps nothing of its own, but HfLayers maps it"):
        HfExecutor(case.model, HfLayers(entries), case.kv)

"""The generic executor against unmodified transformers models with their own caches, same split."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from tiny_models import CONFIGS, VOCAB, Tiny, bind_poisoned, declare, tiny
from torch import Tensor
from transformers import DynamicCache

from kvcontract.contract.errors import InternalFault, PluginFault, UsageFault
from kvcontract.contract.executor import Attention, HfLayers, Step
from kvcontract.contract.model import TOKEN_AXIS, Full, Group
from kvcontract.engine.checkpoint import random_model
from kvcontract.engine.hf import HfExecutor

BLOCKS = 40
EXACT = ["qwen3", "gemma3", "deepseek_v3", "deepseek_v32"]
# Chunked prefill, then single tokens; no boundary falls on a multiple of either page size.
SPLIT = [1, 17, 9, 8, 1, 1, 1, 3, 1]


@dataclass
class Paged:
    """One request's side of the comparison: its pages per space, and its context so far."""

    pages: dict[str, list[int]]
    context: int = 0
    seen: list[Tensor] = field(default_factory=list)


def spaces_of(kv: Tiny) -> list[str]:
    """Keys of the paged spaces."""
    return list(dict.fromkeys(group.reach.key for group in kv.kv.groups))


def make_step(case: Tiny, requests: list[Paged], tokens: list[Tensor], want: list[int]) -> Step:
    """One step over some requests, page tables exactly as long as they need to be."""
    sizes = [len(chunk) for chunk in tokens]
    ends = [request.context + size for request, size in zip(requests, sizes, strict=True)]
    counts = [-(-end // case.kv.page_tokens) for end in ends]
    tables = {}
    for key in spaces_of(case):
        table = np.zeros((len(requests), max(counts)), np.int32)
        for row, (request, count) in enumerate(zip(requests, counts, strict=True)):
            table[row, :count] = request.pages[key][:count]
        tables[key] = table
    positions = [np.arange(r.context, end) for r, end in zip(requests, ends, strict=True)]
    return Step(
        token_ids=torch.cat(tokens).numpy(),
        positions=np.concatenate(positions),
        query_start=np.cumsum([0, *sizes]),
        context_len=np.array([request.context for request in requests]),
        page_table=tables,
        want=np.array(want, np.int64),
    )


def shuffled(case: Tiny, count: int, seed: int) -> Iterator[Paged]:
    """Requests with private pages in shuffled order, other ones in each space."""
    rng = np.random.default_rng(seed)
    order = {key: rng.permutation(np.arange(1, BLOCKS)) for key in spaces_of(case)}
    each = (BLOCKS - 1) // count
    for index in range(count):
        yield Paged({key: ids[index * each : (index + 1) * each].tolist() for key, ids in order.items()})


@torch.no_grad()
def reference(case: Tiny, tokens: Tensor, split: list[int]) -> list[Tensor]:
    """Logits of every position from the model's own dynamic cache."""
    cache = DynamicCache(config=case.model.config)
    found, begin = [], 0
    for size in split:
        position = torch.arange(begin, begin + size).unsqueeze(0)
        chunk = tokens[begin : begin + size].unsqueeze(0)
        # The same keyword as the executor's: the matrix product over the vocabulary has one shape then.
        output = case.model(
            input_ids=chunk, position_ids=position, cache=cache, logits_to_keep=torch.arange(size)
        )
        found.append(output.logits[0])
        begin += size
    return found


def prompt(length: int, seed: int) -> Tensor:
    """Random token ids."""
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def executor(case: Tiny) -> tuple[HfExecutor, dict[tuple[str, str], Tensor]]:
    """An executor bound to poisoned arenas."""
    made = HfExecutor(case.model, case.layers, case.kv)
    views = bind_poisoned(case.kv, BLOCKS)
    made.bind(views)
    return made, views


@pytest.mark.parametrize("page_tokens", [5, 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", EXACT)
def test_logits_are_bitwise_those_of_the_models_own_cache(name: str, dtype: str, page_tokens: int) -> None:
    """Shuffled pages, unwritten rows NaN, chunked prefill and decode: not one bit differs (golden gate a)."""
    case = tiny(name, dtype=dtype, page_tokens=page_tokens)
    runner, _ = executor(case)
    (request,) = shuffled(case, 1, seed=5)
    tokens = prompt(sum(SPLIT), seed=7)
    expected = reference(case, tokens, SPLIT)
    for size, wanted in zip(SPLIT, expected, strict=True):
        chunk = tokens[request.context : request.context + size]
        output = runner.forward(make_step(case, [request], [chunk], list(range(size))))
        request.context += size
        assert torch.isfinite(output.logits).all()
        assert torch.equal(output.logits, wanted)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_mixed_batch_equals_each_request_alone(name: str) -> None:
    """Requests in one step, one prefilling while another decodes, do not touch each other's rows."""
    case = tiny(name, page_tokens=5)
    runner, _ = executor(case)
    splits = [[13, 1, 1, 4], [1, 11, 7, 1], [3, 3, 3, 3]]
    prompts = [prompt(sum(split), seed=20 + index) for index, split in enumerate(splits)]
    expected = [reference(case, tokens, split) for tokens, split in zip(prompts, splits, strict=True)]
    requests = list(shuffled(case, 3, seed=6))
    for turn in range(4):
        sizes = [split[turn] for split in splits]
        chunks = [
            tokens[r.context : r.context + size]
            for tokens, r, size in zip(prompts, requests, sizes, strict=True)
        ]
        output = runner.forward(make_step(case, requests, chunks, list(range(sum(sizes)))))
        assert torch.equal(output.logits, torch.cat([logits[turn] for logits in expected]))
        for request, size in zip(requests, sizes, strict=True):
            request.context += size


def test_chunked_attention_agrees_with_the_models_own_cache() -> None:
    """A chunk's reach reads back only the current chunk; what lies before is masked: sums reorder."""
    case = tiny("llama4", page_tokens=4)
    runner, _ = executor(case)
    (request,) = shuffled(case, 1, seed=5)
    tokens = prompt(sum(SPLIT), seed=7)
    for size, wanted in zip(SPLIT, reference(case, tokens, SPLIT), strict=True):
        step = make_step(
            case, [request], [tokens[request.context : request.context + size]], list(range(size))
        )
        request.context += size
        assert (runner.forward(step).logits - wanted).abs().max() < 1e-5


def test_a_window_never_reads_pages_that_are_dead() -> None:
    """Pages behind the window may be given back and padded with 0: nothing reads them."""
    case = tiny("gemma3", page_tokens=5)
    runner, _ = executor(case)
    (request,) = shuffled(case, 1, seed=5)
    tokens = prompt(sum(SPLIT), seed=7)
    key = "window-7"
    for size, wanted in zip(SPLIT, reference(case, tokens, SPLIT), strict=True):
        reach = case.kv.groups[0].reach
        pages = request.pages[key]
        request.pages[key] = [
            0 if reach.dead(page, 5, request.context) else block for page, block in enumerate(pages)
        ]
        step = make_step(
            case, [request], [tokens[request.context : request.context + size]], list(range(size))
        )
        request.context += size
        assert torch.equal(runner.forward(step).logits, wanted)
    assert request.pages[key][0] == 0


@pytest.mark.parametrize("axes", [("dim", "head"), ("head", TOKEN_AXIS, "dim")])
def test_axis_order_is_honoured_by_name(axes: tuple[str, ...]) -> None:
    """Other memory orders of heads, tokens and dim hold the same numbers and give the same bits."""
    case = tiny("qwen3", page_tokens=5, axes=axes)
    runner, views = executor(case)
    plain = tiny("qwen3", page_tokens=5)
    plain_runner, plain_views = executor(plain)
    (request,) = shuffled(case, 1, seed=5)
    step = make_step(case, [request], [prompt(23, seed=7)], [0, 22])
    assert torch.equal(runner.forward(step).logits, plain_runner.forward(step).logits)
    ref, page = ("layer-1", "k"), request.pages["full"][1]
    by_head = views[ref].transpose(2, 3) if axes[0] == "dim" else views[ref]
    assert torch.equal(by_head[page], plain_views[ref][page])


def test_exactly_the_steps_rows_are_written() -> None:
    """Every byte of the arenas outside the step's positions stays as it was (B17)."""
    case = tiny("deepseek_v32", page_tokens=5)
    runner, views = executor(case)
    (request,) = shuffled(case, 1, seed=5)
    runner.forward(make_step(case, [request], [prompt(7, seed=1)], []))
    request.context = 7
    before = {ref: view.clone() for ref, view in views.items()}
    runner.forward(make_step(case, [request], [prompt(6, seed=2)], []))
    expected = {(request.pages["full"][position // 5], position % 5) for position in range(7, 13)}
    for ref, view in views.items():
        bits = view.view(torch.int32) != before[ref].view(torch.int32)
        changed = bits.flatten(2).any(-1).nonzero().tolist()
        assert {tuple(row) for row in changed} == expected


def test_a_narrower_cache_dtype_is_what_attention_reads() -> None:
    """A bfloat16 cache under a float32 model: rows of the same step are read as they are stored."""
    case = tiny("qwen3", page_tokens=5)
    kv, layers = declare("qwen3", dtype="bfloat16", page_tokens=5)
    narrow = Tiny(case.model, kv, layers)
    runner, _ = executor(narrow)
    (whole, parts) = shuffled(narrow, 2, seed=5)
    tokens = prompt(12, seed=3)
    one = runner.forward(make_step(narrow, [whole], [tokens], [11])).logits
    runner.forward(make_step(narrow, [parts], [tokens[:11]], []))
    parts.context = 11
    two = runner.forward(make_step(narrow, [parts], [tokens[11:]], [0])).logits
    narrowing = (one - reference(case, tokens, [12])[0][-1]).abs().max()
    assert narrowing > 1e-3
    assert (one - two).abs().max() < narrowing / 5


def test_want_chooses_rows_and_may_be_empty() -> None:
    """Logits come for the wanted rows alone, in order; no wanted row gives [0, vocab]."""
    case = tiny("qwen3")
    runner, _ = executor(case)
    requests = list(shuffled(case, 2, seed=5))
    chunks = [prompt(4, seed=1), prompt(5, seed=2)]
    assert runner.forward(make_step(case, requests, chunks, [3, 4, 8])).logits.shape == (3, VOCAB)
    assert runner.forward(make_step(case, requests, chunks, [])).logits.shape == (0, VOCAB)


def test_b17_a_wrong_step_is_refused_with_every_fault() -> None:
    """Page tables must cover exactly the step; all faults stand in one message, nothing is written (B17)."""
    case = tiny("qwen3", page_tokens=5)
    runner, views = executor(case)
    (request,) = shuffled(case, 1, seed=5)
    good = make_step(case, [request], [prompt(12, seed=1)], [11])
    table = good.page_table["full"]
    cases = {
        "pad with 0": {"page_table": {"full": np.append(table, [[9]], axis=1)}},
        "12 tokens need 3 of 5": {"page_table": {"full": table[:, :2]}},
        "padding but read or written": {"page_table": {"full": table * np.array([1, 0, 1], np.int32)}},
        "stands twice": {"page_table": {"full": table[:, [0, 1, 1]]}},
        f"block {BLOCKS}: expected": {"page_table": {"full": np.where(table == table[0, 2], BLOCKS, table)}},
        "the context continued": {"positions": good.positions + 1},
        "missing": {"page_table": {}},
        "ascending rows": {"want": np.array([3, 3])},
        "rise from 0 to 12": {"query_start": np.array([0, 11])},
        f"token id {VOCAB} in row 0": {"token_ids": np.full(12, VOCAB), "positions": good.positions + 1},
    }
    for message, changes in cases.items():
        with pytest.raises(InternalFault, match=message):
            runner.forward(replace(good, **changes))
    with pytest.raises(InternalFault, match=r"token id.*position 1 in row 0"):
        runner.forward(replace(good, **cases[f"token id {VOCAB} in row 0"]))
    assert all(view.isnan().all() for view in views.values())


def test_e8_views_that_do_not_fit_are_refused_all_at_once() -> None:
    """Missing, misshapen, mistyped views and unequal block counts are named together (E8)."""
    case = tiny("qwen3")
    views = bind_poisoned(case.kv, BLOCKS)
    del views["layer-0", "k"]
    views["layer-1", "k"] = views["layer-1", "k"].double()
    views["layer-1", "v"] = views["layer-1", "v"][:, :, :2]
    views["layer-2", "v"] = views["layer-2", "v"][1:]
    runner = HfExecutor(case.model, case.layers, case.kv)
    with pytest.raises(UsageFault) as fault:
        runner.bind(views)
    for part in ("layer-0.k: no view", "torch.float64", "layer-1.v: view of", "different numbers of blocks"):
        assert part in str(fault.value)
    with pytest.raises(UsageFault, match="before bind"):
        runner.forward(make_step(case, list(shuffled(case, 1, seed=1)), [prompt(2, seed=1)], []))


def test_a_map_that_does_not_fit_the_model_is_refused() -> None:
    """Left-out layers, unknown fields and a window where the model reads everything are named together."""
    case = tiny("gemma3")
    layers = dict(case.layers.layers)
    del layers[0]
    layers[7] = layers[1]
    layers[2] = Attention(("layer-1", "k"), ("layer-1", "w"))
    with pytest.raises(PluginFault) as fault:
        HfExecutor(case.model, HfLayers(layers), case.kv)
    for part in (
        "layer 0 keeps",
        "names layer 7",
        "layer-1.w: not declared",
        "layer 2 reads all earlier tokens",
    ):
        assert part in str(fault.value)


def test_a_group_may_keep_more_than_the_model_reads() -> None:
    """Sliding layers declared full give the same logits: reach is a promise to keep, not to attend."""
    case = tiny("gemma3", page_tokens=5)
    groups = tuple(Group(name=group.name, reach=Full()) for group in case.kv.groups)
    full = Tiny(case.model, case.kv.model_copy(update={"groups": groups}), case.layers)
    runner, _ = executor(full)
    (request,) = shuffled(full, 1, seed=5)
    tokens = prompt(30, seed=7)
    for size, wanted in zip([20, 10], reference(case, tokens, [20, 10]), strict=True):
        step = make_step(
            full, [request], [tokens[request.context : request.context + size]], list(range(size))
        )
        request.context += size
        assert (runner.forward(step).logits - wanted).abs().max() < 1e-5


def test_linear_state_is_not_mapped_as_attention() -> None:
    """A layer with recurrent state is no attention layer: refused by kind, never run without its state."""
    config = {
        **CONFIGS["qwen3"],
        "model_type": "qwen3_next",
        "num_key_value_heads": 2,
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    model = random_model(config, seed=1)
    kv, layers = declare("qwen3", dtype="float32", page_tokens=16)
    with pytest.raises(PluginFault, match="layer 0 keeps the state of a LinearAttentionLayer"):
        HfExecutor(model, layers, kv)

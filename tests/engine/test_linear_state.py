"""Linear-attention state in slots: what the generic executor reads, writes and refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from driving import Rig, content, prompt, reference, same
from linear_models import CONFIGS, declare, linear
from tiny_models import VOCAB, Tiny
from torch import Tensor

from kvcontract.contract.errors import InternalFault, PluginFault, UsageFault
from kvcontract.contract.executor import Attention, Combined, HfLayers, Recurrent
from kvcontract.contract.model import Arena, Axes, Group, KvModel
from kvcontract.engine.hf import HfExecutor

SPLIT = [2, 21, 1, 1, 40, 3, 1, 1]
"""The first chunk is shorter than a convolution is wide."""


@pytest.mark.parametrize("page_tokens", [5, 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_f1_logits_and_states_are_those_of_the_models_own_cache(
    name: str, dtype: str, page_tokens: int
) -> None:
    """Linear layers, convolutions alone, and layers with rows too: no bit differs, nothing else changes."""
    rig = Rig(linear(name, dtype=dtype, page_tokens=page_tokens))
    text = prompt(sum(SPLIT), 7, VOCAB)
    request = rig.request(len(text))
    before = rig.outside([request])
    expected, cache = reference(rig.case, text, SPLIT)
    for ours, theirs in zip(rig.prefill(request, text, SPLIT), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert same(before, rig.outside([request]))
    compared = 0
    for layer, entry in rig.case.layers.layers.items():
        if isinstance(entry, Attention):
            continue
        state, conv = rig.state(request, layer)
        own = cache.layers[layer]
        assert conv is not None
        assert torch.equal(conv, own.conv_states[0][0, :, 1:])
        assert state is None or torch.equal(state, own.recurrent_states[0][0])
        compared += 1
    assert compared == 2


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_f1_a_slot_holds_the_state_of_a_step_boundary(name: str) -> None:
    """A pass that fails leaves the slot as it was, whatever the model did to its tensors (F1)."""
    rig = Rig(linear(name))
    text = prompt(30, 7, VOCAB)
    request = rig.request(len(text))
    rig.prefill(request, text, [20])
    binding, slot = rig.bindings["slots-state"], request.slots["state"]
    before = content(binding, slot)

    def fail(*_: object) -> None:
        raise ArithmeticError("in the last layer")

    handle = rig.case.model.get_output_embeddings().register_forward_pre_hook(fail)  # type: ignore[operator]
    with pytest.raises(ArithmeticError):
        rig.run([request], [text[20:21]])
    handle.remove()
    assert torch.equal(content(binding, slot), before)
    rig.run([request], [text[20:21]])
    assert not torch.equal(content(binding, slot), before)


def test_e5_a_restored_slot_is_read_and_a_new_request_reads_none() -> None:
    """The context's length alone decides: with none, NaN in the slot is nothing; else it is state (E5)."""
    rig = Rig(linear("qwen3_next"))
    text = prompt(12, 7, VOCAB)
    request = rig.request(len(text))
    [fresh] = rig.run([request], [text])
    assert torch.isfinite(fresh).all()
    other = rig.request(24)
    rig.run([other], [text])
    rig.bindings["slots-state"].views["conv-0", "part0"][other.slots["state"]] = float("nan")
    [spoilt] = rig.run([other], [text])
    assert spoilt.isnan().any()


def test_wrong_slots_are_refused_with_every_fault() -> None:
    """One a request for every bounded group, none twice, none of padding, none outside."""
    rig = Rig(linear("qwen3_next"))
    requests = [rig.request(8) for _ in range(3)]
    good = rig.step(requests, [prompt(8, 1, VOCAB)] * 3)
    before = rig.outside([])
    cases: dict[str, dict[str, list[int]]] = {
        r"slots for \[\]: \['state'\] missing": {},
        r"slots of state \(2,\): expected \(3,\)": {"state": [1, 2]},
        "slot 0 of state, request 1: expected 1 <= slot < 9": {"state": [1, 0, 2]},
        "slot 9 of state, request 2": {"state": [1, 2, 9]},
        r"one stands twice in \[4, 1, 4\]": {"state": [4, 1, 4]},
        "slot -1 of state, request 0.*one stands twice": {"state": [-1, 3, 3]},
    }
    for message, slots in cases.items():
        rows = {name: np.array(row, np.int32) for name, row in slots.items()}
        with pytest.raises(InternalFault, match=message):
            rig.runner.forward(replace(good, slots=rows))
    assert same(before, rig.outside([]))


def changed(case: Tiny, layer: int, entry: Attention | Recurrent | Combined) -> Tiny:
    """A case with one layer mapped otherwise."""
    return replace(case, layers=HfLayers({**case.layers.layers, layer: entry}))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (Recurrent(), "layer 0: neither state nor conv is given"),
        (Recurrent(("state-0", "status")), "layer 0, state-0.status: not declared"),
        (Recurrent(("kv-2", "k")), "layer 0, kv-2.k: linear-attention state in the paged group kv"),
        (Attention(("conv-0", "part0"), ("conv-0", "part1")), "attention rows in the bounded group state"),
        (Attention(("kv-2", "k"), ("kv-2", "v")), "which is Recurrent, not Attention"),
        (
            Combined(Attention(("kv-2", "k"), ("kv-2", "v")), Recurrent(("state-0", "state"))),
            "which is Recurrent, not Combined",
        ),
    ],
)
def test_a_map_that_does_not_fit_linear_layers_is_refused(
    entry: Attention | Recurrent | Combined, message: str
) -> None:
    """Empty entries, unknown fields, groups of another kind and layers of another kind are named."""
    case = changed(linear("qwen3_next"), 0, entry)
    with pytest.raises(PluginFault, match=message):
        HfExecutor(case.model, case.layers, case.kv)


def test_state_in_several_groups_is_refused() -> None:
    """One slot number stands for all of a layer's state."""
    case = linear("qwen3_next")
    arenas = [
        arena.model_copy(update={"group": "other"}) if arena.name == "conv-0" else arena
        for arena in case.kv.arenas
    ]
    groups = (*case.kv.groups, Group(name="other", kind="bounded"))
    kv = case.kv.model_copy(update={"arenas": tuple(arenas), "groups": groups})
    with pytest.raises(PluginFault, match="layer 0: its state belongs to several groups"):
        HfExecutor(case.model, case.layers, kv)


def with_axes(kv: KvModel, arena: str, field: str, axes: list[tuple[str, int]]) -> KvModel:
    """A declaration with one field of another shape."""

    def remade(item: Arena) -> Arena:
        if item.name != arena:
            return item
        fields = [
            one.model_copy(update={"axes": Axes(axes)}) if one.name == field else one for one in item.fields
        ]
        return item.model_copy(update={"fields": tuple(fields)})

    return kv.model_copy(update={"arenas": tuple(remade(item) for item in kv.arenas)})


@pytest.mark.parametrize(
    ("arena", "field", "axes", "message"),
    [
        ("state-1", "state", [("head", 4), ("a", 16), ("b", 8)], r"layer 1 keeps a state of \[4, 8, 16\]"),
        ("conv-1", "part0", [("c", 8), ("column", 3)], r"layer 1 convolves 96 channels .* \[88, 3\]"),
    ],
)
def test_a_declared_shape_that_is_not_the_models_is_refused(
    arena: str, field: str, axes: list[tuple[str, int]], message: str
) -> None:
    """What the model keeps is judged before it is written, both shapes named."""
    case = linear("qwen3_next")
    rig = Rig(replace(case, kv=with_axes(case.kv, arena, field, axes)))
    with pytest.raises(PluginFault, match=message):
        rig.run([rig.request(8)], [prompt(8, 1, VOCAB)])


def test_a_convolution_of_another_width_is_refused() -> None:
    """The arena keeps one column fewer than the kernel is wide."""
    case = linear("lfm2")
    kv = with_axes(case.kv, "conv-0", "part0", [("channel", 64), ("column", 3)])
    rig = Rig(replace(case, kv=kv))
    with pytest.raises(
        PluginFault, match=r"by a kernel of 3, which is \[64, 2\] to keep; declared: \[64, 3\]"
    ):
        rig.run([rig.request(8)], [prompt(8, 1, VOCAB)])


def test_state_that_is_declared_and_not_kept_or_kept_and_not_declared_is_refused() -> None:
    """Dropping a state, or storing one that never was, would be silent corruption."""
    dropped = changed(linear("qwen3_next"), 0, Recurrent(None, ()))
    assert isinstance(dropped.layers.layers[1], Recurrent)
    lost = changed(linear("qwen3_next"), 1, replace(dropped.layers.layers[1], state=None))
    rig = Rig(lost)
    with pytest.raises(PluginFault, match=r"layer 1 keeps a state of \[4, 8, 16\]; declared: no field"):
        rig.run([rig.request(8)], [prompt(8, 1, VOCAB)])
    kv, layers = declare("lfm2", dtype="float32", page_tokens=16)
    donor, _ = declare("qwen3_next", dtype="float32", page_tokens=16)
    extra = next(arena for arena in donor.arenas if arena.name == "state-0")
    kv = kv.model_copy(update={"arenas": (*kv.arenas, extra)})
    entry = layers.layers[0]
    assert isinstance(entry, Recurrent)
    case = Tiny(
        linear("lfm2").model,
        kv,
        HfLayers({**layers.layers, 0: replace(entry, state=("state-0", "state"))}),
    )
    rig = Rig(case)
    with pytest.raises(PluginFault, match="layer 0 keeps no recurrent state, declared"):
        rig.run([rig.request(8)], [prompt(8, 1, VOCAB)])


def test_e8_views_of_slots_are_judged_like_those_of_pages() -> None:
    """Missing, misshapen, mistyped slots and unequal counts are named together (E8)."""
    rig = Rig(linear("qwen3_next"))
    views: dict[tuple[str, str], Tensor] = dict(rig.views)
    del views["conv-0", "part0"]
    views["conv-0", "part1"] = views["conv-0", "part1"][..., :2]
    views["state-0", "state"] = views["state-0", "state"].bfloat16()
    views["state-1", "state"] = views["state-1", "state"][1:]
    runner = HfExecutor(rig.case.model, rig.case.layers, rig.case.kv)
    with pytest.raises(UsageFault) as fault:
        runner.bind(views)
    for part in (
        "conv-0.part0: no view",
        "conv-0.part1: view of [9, 16, 2], expected [slots, 16, 3]",
        "state-0.state: view of torch.bfloat16",
        "space slots-state: fields of different numbers of blocks",
    ):
        assert part in str(fault.value)


def test_index_keys_beside_linear_attention_are_refused() -> None:
    """No layer of transformers keeps both."""
    case = linear("falcon_h1")
    entry = case.layers.layers[0]
    assert isinstance(entry, Combined)
    wrong = replace(entry, attention=replace(entry.attention, index_keys=("kv-0", "k")))
    with pytest.raises(PluginFault, match="layer 0: index keys beside linear attention are not served"):
        HfExecutor(case.model, changed(case, 0, wrong).layers, case.kv)

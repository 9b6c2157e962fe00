"""Probes that know no plugin: they build small checkpoints and run the unmodified Hugging Face model.

The model has its own cache and its own attention, and finds positions and masks by itself.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvc_conformance.channel import Message
from kvc_conformance.child import Session
from kvc_conformance.facts import without
from kvcontract.contract.errors import MissingExtra, require
from kvcontract.engine.checkpoint import hf_config, load_model, random_checkpoint


def build(session: Session, arguments: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Message:
    """Write a checkpoint of seeded random weights.  Arguments: ``config``, ``folder``, ``seed``."""
    del session, arrays
    random_checkpoint(arguments["config"], arguments["folder"], arguments["seed"])
    return Message({})


def completed(session: Session, arguments: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Message:
    """What transformers takes for a key that a config lacks, for one key at a time.

    Arguments: ``config``, ``paths`` (of keys, each a list).
    Returns ``found``, for each path a list of its value; empty where there is none to speak of.
    """
    del session, arrays
    return Message({"found": [_completed(arguments["config"], path) for path in arguments["paths"]]})


def _completed(config: Mapping[str, Any], path: list[str]) -> list[Any]:
    try:
        found: Any = hf_config(require("transformers", "hf"), without(config, path))
        for key in path:
            found = getattr(found, key)
        json.dumps(found, allow_nan=False)
    except MissingExtra:
        raise
    except Exception:  # noqa: BLE001 - a config that transformers does not take, or a value of its own types
        return []
    return [found]


def run(session: Session, arguments: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Message:
    """Run token streams, each cut as it is told, and return the logits of every position.

    Arguments: ``folder``, ``dtype``, ``device``, ``splits`` (tokens of each step, for each stream).
    Arrays: ``tokens_N`` int64[n].  Returns ``logits_N`` float32[n, vocab] and, for each layer that keeps
    them, ``state_N_LAYER`` and ``conv_N_LAYER`` float32[steps, ...]: what its own cache held after each step.
    """
    torch.set_num_threads(1)  # small matrices: threads cost more than they save
    model = _model(session, arguments["folder"], arguments["dtype"], arguments["device"])
    found: dict[str, NDArray[Any]] = {}
    for number, split in enumerate(arguments["splits"]):
        kept: dict[str, list[NDArray[np.float32]]] = {}
        found[f"logits_{number}"] = _logits(model, arrays[f"tokens_{number}"], split, kept)
        for name, tensors in kept.items():
            what, layer = name.split()
            found[f"{what}_{number}_{layer}"] = np.stack(tensors)
    return Message({}, found)


@torch.no_grad()
def _logits(
    model: Any, tokens: NDArray[np.int64], split: list[int], kept: dict[str, list[NDArray[np.float32]]]
) -> NDArray[np.float32]:
    cache = require("transformers", "hf").DynamicCache(config=model.config.get_text_config(decoder=True))
    parameters = inspect.signature(model.forward).parameters
    arguments: dict[str, Any] = {"cache" if "cache" in parameters else "past_key_values": cache}
    device = next(model.parameters()).device
    ids = torch.tensor(tokens, device=device).unsqueeze(0)
    found = []
    for begin, end in pairwise(np.cumsum([0, *split]).tolist()):
        if "logits_to_keep" in parameters:
            # The engine says which rows it wants; said here too, the matrix products have equal shapes.
            arguments["logits_to_keep"] = torch.arange(end - begin, device=device)
        output = model(input_ids=ids[:, begin:end], use_cache=True, **arguments)
        found.append(output.logits[0].float().cpu())
        for what, layer, tensor in _kept(cache):
            kept.setdefault(f"{what} {layer}", []).append(tensor[0].float().cpu().numpy().copy())
    logits: NDArray[np.float32] = torch.cat(found).numpy()
    return logits


def _kept(cache: Any) -> Iterator[tuple[str, int, torch.Tensor]]:
    """What linear-attention layers hold: of a convolution all columns but the oldest, which nothing reads."""
    for number, layer in enumerate(cache.layers):
        for what, name in (("state", "recurrent_states"), ("conv", "conv_states")):
            tensor = getattr(layer, name, {}).get(0)
            if tensor is not None:
                yield what, number, tensor[..., 1:] if what == "conv" else tensor


def _model(session: Session, folder: str, dtype: str, device: str) -> Any:
    key = f"model {folder} {dtype}"
    if key not in session.objects:
        session.objects[key] = load_model(folder, device, dtype)
    return session.objects[key]

"""Checkpoint folders: config.json and safetensors, read offline through transformers' own classes.

`random_checkpoint` writes one with seeded random weights, for small models that nobody trained: scaled so
that every token of the context moves the logits, since a model that ignores its cache would prove nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import nn

from kvcontract.contract.errors import UsageFault, require
from kvcontract.core.identity import INDEX_FILE, config_digest, load_config, weight_files, weight_identity

__all__ = [
    "config_digest",
    "load_config",
    "load_model",
    "random_checkpoint",
    "random_model",
    "torch_dtype",
    "weight_files",
    "weight_identity",
]

# Chosen by trial on small models, tied and untied: greedy continuations wander, a changed token moves logits
# 100 tokens later by about 1, the best token leads by about 0.3, and bfloat16 moves logits by less than 0.2.
_VOCABULARY_GAIN: Final = 1.5
_MATRIX_GAIN: Final = 1.4

# Decay rates of recurrent state.  As models initialise them, they forget within a token or two, and a lost
# state would move no logit; with these, half-lives spread from some tokens to some hundreds.
_DECAY_NAME: Final = "A_log"
_DECAY_RATES: Final = (0.002, 0.2)

_DTYPES: Final = ("float32", "bfloat16", "float16", "float64")


def torch_dtype(name: str | torch.dtype) -> torch.dtype:
    """The dtype a model is run in, by name.

    Raises:
        UsageFault: none of float32, bfloat16, float16, float64.
    """
    if isinstance(name, torch.dtype):
        return name
    if name not in _DTYPES:
        raise UsageFault(f"dtype {name!r}: expected one of {', '.join(_DTYPES)}")
    return cast("torch.dtype", getattr(torch, name))


def load_model(
    folder: Path | str, device: torch.device | str = "cpu", dtype: torch.dtype | str = "float32"
) -> nn.Module:
    """Load a causal language model in eval mode; never reaches for the network.

    Args:
        folder: holds config.json and *.safetensors, with an index where there are shards.
        device: where to put it.
        dtype: precision to run in, whatever the files hold.

    Raises:
        UsageFault: files or tensors are missing, or transformers does not know the model; all are named.
    """
    folder = Path(folder)
    weight_files(folder)
    config = load_config(folder)
    transformers = require("transformers", "hf")
    with _without_progress_bars(transformers):
        try:
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                config=hf_config(transformers, config),
                dtype=torch_dtype(dtype),
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
        except (OSError, ValueError) as error:
            raise UsageFault(f"{folder}: transformers cannot load it: {error}") from error
    faults = [f"missing tensor {name}" for name in sorted(report["missing_keys"])]
    faults += [f"tensor of another shape: {found}" for found in sorted(map(str, report["mismatched_keys"]))]
    if faults:
        raise UsageFault(f"{folder}: the weights do not fit config.json: {'; '.join(faults)}")
    return cast("nn.Module", model.to(device).eval())


def random_model(config: Mapping[str, Any], seed: int) -> nn.Module:
    """A float32 model on the CPU in eval mode with seeded random weights.

    Args:
        config: parsed config.json.
        seed: equal seeds give equal weights.

    Raises:
        UsageFault: transformers does not know the model type.
    """
    transformers = require("transformers", "hf")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = transformers.AutoModelForCausalLM.from_config(
                hf_config(transformers, config), dtype=torch.float32
            )
        except ValueError as error:
            raise UsageFault(f"transformers cannot build this config: {error}") from error
    _randomise(model, seed)
    return cast("nn.Module", model.eval())


def random_checkpoint(config: Mapping[str, Any], folder: Path | str, seed: int) -> Path:
    """Write a checkpoint of seeded random float32 weights; returns the folder.

    The config.json is the one given, with its dtype set to what the weights have.

    Args:
        config: parsed config.json.
        folder: where to; created if need be.
        seed: equal seeds give equal weights.

    Raises:
        UsageFault: the folder already holds a checkpoint, or transformers does not know the model type.
    """
    folder = Path(folder)
    present = [name for name in ("config.json", "model.safetensors", INDEX_FILE) if (folder / name).exists()]
    if present:
        raise UsageFault(f"{folder} already holds {', '.join(present)}; choose another folder")
    model = cast("Any", random_model(config, seed))
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=folder) as scratch,
        _without_progress_bars(require("transformers", "hf")),
    ):
        # Its own config.json would be normalised; a plugin is to meet the given one.
        model.save_pretrained(scratch, max_shard_size="1TB")
        shutil.move(Path(scratch) / "model.safetensors", folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_as_float32(config), indent=1) + "\n", encoding="utf-8")
    return folder


def hf_config(transformers: Any, config: Mapping[str, Any]) -> Any:
    """The transformers config object of a parsed config.json."""
    if "model_type" not in config:
        raise UsageFault("config.json has no model_type; transformers finds the model class by it")
    rest = {key: value for key, value in config.items() if key != "model_type"}
    try:
        return transformers.AutoConfig.for_model(config["model_type"], **json.loads(json.dumps(rest)))
    except ValueError as error:
        raise UsageFault(f"model_type {config['model_type']!r}: {error}") from error


def _as_float32(config: Mapping[str, Any]) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for key, value in config.items():
        if key in ("dtype", "torch_dtype") and isinstance(value, str):
            changed[key] = "float32"
        else:
            changed[key] = _as_float32(value) if isinstance(value, Mapping) else value
    return changed


def _randomise(model: nn.Module, seed: int) -> None:
    """Draw every matrix anew, scaled by its fan-in; spread decays; norms and biases keep their values."""
    vocabulary = {
        id(part.weight)
        for part in (cast("Any", model).get_input_embeddings(), cast("Any", model).get_output_embeddings())
        if part is not None
    }
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if name.rpartition(".")[2] == _DECAY_NAME:
                first, last = map(math.log, _DECAY_RATES)
                parameter.copy_(torch.linspace(first, last, parameter.numel()).view_as(parameter))
                continue
            if parameter.ndim < 2:  # noqa: PLR2004 - a matrix has two axes
                continue
            gain = _VOCABULARY_GAIN if id(parameter) in vocabulary else _MATRIX_GAIN
            parameter.normal_(0.0, gain / math.sqrt(parameter.shape[-1]), generator=generator)


@contextlib.contextmanager
def _without_progress_bars(transformers: Any) -> Iterator[None]:
    """Quiet progress bars inside only; the process-wide switch is put back."""
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()

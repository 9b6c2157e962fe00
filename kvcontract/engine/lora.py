"""LoRA adapters: read from a folder in the layout of PEFT, judged whole, applied by forward hooks.

A linear module computes W x.  With an adapter it computes W x + s B (A x), where A [r, in] and B [out, r] are
the adapter's and s is alpha / r, or alpha / sqrt(r) where it says so (Hu et al. 2021, "LoRA", section 4.1;
Kalajdzievski 2023, rsLoRA).  Nothing of the model is changed: hooks are there while one request's pass runs,
so that a request without an adapter meets the unmodified model, bit for bit.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from kvcontract.contract.errors import UsageFault

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"

_SERVED: Final = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "target_modules"})
_INERT: Final = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",  # how training began, as is loftq_config and the like; see _STARTS
        "eva_config",
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)
"""Keys that change no number of an inference run; any other key that is set asks for what is not served."""

_STARTS: Final = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base model's weights as they were."""

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_TENSOR: Final = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)\.weight")
_NAMED: Final = 8


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """What an adapter adds to one linear module.

    Attributes:
        down: A, [r, in].
        up: s B, [out, r].
    """

    down: Tensor
    up: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Lora:
    """An adapter that fits a model.

    Attributes:
        digest: of all that changes a number, as it was in the folder.
        pairs: by name of the module.
    """

    digest: str
    pairs: Mapping[str, Pair]

    @contextlib.contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Add it to every pass of the model inside."""
        with contextlib.ExitStack() as undo:
            for name, pair in self.pairs.items():
                undo.callback(model.get_submodule(name).register_forward_hook(_adding(pair)).remove)
            yield


def _adding(pair: Pair) -> Any:
    def add(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + linear(linear(inputs[0], pair.down), pair.up)

    return add


def read_lora(folder: Path, model: nn.Module) -> Lora:
    """Read an adapter, onto the device and into the dtype of the modules it adds to.

    Args:
        folder: holds adapter_config.json and adapter_model.safetensors.
        model: a causal language model, unchanged.

    Raises:
        UsageFault: files are missing or unreadable, tensors are missing, of another shape or not finite,
            modules are not there, or something is asked for that is not served; all are named.
    """
    config, faults = _config(folder)
    if config:
        faults += _config_faults(config)
    wanted, more = _targets(config, model) if config else ({}, [])
    faults += more
    raw, tensors, more = _tensors(folder)
    faults += more
    if raw and wanted:
        faults += _tensor_faults(tensors, wanted, config.get("r"))
    if faults:
        raise UsageFault(f"{folder}: this adapter cannot be served: {'; '.join(faults)}")
    rank, alpha = int(config["r"]), float(config["lora_alpha"])
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    pairs = {
        name: Pair(
            tensors[name, "A"].to(module.weight),
            (tensors[name, "B"].to(torch.float32) * scale).to(module.weight),
        )
        for name, module in wanted.items()
    }
    digest = hashlib.blake2b(digest_size=16, person=b"kvc-adapter")
    digest.update(json.dumps([rank, alpha, bool(config.get("use_rslora")), sorted(wanted)]).encode())
    digest.update(raw)
    return Lora(digest.hexdigest(), pairs)


def _config(folder: Path) -> tuple[dict[str, Any], list[str]]:
    file = folder / CONFIG_FILE
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, [f"{CONFIG_FILE} is missing"]
    except (OSError, ValueError) as error:
        return {}, [f"{CONFIG_FILE} is not readable as JSON: {error}"]
    if not isinstance(found, dict) or not found:
        return {}, [f"{CONFIG_FILE} holds {found!r:.40}, expected an object with keys"]
    return found, []


def _tensors(folder: Path) -> tuple[bytes, dict[tuple[str, str], Tensor], list[str]]:
    """The file, its tensors by module and letter, and what is wrong with it."""
    from safetensors import SafetensorError  # noqa: PLC0415 - only who loads an adapter needs it
    from safetensors.torch import load  # noqa: PLC0415 - likewise

    try:
        raw = (folder / WEIGHTS_FILE).read_bytes()
        tensors = load(raw)
    except FileNotFoundError:
        return b"", {}, [f"{WEIGHTS_FILE} is missing"]
    except (OSError, SafetensorError) as error:
        return b"", {}, [f"{WEIGHTS_FILE} is not readable: {error}"]
    matched = {name: _TENSOR.fullmatch(name) for name in tensors}
    found = {
        cast("tuple[str, str]", match.groups()): tensors[name] for name, match in matched.items() if match
    }
    other = [name for name, match in matched.items() if match is None]
    expected = "expected base_model.model.MODULE.lora_A.weight and .lora_B.weight"
    return raw, found, [f"tensors that are not served: {_some(other)}; {expected}"] if other else []


def _config_faults(config: Mapping[str, Any]) -> list[str]:
    faults = []
    if config.get("peft_type") != "LORA":
        faults.append(f"peft_type {config.get('peft_type')!r}: expected 'LORA'")
    if type(config.get("r")) is not int or config["r"] < 1:
        faults.append(f"r {config.get('r')!r}: expected an integer, 1 or more")
    alpha = config.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        faults.append(f"lora_alpha {alpha!r}: expected a number")
    if not isinstance(config.get("use_rslora", False), bool):
        faults.append(f"use_rslora {config['use_rslora']!r}: expected true or false")
    start = config.get("init_lora_weights", True)
    if not any(start is one or start == one for one in _STARTS):
        faults.append(f"init_lora_weights {start!r} changes the base model's weights: not served")
    other = sorted(set(config) - _SERVED - _INERT - {"init_lora_weights"})
    wanted = {key: config[key] for key in other if config[key] and config[key] != "none"}
    return faults + [f"{key} = {value!r} is not served" for key, value in wanted.items()]


def _targets(config: Mapping[str, Any], model: nn.Module) -> tuple[dict[str, nn.Linear], list[str]]:
    """The modules that an adapter adds to, by name, and what is wrong with them."""
    asked, modules = config.get("target_modules"), dict(model.named_modules())
    if asked == "all-linear":
        head = cast("Any", model).get_output_embeddings()
        return {n: m for n, m in modules.items() if isinstance(m, nn.Linear) and m is not head}, []
    if isinstance(asked, str):
        try:
            pattern = re.compile(asked)
        except re.error as error:
            return {}, [f"target_modules {asked!r} is no regular expression: {error}"]
        matched = {asked: [name for name in modules if pattern.fullmatch(name)]}
    elif isinstance(asked, list) and asked and all(isinstance(one, str) for one in asked):
        matched = {one: [n for n in modules if n == one or n.endswith(f".{one}")] for one in asked}
    else:
        return {}, [f"target_modules {asked!r}: expected a list of names, or a regular expression"]
    last = sorted({name.rpartition(".")[2] for name, one in modules.items() if isinstance(one, nn.Linear)})
    faults = []
    for one, names in matched.items():
        if not names:
            near = difflib.get_close_matches(one, last, n=3) or last
            faults.append(f"target module {one!r} is not in the model; nearest: {', '.join(near)}")
    found = {name: modules[name] for names in matched.values() for name in names}
    linears = {name: one for name, one in found.items() if isinstance(one, nn.Linear)}
    other = [f"{name} ({type(one).__name__})" for name, one in found.items() if name not in linears]
    other += [
        f"{name} ({one.weight.dtype})" for name, one in linears.items() if one.weight.dtype not in _DTYPES
    ]
    if other:
        faults.append(f"target modules that are not linear in a plain float: {_some(other)}")
    return linears, faults


def _tensor_faults(
    tensors: Mapping[tuple[str, str], Tensor], wanted: Mapping[str, nn.Linear], rank: object
) -> list[str]:
    """Where the tensors are not those that the modules need; a rank that is none was named already."""
    missing = [f"{name}.lora_{letter}" for name in wanted for letter in "AB" if (name, letter) not in tensors]
    unknown = [f"{name}.lora_{letter}" for name, letter in tensors if name not in wanted]
    faults = [f"missing tensors: {_some(missing)}"] if missing else []
    if unknown:
        faults.append(f"tensors for modules that target_modules does not name: {_some(unknown)}")
    shapes, values = [], []
    for (name, letter), tensor in sorted(tensors.items()):
        if name not in wanted:
            continue
        module = wanted[name]
        shape = [rank, module.in_features] if letter == "A" else [module.out_features, rank]
        if isinstance(rank, int) and list(tensor.shape) != shape:
            shapes.append(f"{name}.lora_{letter} {list(tensor.shape)}, expected {shape}")
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            values.append(f"{name}.lora_{letter}")
    faults += [f"tensors of another shape: {_some(shapes)}"] if shapes else []
    return faults + ([f"tensors with values that are no numbers: {_some(values)}"] if values else [])


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(sorted(names)[:_NAMED]) + more

"""Who computed the bytes: digests of a checkpoint's weights and of its configuration, without torch.

Two checkpoints of equal geometry and other weights keep other content (D6).  The digest covers the weight
files byte by byte, and those configuration keys that can change a number; inert keys are left out, so that
editing an end-of-sequence id does not empty a store.  The precision in which a model is run belongs to
`KvModel.numerics`, not here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.model import WeightIdentity

INERT_KEYS: Final = frozenset(
    {
        "_commit_hash",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "auto_map",
        "bos_token_id",
        "dtype",
        "embd_pdrop",
        "eos_token_id",
        "hidden_dropout",
        "initializer_range",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "resid_pdrop",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Keys of a config.json, at any depth, that change no number of an inference run."""

INDEX_FILE: Final = "model.safetensors.index.json"
_READ_BYTES: Final = 16 * 1024 * 1024


def config_digest(config: Mapping[str, Any]) -> str:
    """128-bit hexadecimal digest of the keys that change a number; null equals absent, 1 equals 1.0."""
    text = json.dumps(_relevant(config), sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16, person=b"kvc-config").hexdigest()


def weight_identity(folder: Path | str) -> WeightIdentity:
    """Identity of a checkpoint folder by content: reads every weight file whole.

    Args:
        folder: holds config.json and *.safetensors.

    Raises:
        UsageFault: files are missing or unreadable; all are named.
    """
    files = weight_files(folder)
    digest = hashlib.blake2b(digest_size=16, person=b"kvc-weights")
    for file in files:
        for part in (file.name.encode(), file.stat().st_size.to_bytes(8, "little")):
            digest.update(len(part).to_bytes(4, "little") + part)
        with file.open("rb") as stream:
            while data := stream.read(_READ_BYTES):
                digest.update(data)
    return WeightIdentity(kind="digest", value=digest.hexdigest(), config=config_digest(load_config(folder)))


def load_config(path: Path | str) -> dict[str, Any]:
    """Parse a config.json, given as the file or as the folder that holds it.

    Raises:
        UsageFault: there is no such file, or it holds no JSON object.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageFault(f"{file}: no such file; expected a checkpoint folder or its config.json") from error
    except (OSError, ValueError) as error:
        raise UsageFault(f"{file}: not readable as JSON: {error}") from error
    if not isinstance(config, dict):
        raise UsageFault(f"{file}: expected a JSON object, found {type(config).__name__}")
    return config


def weight_files(folder: Path | str) -> list[Path]:
    """The safetensors files of a checkpoint folder, sorted by name; an index decides where there is one.

    Raises:
        UsageFault: config.json, the weights, or shards that the index lists are missing; all are named.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UsageFault(f"{folder}: no such folder; expected config.json and *.safetensors in it")
    faults = [] if (folder / "config.json").is_file() else ["config.json"]
    index = folder / INDEX_FILE
    if index.is_file():
        names = sorted(set(_weight_map(index).values()))
        faults += [name for name in names if not (folder / name).is_file()]
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
        faults += [] if files else ["model.safetensors (or shards with " + INDEX_FILE + ")"]
    if faults:
        raise UsageFault(f"{folder}: not a whole checkpoint; missing: {', '.join(faults)}")
    return files


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(key): str(name) for key, name in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageFault(f"{index}: no weight_map readable in it: {error!r}") from error


def _relevant(value: Any) -> Any:
    match value:
        case Mapping():
            return {
                key: _relevant(item)
                for key, item in value.items()
                if key not in INERT_KEYS and item is not None
            }
        case list() | tuple():
            return [_relevant(item) for item in value]
        case float() if value.is_integer():
            return int(value)
        case _:
            return value

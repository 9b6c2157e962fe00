"""A checkpoint that the user gave, looked over before a plugin is: a broken one is the request's fault."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Final

from kvcontract.contract.errors import UsageFault
from kvcontract.core.identity import weight_files

_LENGTH: Final = struct.Struct("<Q")


def refuse_broken_weights(folder: Path) -> None:
    """Look at the head of every weight file; the tensors themselves are not read.

    Raises:
        UsageFault: files are missing, unreadable, or shorter than their header says; all are named.
    """
    faults = [f"{file.name}: {fault}" for file in weight_files(folder) if (fault := _fault(file)) is not None]
    if faults:
        raise UsageFault(f"{folder}: not a whole checkpoint; {'; '.join(faults)}")


def _fault(file: Path) -> str | None:
    """A safetensors file is a length, a JSON header of that length, and the tensors it places."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(_LENGTH.size)
            if len(start) < _LENGTH.size:
                return f"{size} B are too few for a safetensors file"
            (length,) = _LENGTH.unpack(start)
            if length > size - _LENGTH.size:
                return (
                    f"its header should have {length:,} B, the file has {size:,} B; it is cut off or damaged"
                )
            header = json.loads(stream.read(length))
        ends = [int(item["data_offsets"][1]) for name, item in header.items() if name != "__metadata__"]
    except OSError as error:
        return f"not readable: {error.strerror or error}"
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        return f"no safetensors header: {error!r:.80}"
    wanted = _LENGTH.size + length + max(ends, default=0)
    return None if size >= wanted else f"{size:,} B of {wanted:,} B are there; it is cut off"

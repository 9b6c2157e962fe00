"""Host memory that a device reaches by itself."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from typing import Any, Final

import torch

from kvcontract.contract.errors import EnvironmentFault
from kvcontract.memory.slab import Allocate, Slab

_PORTABLE: Final = 1  # cudaHostRegisterPortable: for every device of the process
_HUGE: Final = 2 * 2**20


def pinned_memory(size_bytes: int) -> Any:
    """Page-locked memory, as a writable buffer; unlocked and given back with the last reference to it.

    Locking costs some 0.1 to 0.7 s for 1 GiB: take it once, and in large pieces.

    Raises:
        EnvironmentFault: the driver refused.
    """
    room = mmap.mmap(-1, size_bytes + _HUGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        room.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to lock
    whole = ctypes.addressof(ctypes.c_char.from_buffer(room))
    buffer = (ctypes.c_ubyte * size_bytes).from_buffer(room, -whole % _HUGE)
    start = ctypes.addressof(buffer)
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call] # torch's own stub
    code = int(runtime.cudaHostRegister(start, size_bytes, _PORTABLE))
    if code:
        raise EnvironmentFault(
            f"{size_bytes:,} B of host memory cannot be pinned: cudaHostRegister says {code}"
        )
    # The mapping is an argument, so it outlives the lock on it.
    weakref.finalize(buffer, _unpin, start, room).atexit = False
    return buffer


def host_memory(device: torch.device | str, size_bytes: int) -> Allocate | None:
    """Where memory for records comes from beside pages on a device; None: from anywhere.

    Pinned, where the device needs it, and all of it now: while the device works, pinning waits for it.

    Args:
        device: where pages lie.
        size_bytes: of all records.
    """
    return Slab(size_bytes, pinned_memory) if torch.device(device).type == "cuda" else None


def _unpin(start: int, _room: mmap.mmap) -> None:
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call] # torch's own stub
    runtime.cudaHostUnregister(start)

"""A copy program as a table, so that one kernel moves all arenas of a batch.

A payload is a row of *grains*, the largest pieces of one size that are contiguous on both sides and aligned
to each other.  Where grain g of a record lies is `address[g] + block * stride[g]`, with the block of the page
that it belongs to: slices, permutations, arenas apart and records of several pages are all the same to the
kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MOST_GRAINS: Final = 2**20
"""A longer table would cost more to read than the payload."""

_WORDS: Final = (8, 4, 2, 1)


@cache
def has_kernels() -> bool:
    """Whether triton is there."""
    return find_spec("triton") is not None


def on_device(numbers: NDArray[np.int64], device: torch.device) -> Tensor:
    """Some numbers for the current stream of a device; the host waits for nothing."""
    made = torch.from_numpy(np.ascontiguousarray(numbers))
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


@dataclass(frozen=True, slots=True)
class Runs:
    """Contiguous pieces that a copy moves.

    Attributes:
        address: int64[r], where each lies in block 0.
        stride_bytes: of all of them, from block to block.
        wire: int64[r], where each lies in the payload.
        bytes: of each.
        page: which of the record's pages they belong to.
    """

    address: NDArray[np.int64]
    stride_bytes: int
    wire: NDArray[np.int64]
    bytes: int
    page: int = 0


class Grains:
    """The table, on the device that the pages lie on.

    Args:
        address: int64[g], where each grain of block 0 lies; 0: nowhere.
        stride: int64[g], bytes from block to block.
        page: int64[g], which page of the record each belongs to.
        pages: of a record.
        grain_bytes: of each.
        word_bytes: what addresses and strides are multiples of; 1, 2, 4 or 8.
        device: of the pages.

    Attributes:
        rows: int64[grains, 3], `table` on the device.
    """

    def __init__(
        self,
        address: NDArray[np.int64],
        stride: NDArray[np.int64],
        page: NDArray[np.int64],
        pages: int,
        grain_bytes: int,
        word_bytes: int,
        device: torch.device,
    ) -> None:
        self.grain_bytes, self.word_bytes, self.pages = grain_bytes, word_bytes, pages
        self.rows = torch.from_numpy(np.stack([address, stride, page], 1)).to(device)

    @classmethod
    def of(
        cls, runs: Iterable[Runs], payload_bytes: int, device: torch.device, pages: int = 1
    ) -> Grains | None:
        """The table of some runs; None if it would be too long."""
        found = list(runs)
        starts = [int(np.gcd.reduce(run.wire)) for run in found]
        grain = math.gcd(payload_bytes, *starts, *(run.bytes for run in found))
        if payload_bytes // grain > MOST_GRAINS:
            return None
        count = payload_bytes // grain
        address, stride, page = (np.zeros(count, np.int64) for _ in range(3))
        for run in found:
            inside = np.arange(run.bytes // grain, dtype=np.int64)
            at = (run.wire[:, None] // grain + inside).ravel()
            address[at] = (run.address[:, None] + inside * grain).ravel()
            stride[at] = run.stride_bytes
            page[at] = run.page
        steps = math.gcd(grain, int(np.gcd.reduce(address)), int(np.gcd.reduce(stride)))
        word = next(size for size in _WORDS if steps % size == 0)
        return cls(address, stride, page, pages, grain, word, device)

    def table(self) -> NDArray[np.int64]:
        """int64[grains, 3]: where each grain of block 0 lies, or 0; bytes from block to block; its page."""
        return self.rows.cpu().numpy()

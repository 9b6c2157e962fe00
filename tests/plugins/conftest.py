"""Makes the helpers beside these tests, and those of the executor's tests, importable."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "engine")]

torch.set_num_threads(1)

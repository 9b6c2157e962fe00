"""Makes the helper modules of this folder importable; tests are collected with importmode=importlib."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

# Models this small run fastest on one thread, and do not fight over cores with whatever else runs.
torch.set_num_threads(1)

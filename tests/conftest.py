"""Bits must not depend on which test came first, nor on the processor: one thread, and no matrix unit."""

from __future__ import annotations

import os

from kvc_conformance.driver import NO_TILES

# Both are read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", NO_TILES)

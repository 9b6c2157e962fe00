"""One thread for arithmetic: models here are small, and bits must not depend on which test came first."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

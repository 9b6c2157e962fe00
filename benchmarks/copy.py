"""Copies between pages and host memory: pages where they lie, records in one piece, sums on.

    python benchmarks/copy.py [--json PATH|-] [--rounds N] [--only TEXT]

1,024 random pages of 36 layers of 64 KiB. On a CUDA device: to and from pinned memory, against one large
pinned copy of as many bytes; by the mover alone, and by a worker to and from a DRAM tier. On the host:
against a page-wise memcpy with as many threads. Every row checks bytes and sums before it is timed. Exit
code 1: a bar is missed, or a row failed.
"""

from __future__ import annotations

import sys
import sysconfig
from importlib import machinery, util
from pathlib import Path


def pass_on() -> None:
    """Be the standard library's module of this name, for whoever imports that beside this file."""
    path = str(Path(sysconfig.get_path("stdlib")) / "copy.py")
    spec = util.spec_from_loader("copy", machinery.SourceFileLoader("copy", path))
    if spec is None or spec.loader is None:
        raise ImportError(f"no {path}")
    sys.modules["copy"] = util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["copy"])


if __name__ == "__main__":
    from copies import main

    raise SystemExit(main(__doc__ or ""))
if __name__ == "copy":
    pass_on()

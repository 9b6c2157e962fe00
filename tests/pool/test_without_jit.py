"""The kernels as plain Python: what the compiled ones do is what their source says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PART = ("test_index.py", "test_pool.py", "test_holds.py", "test_branching.py", "test_request.py")


@pytest.mark.skipif(os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="this is that run")
def test_b11_the_pool_behaves_the_same_without_the_jit() -> None:
    """A part of these tests, some properties of B11 and B15 included, passes with NUMBA_DISABLE_JIT=1."""
    env = {**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    files = [str(HERE / name) for name in PART]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, env=env, cwd=HERE.parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout

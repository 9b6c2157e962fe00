"""Kernels: lazy numba, a cache that falls back, a mode without the JIT, warm-up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from kvcontract.core.jit import kernel, kernels, warm_up


def run(code: str, **env: str) -> str:
    """Run code in a fresh interpreter and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_defining_kernels_does_not_import_numba() -> None:
    """Numba is loaded by the first call, not by importing modules that have kernels."""
    code = "import sys, kvcontract.core.jit, kvcontract.pool; print('numba' in sys.modules)"
    assert run(code) == "False"


def test_missing_numba_names_the_extra() -> None:
    """Without numba the first call says what to install."""
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "from kvcontract.contract.errors import MissingExtra\n"
        "from kvcontract.core.jit import kernel\n"
        "@kernel(sample=tuple)\n"
        "def one(): return 1\n"
        "try: one()\n"
        "except MissingExtra as error: print(error)"
    )
    assert "kvcontract[runtime]" in run(code)


def test_without_the_jit_kernels_run_as_python() -> None:
    """NUMBA_DISABLE_JIT=1 gives the same results, and unsigned wrap-around stays silent."""
    code = (
        "import warnings; warnings.simplefilter('error')\n"
        "import numpy as np\n"
        "from kvcontract.core.jit import kernel\n"
        "def twice(x): return x + x\n"
        "@kernel(sample=tuple, helpers=(twice,))\n"
        "def wrap(x): return twice(x) + np.uint64(5)\n"
        "print(wrap(np.uint64(2**63)), wrap.cached)"
    )
    assert run(code, NUMBA_DISABLE_JIT="1") == "5 None"


def test_an_unusable_cache_folder_falls_back(tmp_path: Path) -> None:
    """A kernel compiles without a cache where numba finds no folder to write to."""
    (tmp_path / "module.py").write_text(
        "from kvcontract.core.jit import kernel\n@kernel(sample=tuple)\ndef one(): return 1\n"
    )
    blocked = tmp_path / "file"
    blocked.write_text("in the way of a folder")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "sys.dont_write_bytecode = True\n"
        "import module; print(module.one(), module.one.cached)"
    )
    assert run(code, NUMBA_CACHE_DIR=str(tmp_path / "cache")) == "1 True"
    (tmp_path / "__pycache__").write_text("in the way of a folder")
    nowhere = str(blocked / "cache")
    assert run(code, NUMBA_CACHE_DIR=nowhere, XDG_CACHE_HOME=nowhere, HOME=nowhere) == "1 False"


def test_helpers_may_call_earlier_helpers() -> None:
    """Helpers compile with the kernel, in order."""

    @kernel(sample=lambda: (np.arange(3),), helpers=(_double, _quadruple))
    def quadrupled_sum(values: np.ndarray) -> int:
        total = 0
        for value in values:
            total += _quadruple(value)
        return total

    assert quadrupled_sum(np.arange(4)) == 24


def test_warm_up_runs_every_kernel_and_they_are_few() -> None:
    """warm_up compiles all kernels of the package, of which there are at most 12."""
    import kvcontract.pool  # noqa: PLC0415 - its kernels register when it is imported

    assert kvcontract.pool
    assert warm_up() == len(kernels())
    assert 0 < len([each for each in kernels() if each.function.__module__.startswith("kvcontract.")]) <= 12


def _double(value: int) -> int:
    return value + value


def _quadruple(value: int) -> int:
    return _double(_double(value))

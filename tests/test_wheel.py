"""Wheels, installed into an empty environment outside the clone, certify the plugin."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def call(*command: str | Path, cwd: Path) -> str:
    """Run a command with nothing of this environment's Python in it; its output."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL"))
    }
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (
        f"{words}: exit {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    )
    return done.stdout


@pytest.mark.wheel
def test_wheels_certify_outside_the_clone(tmp_path: Path) -> None:
    """`kvc conformance qwen3` is conformant at L2 from wheels alone; the sdist builds the same wheel."""
    wheels = tmp_path / "wheels"
    for source in (ROOT, ROOT / "plugins" / "qwen3"):
        call(sys.executable, "-m", "build", "--outdir", wheels, source, cwd=tmp_path)
    [library] = wheels.glob("kvcontract-*.whl")
    [plugin] = wheels.glob("kvc_qwen3-*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    python, kvc = tmp_path / "venv" / "bin" / "python", tmp_path / "venv" / "bin" / "kvc"
    torch = os.environ.get("TORCH", "torch==2.13.0").split()
    call(python, "-m", "pip", "install", "--quiet", *torch, cwd=tmp_path)
    call(python, "-m", "pip", "install", "--quiet", f"{library}[hf]", plugin, cwd=tmp_path)
    assert "kvc_qwen3" in call(kvc, "models", cwd=tmp_path)
    assert call(kvc, "contract", cwd=tmp_path) == (ROOT / "docs" / "CONTRACT.md").read_text()
    assert call(kvc, "conformance", "qwen3", cwd=tmp_path).splitlines()[-1] == "qwen3: conformant at L2"

"""Wheels, installed into an empty environment outside the clone, certify plugins, and make new ones."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NEW = "mine"


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


def wheel_of(source: Path, folder: Path) -> Path:
    """Build a distribution's sdist, and the wheel from it."""
    call(sys.executable, "-m", "build", "--outdir", folder, source, cwd=folder.parent)
    [wheel] = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def bin_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs of an environment that has the library and the qwen3 plugin, from wheels alone."""
    folder = tmp_path_factory.mktemp("installed")
    library = wheel_of(ROOT, folder / "library")
    plugin = wheel_of(ROOT / "plugins" / "qwen3", folder / "plugin")
    venv.create(folder / "venv", with_pip=True)
    programs = folder / "venv" / "bin"
    torch = os.environ.get("TORCH", "torch==2.13.0").split()
    call(programs / "python", "-m", "pip", "install", "--quiet", *torch, cwd=folder)
    call(programs / "python", "-m", "pip", "install", "--quiet", f"{library}[hf]", plugin, cwd=folder)
    return programs


@pytest.mark.wheel
def test_wheels_certify_outside_the_clone(bin_folder: Path, tmp_path: Path) -> None:
    """`kvc conformance qwen3` is conformant at L2 from wheels alone; the sdist builds the same wheel."""
    assert "kvc_qwen3" in call(bin_folder / "kvc", "models", cwd=tmp_path)
    said = call(bin_folder / "kvc", "conformance", "qwen3", cwd=tmp_path)
    assert said.splitlines()[-1] == "qwen3: conformant at L2"


@pytest.mark.wheel
def test_a_new_plugin_is_made_built_and_certified_outside_the_clone(bin_folder: Path, tmp_path: Path) -> None:
    """From a config.json to a wheel that is conformant at L2, without a line edited (I5)."""
    kvc, config = bin_folder / "kvc", ROOT / "tests" / "configs" / "qwen3-0.6b.json"
    call(kvc, "new-model", NEW, "--from", config, cwd=tmp_path)
    wheel = wheel_of(tmp_path / f"kvc-{NEW}", tmp_path / "wheels")
    call(bin_folder / "python", "-m", "pip", "install", "--quiet", "--no-deps", wheel, cwd=tmp_path)
    assert call(kvc, "conformance", NEW, cwd=tmp_path).splitlines()[-1] == f"{NEW}: conformant at L2"

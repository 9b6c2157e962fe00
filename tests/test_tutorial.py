"""The tutorial, block by block: what it shows is what happens."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIAL = Path(__file__).parents[1] / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PLUGIN = "olmo3.py"
KVC = "from kvcontract.cli.main import run; run()"


def changed(text: str, diff: str) -> str:
    """A text with every run of - lines, which stands there once, replaced by the + lines after it."""
    for hunk in re.findall(r"(?:^-.*\n)+(?:^\+.*\n)+", diff, re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
        assert text.count(old) >= 1, f"not in {PLUGIN}:\n{old}"
        text = text.replace(old, new, 1)
    return text


def as_shown(shown: str, found: str) -> bool:
    """Whether an output is as shown: `...` is anything, a line of `...` any number of lines."""
    wanted = re.escape(shown).replace(re.escape("...\n"), "(?:.*\n)*?").replace(re.escape("..."), ".*")
    return re.fullmatch(wanted, found) is not None


def commands(block: str) -> list[tuple[str, str]]:
    """The commands of a console block, each with the output that is shown."""
    parts = re.split(r"^\$ (.*)\n", block, flags=re.MULTILINE)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("shown", ["a\n...\nd\n", "a\nb ...\n...\n", "...\nd\n", "a\nb c\nd\n"])
def test_what_is_left_out_may_be_anything(shown: str) -> None:
    """The comparison below takes what it should, and nothing else."""
    assert as_shown(shown, "a\nb c\nd\n")
    assert not as_shown(shown, "x\nb c\ny\n")


def test_every_block_of_the_tutorial_runs(tmp_path: Path) -> None:
    """Files are written and changed as it says, commands are run, and their outputs are those shown."""
    file, ran = tmp_path / PLUGIN, 0
    for kind, block in BLOCK.findall(TUTORIAL.read_text()):
        if kind == "python":
            file.write_text(block)
        elif kind == "diff":
            file.write_text(changed(file.read_text(), block))
        else:
            assert kind == "console"
            for command, shown in commands(block):
                [program, *arguments] = shlex.split(command)
                assert program == "kvc"
                done = subprocess.run(
                    [sys.executable, "-c", KVC, *arguments],
                    cwd=tmp_path,
                    env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
                    capture_output=True,
                    text=True,
                    check=False,
                )
                assert as_shown(shown, done.stdout), f"{command}\n{done.stdout}\n{done.stderr[-2000:]}"
                ran += 1
    assert ran == TUTORIAL.read_text().count("\n$ ")

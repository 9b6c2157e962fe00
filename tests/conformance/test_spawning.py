"""Children that are forked: each is a process of its own, and ends like one."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvc_conformance.driver import Child, ChildDied, ProbeFailed, scrubbed
from kvc_conformance.spawning import Nursery, nursery

PLUGIN = """
from kvcontract import hookimpl

KVC_CONTRACT = 1

@hookimpl
def kvc_model(ctx):
    raise NotImplementedError
"""


def job(tmp_path: Path, text: str) -> dict[str, Any]:
    """A plugin that runs some lines when it is imported."""
    file = tmp_path / "odd.py"
    file.write_text(f"{PLUGIN}\n{textwrap.dedent(text)}")
    return {"name": "odd", "file": str(file), "config": None, "checkpoint": None, "options": {}} | {
        "plugin_options": {},
        "device": "cpu",
    }


@pytest.fixture
def child() -> Iterator[Any]:
    """Makes forked children, and closes them."""
    made: list[Child] = []

    def make(given: dict[str, Any]) -> Child:
        made.append(Child(given, threads=1, forked=True))
        return made[-1]

    yield make
    for item in made:
        item.close()


def test_what_one_does_reaches_no_other(child: Any, tmp_path: Path) -> None:
    """A module that a plugin spoils, and an environment that it changes, are as they were in the next."""
    spoil = "import json, os\njson.planted = os.environ['PLANTED'] = 'x'\n"
    clean = "import json, os\nif hasattr(json, 'planted') or 'PLANTED' in os.environ: raise ValueError"
    child(job(tmp_path, spoil)).call("declare.load")
    child(job(tmp_path, clean)).call("declare.load")


def test_it_has_the_environment_of_its_birth(
    child: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of the nursery; what could sway it is left out, as ever."""
    nursery(scrubbed(1), 1)
    monkeypatch.setenv("SOMETHING_NEW", "7")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    monkeypatch.chdir(tmp_path)
    look = f"""
        import os
        found = os.environ.get("SOMETHING_NEW"), os.environ.get("PYTHONHASHSEED"), os.getcwd()
        if found != ("7", None, {str(tmp_path)!r}): raise RuntimeError(found)
    """
    child(job(tmp_path, look)).call("declare.load")


def test_its_end_is_told(child: Any, tmp_path: Path) -> None:
    """A code, a signal, and its last words."""
    with pytest.raises(ChildDied, match=r"(?s)ended with code 7 during declare.load.*last words"):
        child(job(tmp_path, "import os\nos.write(2, b'last words')\nos._exit(7)")).call("declare.load")
    with pytest.raises(ChildDied, match="ended with code -9"):
        child(job(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")).call("declare.load")


def test_one_that_hangs_is_ended(child: Any, tmp_path: Path) -> None:
    """Its parent kills it, though another process has forked it."""
    stuck = child(job(tmp_path, "import time\ntime.sleep(600)"))
    with pytest.raises(ChildDied, match="did not answer"):
        stuck.call("declare.load", timeout_s=0.5)
    stuck.kill()
    assert not stuck.alive


def test_without_a_nursery_children_come_from_interpreters_of_their_own(
    child: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has died costs time, nothing else."""
    made = Nursery(dict(os.environ))
    made._process.kill()
    made._process.wait()
    monkeypatch.setattr("kvc_conformance.spawning._nurseries", {"1": made})
    with pytest.raises(ProbeFailed, match="here it is"):
        child(job(tmp_path, "raise RuntimeError('here it is')")).call("declare.load")
    assert not made.alive

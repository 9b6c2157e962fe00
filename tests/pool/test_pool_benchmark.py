"""benchmarks/pool.py runs without peers and writes the common document form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "pool.py"


def test_the_benchmark_writes_its_document() -> None:
    """Every row has its figures; the exit code is 1 exactly if a bar is missed; without a peer, no ratio."""
    small = ["--no-peers", "--rounds", "9", "--tokens", "2048", "--largest-pages", "1024", "--json", "-"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *small], capture_output=True, text=True, check=False, env=_env()
    )
    found = json.loads(done.stdout)
    assert set(found) == {"machine", "versions", "results"}
    names = {"name", "ours", "theirs", "unit", "ratio", "bar", "ok"}
    assert all(names <= set(row) for row in found["results"])
    assert done.returncode == int(not all(row["ok"] for row in found["results"]))
    by_name = {row["name"]: row for row in found["results"]}
    hit = by_name["hash + match + pin, 2,048 tokens, int32 array"]
    assert (hit["theirs"], hit["ratio"], hit["bar"], hit["ok"]) == (None, None, None, True)
    assert "no peer" in hit["note"]
    assert 0 < hit["ours"] < 1
    assert "hash + match + pin, 2,048 tokens, list" in by_name


def test_too_few_rounds_are_refused() -> None:
    """A median of fewer than nine rounds is no figure."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--rounds", "3"], capture_output=True, check=False, env=_env()
    )
    assert done.returncode == 2


def _env() -> dict[str, str]:

    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

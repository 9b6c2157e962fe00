"""`make mutants`: a seeded sample of mutants of the checks, judged by tests, the zoo, and what is sound.

Results are kept in ``.mutants``, by what the sources, the tests and these programs were: a run that was
ended goes on where it was.  At the end `docs/mutants.md` is written.  A survivor is justified in
`survivors.toml`, under its id; one that is not, or a share of killed mutants below the bound, is exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import sys
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from itertools import takewhile
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Final

import mapping
from judging import Ground, Item, Judgement, judge
from mapping import Map
from mutating import ROOT, Mutant, modules, mutants, sources

KEPT: Final = ROOT / ".mutants"
PAGE: Final = ROOT / "docs" / "mutants.md"
SURVIVORS: Final = Path(__file__).parent / "survivors.toml"
BOUND: Final = 0.85
COUNT: Final = 400

Row = dict[str, Any]

_ground: Ground | None = None


def sample(count: int, seed: int, only: str | None = None) -> list[Mutant]:
    """Mutants of all modules, as many of each as is its share.

    Args:
        count: how many.
        seed: which.
        only: the last part of the one module's name, or None.
    """
    pools = {name: mutants(name) for name in modules() if only is None or name.endswith(only)}
    total = sum(map(len, pools.values()))
    count = min(count, total)
    exact = {name: count * len(pool) / total for name, pool in pools.items()}
    shares = {name: int(share) for name, share in exact.items()}
    rest = sorted(exact, key=lambda name: shares[name] - exact[name])[: count - sum(shares.values())]
    chosen = []
    for name, pool in pools.items():
        rng = random.Random(f"{seed} {name}")
        chosen += rng.sample(pool, shares[name] + (name in rest))
    return chosen


def state(files: Iterable[Path]) -> str:
    """Of what is written there."""
    found = hashlib.sha256()
    for file in files:
        found.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:12]


def _prepare(folder: str) -> None:
    global _ground  # noqa: PLW0603 - one for each process of the pool
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE"
    os.environ["TMPDIR"] = folder
    _ground = Ground()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A run that is killed leaves nothing behind: a nursery ends with the process that had it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _log() -> Path:
    return Path(os.environ["TMPDIR"]) / f"log-{os.getpid()}"


def _measure(task: str) -> dict[str, Any]:
    assert _ground is not None
    return mapping.measure(_ground, task, _log())


def _judge(mutant: Mutant, items: Sequence[Item], left: int) -> tuple[Mutant, Judgement]:
    assert _ground is not None
    if not items:
        return mutant, Judgement("", "", "nothing reaches it", 0.0, 0, 0)
    source = sources([mutant])[mutant.id]
    return mutant, judge(_ground, mutant.module, source, items, _log(), left)


@contextlib.contextmanager
def _pool(jobs: int, folder: Path) -> Iterator[ProcessPoolExecutor]:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, _prepare, (str(folder),)) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    shutil.rmtree(folder, ignore_errors=True)


def measured(pool: ProcessPoolExecutor, kept: Path) -> Map:
    """The map, from an earlier run or measured now."""
    file = kept / "map.jsonl"
    parts = {}
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            part = json.loads(line)
            parts[part["task"]] = part
    open_tasks = [task for task in mapping.tasks() if task not in parts]
    began = time.monotonic()
    waiting = {pool.submit(_measure, task): task for task in open_tasks}
    with file.open("a", encoding="utf-8") as out:
        for number, done in enumerate(as_completed(waiting), 1):
            part = {"task": waiting[done], **done.result()}
            parts[part["task"]] = part
            out.write(json.dumps(part) + "\n")
            out.flush()
            _progress(f"measured {part['task']}", began, number, len(open_tasks))
    found = Map()
    for task in mapping.tasks():
        found.take(parts[task])
    return found


def _progress(what: str, began: float, done: int, of: int) -> None:
    spent = time.monotonic() - began
    print(f"{spent / 60:5.1f} min, about {spent / done * (of - done) / 60:4.1f} more: {what}", flush=True)


def judged(pool: ProcessPoolExecutor, found: Map, chosen: Sequence[Mutant], file: Path) -> dict[str, Row]:
    """A row for each mutant, from an earlier run or judged now."""
    rows = _rows(file)
    past = _past()
    waiting = {}
    for mutant in chosen:
        if mutant.id not in rows:
            items, left = mapping.items(found, mapping.reached(found, mutant), past.get(mutant.id, ()))
            waiting[pool.submit(_judge, mutant, items, left)] = mutant
    began = time.monotonic()
    with file.open("a", encoding="utf-8") as out:
        for number, done in enumerate(as_completed(waiting), 1):
            mutant, judgement = done.result()
            row = {"id": mutant.id, **asdict(mutant), **asdict(judgement)}
            rows[mutant.id] = row
            out.write(json.dumps(row) + "\n")
            out.flush()
            _progress(_one(row), began, number, len(waiting))
    return rows


def _rows(file: Path) -> dict[str, Row]:
    if not file.exists():
        return {}
    rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return {row["id"]: row for row in rows}


def _past() -> dict[str, tuple[str, ...]]:
    """What killed a mutant when sources or tests were others: it is tried first."""
    found: dict[str, tuple[str, ...]] = {}
    for file in sorted(KEPT.glob("*/results*.jsonl"), key=lambda file: file.stat().st_mtime):
        for key, row in _rows(file).items():
            if row["how"]:
                found[key] = (row["by"], *row["by"].split())
    return found


def _one(row: Row) -> str:
    where = f"{row['id']} {row['module'].removeprefix('kvc_conformance.')}:{row['line']}"
    change = f"{_short(row['before'])} -> {_short(row['after'])}"
    how = f"{row['how']}, {row['by']}" if row["how"] else f"SURVIVES {row['tried']} items"
    return f"{where} {row['seconds']:.1f} s {how}: {change}"


def _short(code: str, width: int = 60) -> str:
    code = " ".join(code.split())
    return code if len(code) <= width else f"{code[: width // 2]} ... {code[-width // 2 :]}"


def _change(before: str, after: str) -> str:
    """Both on one line each, cut to where they differ."""
    before, after = " ".join(before.split()), " ".join(after.split())
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False)))
    start = max(0, same - 30)
    cut = [f"{'...' * (start > 0)}{_short(text[start:], 90)}" for text in (before, after)]
    return " &rarr; ".join(f"`{text.replace('|', chr(92) + '|')}`" for text in cut)


def reasons() -> dict[str, str]:
    """Why a survivor may live, by its id."""
    entries = tomllib.loads(SURVIVORS.read_text(encoding="utf-8"))
    return {key: entry["why"] for key, entry in entries.items()}


def idle() -> list[str]:
    """Ids that are justified, of mutants that are no more."""
    alive = {mutant.id for name in modules() for mutant in mutants(name)}
    return sorted(reasons().keys() - alive)


def page(rows: Sequence[Row], seed: int, total: int) -> tuple[str, bool]:
    """`docs/mutants.md`, and whether all is well."""
    killed = [row for row in rows if row["how"]]
    share = len(killed) / len(rows)
    died = Counter(row["how"] for row in killed)
    why = reasons()
    lines = [
        "# Mutants of the suite's checks",
        "",
        "Written by `make mutants`. A mutant is one module with one change; it is killed if the suite's own",
        "tests, a plugin that is wrong on purpose, or one that is sound notices it. What is changed, and",
        "what is left out as wording, stands in `tests/mutants/mutating.py`; how a mutant is judged, in",
        "`tests/mutants/judging.py`.",
        "",
        f"Of {total:,} mutants {len(rows)} were drawn with seed {seed}, of each module its share.",
        f"**{len(killed)} were killed, {share:.1%}**; at least {BOUND:.0%} must be.",
        f"Of those, {died['objection']} were objected to: a test, a clause or a verdict said so;",
        f"{died['crash']} crashed the suite; {died['time']} did not end.",
        "",
        "| module | mutants | killed | objection | crash | no end |",
        "| --- | --: | --: | --: | --: | --: |",
    ]
    for name in modules():
        mine = [row for row in rows if row["module"] == name]
        if mine:
            by = Counter(row["how"] for row in mine)
            part = 1 - by[""] / len(mine)
            ways = " | ".join(str(by[how]) for how in ("objection", "crash", "time"))
            lines.append(f"| `{name}` | {len(mine)} | {part:.0%} | {ways} |")
    survivors = [row for row in rows if not row["how"]]
    unjustified = [row for row in survivors if row["id"] not in why]
    lines += ["", "## Survivors", ""]
    lines += [
        "`met`: how many of the items that reach it met it, before its time was up; a line that nothing"
    ]
    lines += ["reaches is met by none.", ""]
    lines += ["| id | where | change | met | why it may live |", "| --- | --- | --- | --- | --- |"]
    for row in sorted(survivors, key=lambda row: (row["module"], row["line"], row["id"])):
        where = f"`{row['module']}`:{row['line']} `{row['function']}`"
        reason = why.get(row["id"], "UNJUSTIFIED")
        met = f"{row['tried']} of {row['tried'] + row['left']}"
        lines.append(f"| {row['id']} | {where} | {_change(row['before'], row['after'])} | {met} | {reason} |")
    return "\n".join(lines) + "\n", share >= BOUND and not unjustified


def show(chosen: Mutant) -> None:
    """Print a mutant as a difference."""
    before = modules()[chosen.module].read_text(encoding="utf-8").splitlines(keepends=True)
    after = sources([chosen])[chosen.id].splitlines(keepends=True)
    name = str(modules()[chosen.module].relative_to(ROOT))
    sys.stdout.writelines(difflib.unified_diff(before, after, name, f"{name} ({chosen.id})"))


def repeat(wanted: str, jobs: int, kept: Path) -> int:
    """Judge one mutant anew, and show it."""
    chosen = next((one for name in modules() for one in mutants(name) if one.id == wanted), None)
    if chosen is None:
        print(f"there is no mutant {wanted}")
        return 2
    show(chosen)
    with _pool(jobs, kept / "tmp") as pool:
        found = measured(pool, kept)
        items, left = mapping.items(found, mapping.reached(found, chosen))
        for item in items:
            print(f"{item.seconds:6.1f} s {item.kind}: {' '.join(item.names)} {' '.join(item.clauses)}")
        _, judgement = pool.submit(_judge, chosen, items, left).result()
    print(judgement)
    return 0 if judgement.how else 1


def main() -> int:
    """Run what the command line says; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=COUNT, help="how many mutants are drawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes that judge")
    parser.add_argument("--module", help="of this module alone, such as checks.golden; no page is written")
    parser.add_argument("--only", metavar="ID", help="show one mutant, and judge it anew")
    given = parser.parse_args()
    kept = KEPT / state(mapping.paths())
    results = kept / f"results-{state(sorted(Path(__file__).parent.glob('*.py')))}.jsonl"
    kept.mkdir(parents=True, exist_ok=True)
    if given.only:
        return repeat(given.only, 1, kept)
    began = time.monotonic()
    chosen = sample(given.count, given.seed, given.module)
    with _pool(given.jobs, kept / "tmp") as pool:
        found = measured(pool, kept)
        rows = judged(pool, found, chosen, results)
    mine = [rows[mutant.id] for mutant in chosen]
    text, well = page(mine, given.seed, sum(len(mutants(name)) for name in modules()))
    if given.module is None and given.count == COUNT:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text)
    stale = idle()
    if stale:
        print(f"justified, and no mutants any more: {', '.join(stale)}")
    print(f"{(time.monotonic() - began) / 60:.1f} min")
    return 0 if well and not stale else 1


if __name__ == "__main__":
    sys.exit(main())

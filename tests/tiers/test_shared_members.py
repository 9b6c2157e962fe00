"""The shared-directory tier with several real processes: killed at random, and stores that meet in it."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcontract.core.lane import InlineLane
from kvcontract.tiers.base import Buffers, Code, Lease, RecordKeys, SaveClass, Tier, record_keys
from kvcontract.tiers.shared import SharedTier

FOREVER = math.inf
BLOCK = 4096
CAPACITY = 24 * BLOCK
NUMBERS = 40
MEMBERS = 3
BUDGET_S = 8.0
LIMIT_S = 120.0


def keys_of(*numbers: int) -> RecordKeys:
    """One record key a number."""
    return record_keys(np.array([[number, number] for number in numbers], np.uint64), 0, 0, 1)


def content(number: int) -> NDArray[np.uint8]:
    """The bytes, and the size, that belong to a number."""
    return np.random.default_rng(number).integers(0, 256, 1 + 401 * number, np.uint8)


def save(tier: Tier, numbers: list[int], cls: SaveClass, handoff: str | None = None) -> list[int]:
    """Save the content of numbers in one batch."""
    buffers = Buffers.of([content(number) for number in numbers])
    codes: list[int] = (
        tier.save(keys_of(*numbers), buffers, cls, FOREVER, handoff=handoff).wait(60.0).tolist()
    )
    return codes


def check(tier: Tier, lease: Lease, numbers: list[int]) -> int:
    """Load what a lease has; each is equal, or has a code that says why not."""
    target = [np.zeros(content(number).nbytes, np.uint8) for number in numbers]
    codes = tier.load(lease, np.arange(len(numbers)), Buffers.of(target), FOREVER).wait(60.0)
    good = 0
    for number, code, array, here in zip(numbers, codes.tolist(), target, lease.present, strict=True):
        if code == Code.OK and array.tobytes() != content(number).tobytes():
            raise AssertionError(f"record {number} has other bytes")
        if here and code != Code.OK:
            raise AssertionError(f"record {number} was leased, and came to {Code(code).name}")
        good += code == Code.OK
    return good


def member(home: Path, seed: int) -> None:
    """Save, look up, load, hold and hand off at random; a line for each round, until it is killed."""
    rng = random.Random(seed)
    tier = SharedTier(home, CAPACITY, touch_s=0.0, sweep_s=0.2, handoff_ttl_s=0.3, lease_s=5.0)
    held: list[tuple[Lease, list[int]]] = []
    while True:
        numbers = [rng.randrange(NUMBERS) for _ in range(rng.randint(1, 6))]
        handoff = rng.choice([None, None, "a", "b"])
        codes = save(tier, numbers, SaveClass.HANDOFF if handoff else SaveClass.CACHEABLE, handoff)
        if not set(codes) <= {Code.OK, Code.FULL}:
            raise AssertionError(f"codes {codes}, faults {list(tier.faults)}")
        if rng.random() < 0.5:
            tier.release_handoff("a")
        wanted = [rng.randrange(NUMBERS) for _ in range(4)]
        held.append((tier.lookup(keys_of(*wanted), FOREVER).wait(60.0), wanted))
        if len(held) > 3:
            lease, looked = held.pop(rng.randrange(len(held)))
            with lease:
                loaded = check(tier, lease, looked)
            print(f"loaded {loaded}", flush=True)  # noqa: T201 - what the parent waits for


def start(home: Path, seed: int) -> subprocess.Popen[str]:
    """A member in a process of its own."""
    command = [sys.executable, __file__, str(home), str(seed)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def kill(process: subprocess.Popen[str]) -> str:
    """End a member without a warning; returns what it complained of before."""
    process.kill()
    _, complaint = process.communicate(timeout=30.0)
    return complaint


def test_h4_r7_members_killed_at_random_leave_absent_or_equal(tmp_path: Path) -> None:
    """H4, H5, R3, R5, R7: whoever is killed when, records are absent or equal, and nothing stays behind."""
    home, rng, began = tmp_path / "store", random.Random(7), time.monotonic()
    live = [start(home, seed) for seed in range(MEMBERS)]
    seed, killed, lines = MEMBERS, 0, 0
    complaints = []
    watchdog = threading.Timer(LIMIT_S, lambda: [process.kill() for process in live])
    watchdog.daemon = True
    watchdog.start()
    while killed < MEMBERS or time.monotonic() - began < BUDGET_S:
        victim = rng.randrange(MEMBERS)
        stdout = live[victim].stdout
        assert stdout is not None
        for _ in range(rng.randint(1, 60)):
            if not stdout.readline():
                break  # it ended by itself, and says why
            lines += 1
        complaints.append(kill(live[victim]))
        live[victim] = start(home, seed)
        seed, killed = seed + 1, killed + 1
    complaints += [kill(process) for process in live]
    watchdog.cancel()
    assert time.monotonic() - began < LIMIT_S
    assert [text for text in complaints if text] == []
    assert lines > 50

    for path in (home / "leases").iterdir():
        path.unlink()  # instead of waiting until they end
    last = SharedTier(home, CAPACITY, lane=InlineLane(), leftover_s=-1.0)
    with last.lookup(keys_of(*range(NUMBERS)), FOREVER).value as lease:
        assert check(last, lease, list(range(NUMBERS))) == int(lease.present.sum()) > 0
    files = [path for path in (home / "records").rglob("*") if path.is_file()]
    assert all(len(path.name) == 42 for path in files)
    stats = last.stats()
    assert stats["records"] == len(files)
    assert stats["used_bytes"] == sum(-(-path.stat().st_size // BLOCK) * BLOCK for path in files)
    assert save(last, list(range(NUMBERS)), SaveClass.CACHEABLE) == [Code.OK] * NUMBERS
    assert last.stats()["used_bytes"] <= CAPACITY
    assert list(last.faults) == []


STORE = """
import sys
from pathlib import Path
import torch
from kvcontract import (Arena, BlockPool, Field, Group, KvModel, KvStore, Rank, Scope, WeightIdentity, admit)
from kvcontract.contract.layout import layout
from kvcontract.memory.binding import Binding
from kvcontract.tiers.shared import SharedTier

model = KvModel(
    contract=1, name="pair", weights=WeightIdentity(kind="digest", value="0" * 32), numerics="float16",
    page_tokens=4, groups=(Group(name="kv"),),
    arenas=(Arena.planes(name="a", group="kv", fields=(Field(name="k", dtype="float16", axes={"dim": 8}),)),),
)
prompt = list(range(13))
pool = BlockPool(9, 4)
binding = Binding.allocate(layout(model).space("full"), 9)
[view] = binding.views.values()
tier = SharedTier(Path(sys.argv[1]), 1 << 20, meta={"max_tp": 8})
store = KvStore(model, [Rank(pool, {"full": binding})], [tier], save_budget=1.0)
if sys.argv[2] == "write":
    req = admit(pool, prompt_tokens=prompt, max_new_tokens=2, keyer=store.keyer, scope=Scope())
    chunk = req.schedule_prefill(32)
    for page in chunk.pages["full"].tolist():
        view[page] = float(page)
    req.apply_prefill(chunk, 1)
    print(store.retire(req).wait(30.0).saved, store.flush())
else:
    prefix = store.resolve("0", prompt)
    pages = prefix.hold.pages.tolist()
    print(prefix.hit_tokens, dict(prefix.sources), [set(view[page].flatten().tolist()) for page in pages])
    prefix.release()
print(store.close(30.0).drained)
"""


def run_store(home: Path, role: str) -> list[str]:
    """One store in a process of its own, from build to close; its words."""
    command = [sys.executable, "-W", "error", "-c", STORE, str(home), role]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_h9_a_prefix_of_one_process_hits_in_another(tmp_path: Path) -> None:
    """R1, H9: what a store retires in one process a store in the next restores, byte for byte."""
    home = tmp_path / "store"
    saved, drained = run_store(home, "write")
    assert (saved, drained) == ("3 True", "True")
    hit, drained = run_store(home, "read")
    assert hit.startswith("12 {'shared': 12}")
    values: Any = hit.split("} ", 1)[1]
    assert values == "[{1.0}, {2.0}, {3.0}]"
    assert drained == "True"


if __name__ == "__main__":
    member(Path(sys.argv[1]), int(sys.argv[2]))

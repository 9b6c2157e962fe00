"""A store over a disk tier: what one process saved the next one hits, another model not (R7, D6, I8)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from kvcontract.tiers import disk_audit

PAGES = 2000

ENGINE = """
import json, sys
from pathlib import Path
import numpy as np, torch
from kvcontract import Arena, BlockPool, Field, Group, KvModel, KvStore, Rank, Scope, WeightIdentity, admit
from kvcontract.contract.layout import layout
from kvcontract.memory.binding import Binding
from kvcontract.tiers.disk import DiskTier

home, verb, weights, pages, flips = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5:]
PAGE = 4
plane = Field(name="kv", dtype="uint8", axes={"head": 2, "dim": 8}, shard_axis="head")
model = KvModel(
    contract=1, name="toy", weights=WeightIdentity(kind="digest", value=weights), numerics="test",
    page_tokens=PAGE, groups=(Group(name="kv"),),
    arenas=tuple(Arena.planes(name=f"layer.{i}", group="kv", layer=i, fields=(plane,)) for i in range(2)),
)
binding = Binding.allocate(layout(model).space("full"), pages + 4)
rank = Rank(BlockPool(pages=pages + 4, page_tokens=PAGE), {"full": binding})
tier = DiskTier(home, 64 << 20, meta={"max_tp": 8}, direct=False)
tokens = np.random.default_rng(1).integers(0, 1000, pages * PAGE + 1)
content = torch.from_numpy(np.random.default_rng(2).integers(0, 256, (pages, PAGE, 2, 2, 8), np.uint8))
with KvStore(model, [rank], [tier]) as store:
    prefix = store.resolve("0", tokens, Scope(salt="the tenant's salt"), label="it")
    wrong = 0
    if prefix.hold is not None:
        for page, block in enumerate(prefix.hold.pages.tolist()):
            for layer in range(2):
                found = binding.views[f"layer.{layer}", "kv"][block]
                wrong += int(not torch.equal(found, content[page, :, layer]))
    if verb == "write":
        req = admit(rank.pool, prompt_tokens=tokens, max_new_tokens=1, keyer=store.keyer,
                    scope=Scope(salt="the tenant's salt"), prefix=prefix)
        chunk = req.schedule_prefill(len(tokens))
        for page, block in enumerate(chunk.pages["full"].tolist()[:pages]):
            for layer in range(2):
                binding.views[f"layer.{layer}", "kv"][block] = content[page, :, layer]
        req.apply_prefill(chunk, 1)
        while store.seal(req).wait(60).pages:
            pass
        store.retire(req).wait(60)
        durable = store.flush("durable", 60)
    else:
        prefix.release()
        durable = None
    print(json.dumps({
        "hit": prefix.hit_tokens, "wrong": wrong, "durable": durable, "explained": str(store.explain("it")),
        "stats": store.tier_stats()["disk"], "fingerprint": store.fingerprint.parts["full"].hex(),
        "faults": [repr(fault) for fault in tier.faults],
    }))
"""


def engine(home: Path, verb: str, weights: str) -> dict[str, Any]:
    """One process: an engine that starts, serves one prompt, and ends."""
    command = [sys.executable, "-W", "error", "-c", ENGINE, str(home), verb, weights, str(PAGES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["faults"] == []
    return found


def test_r7_d6_i8_what_one_process_saved_the_next_one_hits(tmp_path: Path) -> None:
    """R7: 2,000 pages come back whole; D6, I8: with other weights nothing hits, and the reason is told."""
    home = tmp_path / "store"
    first = engine(home, "write", "abc")
    assert (first["hit"], first["durable"]) == (0, True)
    again = engine(home, "read", "abc")
    assert (again["hit"], again["wrong"]) == (4 * PAGES, 0)
    assert again["stats"]["load_ok"] >= PAGES
    other = engine(home, "read", "other weights")
    assert other["hit"] == 0
    assert "disk: " in other["explained"]
    assert other["stats"]["misses"] > 0
    assert other["stats"]["hits"] == other["stats"]["load_ok"] == 0
    assert other["stats"]["records"] == again["stats"]["records"]
    groups = disk_audit.groups(disk_audit.inventory(home))
    assert {row["fingerprint"] for row in groups} == {first["fingerprint"]}
    assert other["fingerprint"] != first["fingerprint"]


def test_d4_no_salt_and_no_token_ids_in_the_directory(tmp_path: Path) -> None:
    """D4: names and index hold keys under the fleet's secret, never what they were made from."""
    home = tmp_path / "store"
    engine(home, "write", "abc")
    tokens = np.random.default_rng(1).integers(0, 1000, 8)
    secrets = [b"tenant", *(tokens.astype(kind).tobytes() for kind in ("<u2", "<u4", "<u8"))]
    for path in home.rglob("*"):
        assert "salt" not in path.name
        content = path.read_bytes() if path.is_file() else b""
        assert not any(secret in content for secret in secrets), path

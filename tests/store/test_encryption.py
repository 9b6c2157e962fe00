"""Records encrypted with keys of their scopes, from the device to the disk and back (D4, E7)."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench_store import PAGE, SCOPE, Setup, model_of, prompt, row, setup

from kvcontract import (
    BlockPool,
    Encryption,
    FleetSecret,
    KvStore,
    Rank,
    RequestKv,
    Scope,
    StoreOptions,
    TierPolicy,
    WeightIdentity,
    admit,
)
from kvcontract.contract.errors import UsageFault
from kvcontract.contract.layout import layout
from kvcontract.memory.binding import Binding
from kvcontract.store.policy import ResolvePolicy
from kvcontract.tiers import disk_audit
from kvcontract.tiers.base import RecordKeys, SaveClass
from kvcontract.tiers.cipher import key_id
from kvcontract.tiers.disk import DiskTier
from kvcontract.tiers.dram import DramTier
from kvcontract.tiers.frame import CLEAR, FrameHeader, decode, encode

pytest.importorskip("cryptography")

TOKENS = prompt(4)
A, B = b"key of tenant a, 32 bytes long!!", b"key of tenant b, 32 bytes long!!"
NAMED = model_of(weights=WeightIdentity(kind="digest", value="abc"))
SECRET = FleetSecret(b"s" * 32)


def crypt(key_of: Callable[[Scope], str | None] = lambda _: "a", **keys: bytes) -> Encryption:
    """Keys by name."""
    return Encryption(keys or {"a": A}, key_of)


def lasting(encryption: Encryption | None, *, tiers: int = 2, back: bool = False, **more: Any) -> Any:
    """A set-up whose lower tiers claim to outlive the process."""
    policies = {"disk": TierPolicy(write="back")} if back else {}
    return setup(
        tiers=tiers,
        model=NAMED,
        secret=SECRET,
        claims={"disk": {"persistent": True}, "far": {"shared": True}},
        options=StoreOptions(encryption=encryption, tiers=policies),
        **{"max_tp": 1, **more},
    )


def records(s: Setup) -> RecordKeys:
    """Names of the prompt's records."""
    keys = s.store.keyer.chain(TOKENS[: 4 * PAGE], SCOPE)
    return s.store._core.pages.workers["0"].record_keys(keys)


def slots(s: Setup, tier: int) -> list[np.ndarray]:
    """Views of the records that a tier has."""
    inner = s.tiers[tier].inner
    with inner.lookup(records(s), math.inf).value as lease:
        entries = lease.receipt.entries if lease.present.any() else ()
        return [
            np.frombuffer((ctypes.c_uint8 * slot.record_bytes).from_address(slot.address), np.uint8)
            for slot, _ in filter(None, entries)
        ]


def headers(s: Setup, tier: int) -> list[FrameHeader]:
    """Of those."""
    return [decode(record.tobytes()) for record in slots(s, tier)]


def plain() -> bytes:
    """What a row of the prompt leaves in the first layer."""
    return row(TOKENS[:1])[0].tobytes()


def lose(s: Setup, tier: int = 0) -> None:
    """A tier drops what it has."""
    s.evict()
    keys = records(s)
    with s.tiers[tier].inner.lookup(keys, math.inf).value as lease:
        s.tiers[tier].inner.discard(lease, np.arange(len(keys)))


def hit(s: Setup, tokens: list[int] = TOKENS) -> dict[str, int]:
    """Where a resolve finds the prompt; what it finds is right."""
    prefix = s.loop.run(s.resolve(tokens))
    if prefix.hit_tokens:
        s.check_content(tokens, prefix)
    prefix.release()
    return dict(prefix.sources)


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_what_leaves_the_process_is_encrypted_and_comes_back(tp: int, *, back: bool) -> None:
    """DRAM in the clear, the disk not; whole after a restore, saved straight or by relay."""
    with lasting(crypt(), back=back, tp=tp, max_tp=2) as s:
        assert s.store.retire(s.compute(TOKENS)).value.saved == 4
        assert {header.seal for header in headers(s, 0)} == {CLEAR}
        assert {header.seal[:8] for header in headers(s, 1)} == {key_id(A)}
        assert not any(plain() in record.tobytes() for record in slots(s, 1))
        lose(s)
        assert hit(s) == {"disk": 4 * PAGE}
        assert {header.seal for header in headers(s, 0)} == {CLEAR}  # promoted


def test_each_scope_has_its_own_key_or_none() -> None:
    """`key_of` decides for each scope; None: in the clear, as the operator said."""
    chosen: list[str | None] = ["b", None]
    for name in chosen:
        with lasting(crypt(lambda _, name=name: name, a=A, b=B)) as s:
            s.store.retire(s.compute(TOKENS))
            found = {header.seal[:8] for header in headers(s, 1)}
            assert found == {key_id(B) if name else CLEAR[:8]}
            lose(s)
            assert hit(s) == {"disk": 4 * PAGE}


def test_rotation_writes_with_the_new_key_and_reads_with_both() -> None:
    """Old records stay readable as long as their key is known."""
    now = ["a"]
    with lasting(crypt(lambda _: now[0], a=A, b=B)) as s:
        s.store.retire(s.compute(TOKENS[: 2 * PAGE + 1]))
        now[0] = "b"
        s.store.retire(s.compute(TOKENS))
        assert [header.seal[:8] for header in headers(s, 1)] == [key_id(A)] * 2 + [key_id(B)] * 2
        lose(s)
        assert hit(s) == {"disk": 4 * PAGE}


def _seal(record: np.ndarray, at: int) -> None:
    """Change a byte of the seal and make the frame's own sum right again."""
    header = decode(record.tobytes())
    assert isinstance(header, FrameHeader)
    seal = bytearray(header.seal)
    seal[at] ^= 1
    sizes, sums = zip(*header.segments, strict=True)
    made = encode(header.fingerprint, header.key, sizes, sums, bytes(seal))
    record[: len(made)] = np.frombuffer(made, np.uint8)


TAMPERED: dict[str, tuple[Callable[[np.ndarray], object], str]] = {
    "frame": (lambda record: record.__setitem__(100, record[100] ^ 1), "flaw_corrupt_header"),
    "nonce": (lambda record: _seal(record, 9), "flaw_wrong_tag"),
    "tag": (lambda record: _seal(record, 30), "flaw_wrong_tag"),
    "payload": (lambda record: record.__setitem__(-1, record[-1] ^ 1), "flaw_corrupt_payload"),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_e7_a_record_that_was_tampered_with_is_quarantined(what: str) -> None:
    """E7: every field is covered, by the frame's sum, a segment's, or the tag; the page is saved anew."""
    change, flaw = TAMPERED[what]
    with lasting(crypt()) as s:
        s.store.retire(s.compute(TOKENS))
        lose(s)
        change(slots(s, 1)[2])
        assert hit(s) == {"disk": 2 * PAGE}
        assert s.store._core.pages.workers["0"][0].stats()[flaw] == 1
        assert len(slots(s, 1)) == 3
        s.store.retire(s.compute(TOKENS, s.loop.run(s.resolve(TOKENS))))
        lose(s)
        assert hit(s) == {"disk": 4 * PAGE}


def test_e7_a_payload_under_another_key_with_right_sums_does_not_open() -> None:
    """E7: frames and sums can be forged without a key; what the tag covers cannot."""
    with lasting(crypt()) as s:
        s.store.retire(s.compute(TOKENS))
        lose(s)
        one, other = slots(s, 1)[:2]
        mine, its = headers(s, 1)[:2]
        sizes, sums = zip(*its.segments, strict=True)
        forged = encode(mine.fingerprint, mine.key, sizes, sums, its.seal)
        one[: len(forged)] = np.frombuffer(forged, np.uint8)
        one[len(forged) :] = other[len(forged) :]
        assert hit(s) == {}
        assert s.store._core.pages.workers["0"][0].stats()["flaw_wrong_tag"] == 1


def test_an_unknown_key_is_a_miss_and_the_record_stays() -> None:
    """Another engine may know the key: nothing is quarantined, and nothing is decrypted with another."""
    with lasting(crypt()) as s:
        s.store.retire(s.compute(TOKENS))
        lose(s)
        s.store._core.cipher._keys.clear()
        assert hit(s) == {}
        assert len(slots(s, 1)) == 4
        assert s.store._core.pages.workers["0"][0].stats()["flaw_unknown_key"] == 4
        s.store._core.cipher._keys[key_id(A)] = A
        assert hit(s) == {"disk": 4 * PAGE}


def test_a_record_in_the_clear_is_not_taken_where_its_scope_has_a_key() -> None:
    """Whoever can write to the disk cannot plant a record; what is there from before is saved anew."""
    now: list[str | None] = [None]
    with lasting(crypt(lambda _: now[0])) as s:
        s.store.retire(s.compute(TOKENS))
        lose(s)
        now[0] = "a"
        assert hit(s) == {}
        assert s.store._core.pages.workers["0"][0].stats()["flaw_not_encrypted"] == 4
        s.store.retire(s.compute(TOKENS))
        assert {header.seal[:8] for header in headers(s, 1)} == {key_id(A)}


@pytest.mark.parametrize("back", [False, True])
def test_without_a_key_nothing_leaves_the_process(monkeypatch: pytest.MonkeyPatch, *, back: bool) -> None:
    """A function that fails, or names no key, costs saves: it is told and counted, and nothing is clear."""
    told: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    with lasting(crypt(lambda _: "nobody"), back=back) as s:
        report = s.store.retire(s.compute(TOKENS)).value
        assert len(slots(s, 0)) == 4
        assert slots(s, 1) == []
        assert report.failed == ({} if back else {"refused": 4})
        assert s.store.stats().counters["scopes_without_key"] == 1
        assert "key_of names 'nobody'" in str(told[0].exc_value)


def test_a_relay_encrypts_what_is_in_the_clear_from_before() -> None:
    """From one lasting tier to the next: records that were stored before keys were given do not go on so."""
    now: list[str | None] = [None]
    policies = {"far": TierPolicy(write="back")}
    options = StoreOptions(encryption=crypt(lambda _: now[0]), tiers=policies)
    claims = {"disk": {"persistent": True}, "far": {"shared": True}}
    with setup(tiers=3, model=NAMED, secret=SECRET, claims=claims, options=options, max_tp=1) as s:
        s.tiers[2].codes["save"] = lambda codes: codes + 9
        s.store.retire(s.compute(TOKENS))
        s.tiers[2].codes.clear()
        now[0] = "a"
        s.store.retire(s.compute(TOKENS, s.loop.run(s.resolve(TOKENS))))
        assert {header.seal for header in headers(s, 1)} == {CLEAR}
        assert {header.seal[:8] for header in headers(s, 2)} == {key_id(A)}


def test_c7_a_handoff_is_encrypted_too() -> None:
    """C7: what another process fetches lies in a shared tier."""
    with lasting(crypt(), tiers=3) as s:
        s.store.retire(s.compute(TOKENS), SaveClass.HANDOFF, handoff="request")
        assert {header.seal[:8] for header in headers(s, 2)} == {key_id(A)}
        assert s.loop.run(s.store.aflush_handoff("request")).confirmed
        s.store.release_handoff("request")


def test_keys_are_checked_when_a_store_is_built() -> None:
    """All faults at once, and no key in any of them (D4)."""
    with pytest.raises(UsageFault) as caught:
        KvStore(NAMED, [], options=StoreOptions(encryption=crypt(x=b"short"), tiers={"dsk": TierPolicy()}))
    assert "encryption key 'x': expected 32 bytes" in str(caught.value)
    assert "a policy for tier 'dsk'" in str(caught.value)
    assert "short" not in str(caught.value)


# On a real disk


def serve(store: KvStore, rank: Rank, binding: Binding, tokens: list[int]) -> int:
    """One request, from resolve to retire, whose rows name its tokens; its hit."""
    prefix = store.resolve("0", tokens, SCOPE, ResolvePolicy())
    found = prefix.hit_tokens
    pages = [] if prefix.hold is None else prefix.hold.pages.tolist()
    for at in range(found):
        for layer in range(2):
            got = binding.views[f"layer.{layer}", "kv"][pages[at // PAGE], at % PAGE].numpy()
            assert (got == row(tokens[: at + 1])[layer]).all()
    req = admit(
        rank.pool, prompt_tokens=tokens, max_new_tokens=1, keyer=store.keyer, scope=SCOPE, prefix=prefix
    )
    assert isinstance(req, RequestKv)
    chunk = req.schedule_prefill(len(tokens))
    for at in range(chunk.start, chunk.end):
        for layer in range(2):
            content = torch.from_numpy(row(tokens[: at + 1])[layer].copy())
            binding.views[f"layer.{layer}", "kv"][int(chunk.pages["full"][at // PAGE]), at % PAGE] = content
    req.apply_prefill(chunk, 5)
    store.retire(req).wait(30.0)
    return found


def engine(path: Path, encryption: Encryption | None, tokens: list[int], **policies: TierPolicy) -> int:
    """A process over a disk: serves one request, and is gone."""
    pool = BlockPool(pages=16, page_tokens=PAGE)
    binding = Binding.allocate(layout(NAMED).space("full"), blocks=16)
    rank = Rank(pool, {"full": binding})
    tiers = [DramTier(1 << 20), DiskTier(path, 1 << 22)]
    options = StoreOptions(encryption=encryption, save_budget=1.0, tiers=policies, max_tp=1)
    with KvStore(NAMED, [rank], tiers, options=options) as store:
        found = serve(store, rank, binding, tokens)
        assert store.flush("durable")
        shown = repr(store.stats()) + repr(store.tier_stats()) + repr(options) + repr(store.take_events())
        assert not any(key.decode() in shown or key.hex() in shown for key in (A, B))
    return found


@pytest.mark.parametrize("back", [False, True])
def test_d4_neither_content_nor_key_is_on_the_disk(tmp_path: Path, *, back: bool) -> None:
    """D4: no row of the prompt and no key in any file; whole without a key, restored by the next process."""
    policies = {"disk": TierPolicy(write="back")} if back else {}
    assert engine(tmp_path, crypt(), TOKENS, **policies) == 0
    rows = [row(TOKENS[: at + 1])[layer].tobytes() for at in range(4 * PAGE) for layer in range(2)]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    content = b"".join(path.read_bytes() for path in files)
    assert content
    assert not any(part in content for part in (*rows, A, A.hex().encode()))
    verdict = disk_audit.verify(tmp_path, lambda *_: None)
    assert (verdict.whole, verdict.records % 4, verdict.records > 0) == (True, 0, True)
    assert engine(tmp_path, crypt(), TOKENS, **policies) == 4 * PAGE
    assert engine(tmp_path, crypt(lambda _: "b", b=B), TOKENS, **policies) == 0
    assert engine(tmp_path, crypt(lambda _: "b", a=A, b=B), TOKENS, **policies) == 4 * PAGE


def test_the_same_content_is_readable_without_encryption(tmp_path: Path) -> None:
    """What the test above looks for is there when nothing is encrypted."""
    engine(tmp_path, None, TOKENS)
    content = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert row(TOKENS[:1])[0].tobytes() in content


def test_e7_what_is_encrypted_is_a_miss_without_keys(tmp_path: Path) -> None:
    """E7, R4: an engine without encryption over the same directory is given no byte of it, and leaves it."""
    assert engine(tmp_path, crypt(), TOKENS) == 0
    assert engine(tmp_path, None, TOKENS) == 0
    assert engine(tmp_path, crypt(), TOKENS) == 4 * PAGE


def test_h10_a_private_tier_is_not_written_back_from_an_encrypted_one() -> None:
    """H10: it would be given what nobody can read there."""
    with (
        pytest.raises(UsageFault, match="'far' stays in this process and is written back from tier 'disk'"),
        setup(
            tiers=3,
            model=NAMED,
            secret=SECRET,
            max_tp=1,
            claims={"disk": {"persistent": True}},
            options=StoreOptions(encryption=crypt(), tiers={"far": TierPolicy(write="back")}),
        ),
    ):
        pass

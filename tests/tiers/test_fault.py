"""A tier whose answers are decided elsewhere: nothing happens before, and then exactly what was chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from kvcontract.contract.errors import UsageFault
from kvcontract.core.lane import InlineLane
from kvcontract.core.pending import Pending
from kvcontract.tiers.base import (
    Buffers,
    Code,
    Lease,
    RecordKeys,
    Resets,
    SaveClass,
    TellsLosses,
    record_keys,
)
from kvcontract.tiers.dram import DramTier
from kvcontract.tiers.fault import FAULTS_OF, Fault, FaultKind, FaultTier, TellingFaultTier

COUNT, SIZE = 4, 40


def keys(count: int = COUNT) -> RecordKeys:
    """Of some pages."""
    pages = np.arange(2 * count, dtype=np.uint64).reshape(count, 2)
    return record_keys(pages, 0, 0, 1)


def filled(count: int = COUNT) -> list[np.ndarray[tuple[int], np.dtype[np.uint8]]]:
    """Records whose bytes name them."""
    return [np.full(SIZE, 10 + number, np.uint8) for number in range(count)]


class Bench:
    """A faulty tier over an empty DRAM tier."""

    def __init__(self) -> None:
        self.inner = DramTier(1 << 16, lane=InlineLane())
        self.tier = TellingFaultTier(self.inner)

    def answered(self, call: Pending[object], fault: Fault | None = None) -> object:
        """What the one call that waits comes to."""
        assert not call.done
        self.tier.answer(self.tier.calls[0], fault)
        return call.value

    def save(self, fault: Fault | None = None) -> list[int]:
        """Codes of a save of every record."""
        op = self.tier.save(keys(), Buffers.of(filled()), SaveClass.CACHEABLE, math.inf)
        return np.asarray(self.answered(op, fault)).tolist()

    def lookup(self, fault: Fault | None = None) -> Lease:
        """The lease of a look-up of every record."""
        lease = self.answered(self.tier.lookup(keys(), math.inf), fault)
        assert isinstance(lease, Lease)
        return lease

    def load(self, fault: Fault | None = None) -> tuple[list[int], list[int]]:
        """Codes, and the first byte of each record, of a load of everything."""
        into = [np.zeros(SIZE, np.uint8) for _ in range(COUNT)]
        with self.lookup() as lease:
            op = self.tier.load(lease, np.arange(COUNT), Buffers.of(into), math.inf)
            codes = np.asarray(self.answered(op, fault)).tolist()
        self.last = into
        return codes, [int(record[0]) for record in into]

    def there(self) -> list[bool]:
        """Which records the tier below has."""
        with self.inner.lookup(keys(), math.inf).value as lease:
            return lease.present.tolist()


def test_nothing_happens_before_the_answer() -> None:
    """Calls wait, in order; answered without a fault they do what the tier below does."""
    bench = Bench()
    assert (bench.save(), bench.there()) == ([0] * COUNT, [True] * COUNT)
    assert bench.load() == ([0] * COUNT, [10, 11, 12, 13])
    assert not bench.tier.calls
    assert bench.inner.stats()["leases"] == 0


OK, BAD = int(Code.OK), int(Code.FAILED)


@pytest.mark.parametrize(
    ("kind", "codes", "there"),
    [
        (FaultKind.FAIL, [BAD] * 4, [False] * 4),
        (FaultKind.SHORT, [OK, OK, Code.SHORT, Code.SHORT], [True, True, False, False]),
        (FaultKind.FULL, [OK, OK, Code.FULL, Code.FULL], [True, True, False, False]),
        (FaultKind.FLIP, [OK] * 4, [True] * 4),
        (FaultKind.LIE, [OK] * 4, [False] * 4),
        (FaultKind.DUPLICATE, [OK] * 4, [True] * 4),
    ],
)
def test_what_befalls_a_save(kind: FaultKind, codes: Sequence[int], there: Sequence[bool]) -> None:
    """Each fault does what it says, and what it says of itself is data."""
    bench = Bench()
    assert (bench.save(Fault(kind, 2)), bench.there()) == (list(codes), list(there))
    changed = [int(number) for number, record in enumerate(_stored(bench)) if len(set(record.tolist())) > 1]
    assert changed == ([2] if kind is FaultKind.FLIP else [])
    assert [call.ghost for call in bench.tier.calls] == ([True] if kind is FaultKind.DUPLICATE else [])


def _stored(bench: Bench) -> list[np.ndarray[tuple[int], np.dtype[np.uint8]]]:
    into = [np.zeros(SIZE, np.uint8) for _ in range(COUNT)]
    with bench.inner.lookup(keys(), math.inf).value as lease:
        rows = np.flatnonzero(lease.present)
        bench.inner.load(lease, rows, Buffers.of(into).take(rows), math.inf)
    return into


def test_a_second_copy_of_a_save_comes_when_nobody_waits() -> None:
    """It has bytes of its own: what it was made from may be anybody's by then; a reset forgets it."""
    bench = Bench()
    records = filled()
    op = bench.tier.save(keys(), Buffers.of(records), SaveClass.CACHEABLE, math.inf)
    bench.tier.answer(bench.tier.calls[0], Fault(FaultKind.DUPLICATE))
    assert op.done
    for record in records:
        record.fill(0)
    bench.inner.reset(math.inf)
    bench.tier.answer(bench.tier.calls[0])
    assert [int(record[0]) for record in _stored(bench)] == [10, 11, 12, 13]
    bench.save(Fault(FaultKind.DUPLICATE))
    assert bench.tier.close(0.0)  # nobody waits for it
    bench.tier.reset(math.inf)
    assert not bench.tier.calls


@pytest.mark.parametrize(
    ("kind", "codes", "first"),
    [
        (FaultKind.FAIL, [BAD] * 4, [0] * 4),
        (FaultKind.SHORT, [OK, OK, Code.SHORT, Code.SHORT], [10, 11, 0, 0]),
        (FaultKind.LIE, [OK] * 4, [0] * 4),
        (FaultKind.REORDER, [OK] * 4, [13, 12, 11, 10]),
        (FaultKind.DUPLICATE, [OK] * 8, [10, 11, 12, 13]),
        (FaultKind.FLIP, [OK] * 4, [10, 11, 12, 13]),
    ],
)
def test_what_befalls_a_load(kind: FaultKind, codes: Sequence[int], first: Sequence[int]) -> None:
    """Bytes and codes; a flipped bit is in one record only."""
    bench = Bench()
    bench.save()
    assert bench.load(Fault(kind, 2)) == (list(codes), list(first))
    flipped = [number for number, record in enumerate(bench.last) if len(set(record.tolist())) > 1]
    assert flipped == ([2] if kind is FaultKind.FLIP else [])


def test_what_befalls_a_look_up() -> None:
    """It fails, tells of everything, of the opposite order, or of twice as many."""
    bench = Bench()
    bench.save(Fault(FaultKind.SHORT, 1))
    found = {}
    for kind in FAULTS_OF["lookup"]:
        with bench.lookup(Fault(kind)) as lease:
            found[kind] = lease.present.tolist()
            assert lease.failed == (kind is FaultKind.FAIL)
    assert found == {
        FaultKind.FAIL: [False] * 4,
        FaultKind.LIE: [True] * 4,
        FaultKind.REORDER: [False, False, False, True],
        FaultKind.DUPLICATE: [True, False, False, False] * 2,
    }
    assert bench.inner.stats()["leases"] == 0


def test_a_flush_waits_for_the_saves_before_it() -> None:
    """C8: answered early, it is told once they are; failed, it says so at once."""
    bench = Bench()
    op = bench.tier.save(keys(), Buffers.of(filled()), SaveClass.CACHEABLE, math.inf)
    flushed = bench.tier.flush("landed", math.inf)
    bench.tier.answer(bench.tier.calls[1])
    assert not flushed.done
    bench.tier.answer(bench.tier.calls[0])
    assert (op.done, flushed.value) == (True, True)
    assert bench.answered(bench.tier.flush("landed", math.inf), Fault(FaultKind.FAIL)) is False


def test_a_place_that_dies_fails_what_waits_and_comes_back_empty() -> None:
    """H9: every verb has its terminal; records are gone; new work goes on."""
    bench = Bench()
    bench.save()
    lease = bench.lookup()
    into = Buffers.of([np.zeros(SIZE, np.uint8)])
    waiting = [
        bench.tier.lookup(keys(), math.inf),
        bench.tier.load(lease, np.array([0]), into, math.inf),
        bench.tier.save(keys(), Buffers.of(filled()), SaveClass.CACHEABLE, math.inf),
        bench.tier.flush("landed", math.inf),
    ]
    assert not bench.tier.close(0.0)
    bench.tier.lose()
    assert [pending.done for pending in waiting] == [True] * 4
    assert (waiting[0].value.failed, waiting[3].value) == (True, False)
    assert (waiting[1].value.tolist(), waiting[2].value.tolist()) == ([BAD], [BAD] * 4)
    lease.release()
    assert bench.there() == [False] * 4
    assert bench.save() == [0] * 4


def test_faults_are_refused_where_they_cannot_befall() -> None:
    """I3: another verb's fault, a call that waits no more, a lease from elsewhere."""
    bench = Bench()
    bench.tier.lookup(keys(), math.inf)
    call = bench.tier.calls[0]
    with pytest.raises(UsageFault, match="no answer: call 0"):
        bench.tier.answer(call, Fault(FaultKind.FULL))
    bench.tier.answer(call)
    with pytest.raises(UsageFault, match="no answer: call 0"):
        bench.tier.answer(call)
    with bench.inner.lookup(keys(), math.inf).value as lease, pytest.raises(UsageFault, match="another tier"):
        bench.tier.load(lease, np.array([0]), Buffers.of(filled(1)), math.inf)


def test_claims_and_abilities_are_what_they_say() -> None:
    """H10: claims replace capabilities; only the telling one tells losses and forgets."""
    inner = DramTier(1 << 16, lane=InlineLane())
    plain, telling = FaultTier(inner, persistent=True), TellingFaultTier(inner)
    assert (plain.capabilities.persistent, telling.capabilities.persistent) == (True, False)
    assert not isinstance(plain, TellsLosses | Resets)
    assert isinstance(telling, TellsLosses)
    assert isinstance(telling, Resets)
    mute = TellingFaultTier(FaultTier(inner))
    with pytest.raises(UsageFault, match="cannot tell"):
        mute.on_loss(lambda *_: None)
    with pytest.raises(UsageFault, match="cannot forget"):
        mute.reset(math.inf)

"""Faults planted in the runtime are found by the suite's scripts, each under the clause that forbids it."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Final

import pytest

from kvc_conformance import report as reports
from kvc_conformance.outcomes import BROKEN
from kvc_conformance.runner import Request, run

PLUGIN: Final = """
    import {family}
    from kvcontract import hookimpl

    KVC_CONTRACT = 1

    def plant():
        {plant}

    @hookimpl
    def kvc_model(ctx):
        if ctx.config is not None:
            plant()
        return {family}.kvc_model(ctx).model_copy(update={{"name": "planted"}})

    @hookimpl
    def kvc_samples(ctx):
        return {family}.kvc_samples(ctx)
"""
"""A sound plugin in whose process the runtime is spoilt, as somebody might by mistake."""

NEVER_WRITTEN: Final = """
        from kvcontract.store import snapshots
        snapshots.take_snapshots = lambda workers, pairs: ()
"""

PUBLISHED_BEFORE_COPIED: Final = """
        from kvcontract.store import snapshots
        from kvcontract.memory.slots import take_snapshots
        waiting = []
        def late(workers, pairs):
            while waiting:
                take_snapshots(*waiting.pop())
            waiting.append((workers, pairs))
            return ()
        snapshots.take_snapshots = late
"""

UNDER_ANOTHER_BOUNDARY: Final = """
        from kvcontract.store.snapshots import Snapshots
        if not hasattr(Snapshots, "honest"):
            Snapshots.honest = Snapshots._snapshot
            def under_another(self, rank, req, boundary):
                size = rank.pool.page_tokens
                return self.honest(rank, req, max(size, boundary - 4 * size))
            Snapshots._snapshot = under_another
"""

TAKEN_LATE: Final = """
        from functools import partial
        from kvcontract.store.snapshots import Snapshots
        def take(self, rank, req):
            boundary = req._last_checkpoint
            taken = self.of(req)
            if not boundary or req.released or (taken and taken[-1].boundary >= boundary):
                return
            self._kept(rank, req, boundary, partial(self._snapshot, rank, req, boundary))
        Snapshots.take = take
"""

FREED_UNDER_A_RESTORE: Final = """
        from kvcontract.pool.holdings import Holdings
        if not hasattr(Holdings, "honest"):
            Holdings.honest = Holdings.adopt
            def adopt(self, held, pages):
                self.honest(held, pages)
                for view in self.slots:
                    view.release()
            Holdings.adopt = adopt
"""

SURPLUS_KEPT: Final = """
        from kvcontract.pool.handles import Hold
        if not hasattr(Hold, "honest"):
            Hold.honest = Hold.trim
            Hold.trim = lambda self, pages: None
"""

NO_ROOM_IS_AN_ERROR: Final = """
        from kvcontract.pool.side import SidePool
        from kvcontract.store.snapshots import Snapshots
        if not hasattr(Snapshots, "honest"):
            Snapshots.honest = Snapshots.take
            def take(self, rank, req):
                if req.checkpoint and any(side.pool.gauges().budget < 1 for side in rank.pool.sides.slots):
                    raise RuntimeError("no slot for a snapshot")
                self.honest(rank, req)
            Snapshots.take = take
"""

SHORT_WINDOW: Final = """
        from kvcontract.pool.sides import Windowed
        if not hasattr(Windowed, "honest"):
            Windowed.honest = Windowed.first
            Windowed.first = lambda self, tokens: self.honest(tokens + 1)
"""

FAULTS: Final = {
    "a snapshot is never written": ("kvc_qwen35", NEVER_WRITTEN, "KVC-BOUNDED-02"),
    "a snapshot is published before it is copied": (
        "kvc_qwen35",
        PUBLISHED_BEFORE_COPIED,
        "KVC-BOUNDED-02",
    ),
    "a snapshot is published under another boundary": (
        "kvc_qwen35",
        UNDER_ANOTHER_BOUNDARY,
        "KVC-BOUNDED-02",
    ),
    "a snapshot is taken a token late": ("kvc_qwen35", TAKEN_LATE, "KVC-BOUNDED-02"),
    "a slot is freed under a restore": ("kvc_qwen35", FREED_UNDER_A_RESTORE, "KVC-BOUNDED-03"),
    "surplus pages are kept": ("kvc_qwen35", SURPLUS_KEPT, "KVC-BOUNDED-04"),
    "no room for a snapshot is an error": ("kvc_qwen35", NO_ROOM_IS_AN_ERROR, "KVC-BOUNDED-05"),
    "the store's window is a token short": ("kvc_gemma4", SHORT_WINDOW, "KVC-PREFIX-08"),
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_f1_to_f6_a_planted_fault_is_found_under_its_clause(fault: str, tmp_path: Path) -> None:
    """F1, F2, F3, F4, F5, F6: what the runtime promises of snapshots and windows is checked, one by one."""
    family, plant, clause = FAULTS[fault]
    file = tmp_path / "planted.py"
    body = textwrap.indent(textwrap.dedent(plant).strip(), " " * 4).strip()
    file.write_text(textwrap.dedent(PLUGIN).format(family=family, plant=body))
    report = run(Request(name="planted", file=file, only=(clause,)))
    broken = {item.clause for item in report.results if item.outcome in BROKEN}
    assert clause in broken, "\n".join(reports.lines(report))

"""Who gives way to whom (B20).

Admission promises a request all pages of its life, so what is admitted can always go on; nothing is preempted
for want of pages in the middle.  There are two reasons to preempt:

- the head of the line has a higher priority than requests that are active, and does not fit.  Then the latest
  admitted ones of the lowest priority give way: as few as it takes, and none if all of them were too few;
- a caller says so: that request goes behind the equals that wait at that moment.

A preempted request *rests*: it holds nothing and asks for nothing, so that it cannot take back what it has
just given, nor wait in the store for room that is not there.  It is *due* once nobody in line goes before it;
from then on nobody is admitted before it.  When it fits it resolves its tokens like any request: while it
does it blocks nobody (A25), then it stands in front of its equals.  Only a strictly higher priority preempts,
so no two requests can preempt each other by turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvcontract.engine.active import Active
from kvcontract.engine.admission import Lack
from kvcontract.engine.request import Request
from kvcontract.pool.handles import NO_PAGES
from kvcontract.pool.index import Pages
from kvcontract.pool.pool import BlockPool


def victims(active: Sequence[Active], lack: Lack, pool: BlockPool, *, room: bool) -> list[Active]:
    """Who gives way to the head of the line.

    Args:
        active: in order of admission.
        lack: of the head.
        pool: of all of them.
        room: whether the head fits but for its pages: into the batch, and into the slots.
    """
    lower = [item for item in reversed(active) if item.request.priority < lack.request.priority]
    lower.sort(key=lambda item: item.request.priority)
    coming = 0 if lack.pages <= 0 else _coming(active, lack, pool)
    if not lower or (room and lack.pages <= coming):
        return []
    for count in range(1, len(lower) + 1):
        if lack.pages - coming <= _gain(lower[:count], active, lack):
            return lower[:count]
    return []


def _coming(active: Sequence[Active], lack: Lack, pool: BlockPool) -> int:
    """Pages that only a save still holds: they come back by themselves, so nobody gives way for them."""
    gauges = pool.gauges()
    ours = np.union1d(_pages(active), lack.held)
    return max(0, min(gauges.pinned, gauges.held - len(ours)))


def _gain(some: Sequence[Active], active: Sequence[Active], lack: Lack) -> int:
    """Pages that come back, by now or once their saves have landed, when some give way."""
    stay = np.concatenate([_pages([item for item in active if item not in some]), lack.own])
    promised = sum(item.kv.lifetime_pages - len(item.kv.pages) for item in some)
    return promised + len(np.setdiff1d(_pages(some), stay))


def _pages(items: Iterable[Active]) -> Pages:
    return np.concatenate([NO_PAGES, *(item.kv.pages for item in items)])


def due(resting: Iterable[Active], waiting: Sequence[Request]) -> list[Active]:
    """Those that rest and are next, in their order: none of those that wait goes before them."""
    found = [
        item
        for item in resting
        if not any(other.priority > item.request.priority or other.id in item.yields_to for other in waiting)
    ]
    return sorted(found, key=lambda item: (-item.request.priority, item.request.id))

"""Violations to plant in what is kept beside full pages: windows of pages, states and their snapshots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvcontract.pool.guards import Guards
from kvcontract.pool.holdings import Holdings, SideHolds, WindowView
from kvcontract.pool.ledger import Ledger
from kvcontract.pool.rooted import Rooted
from kvcontract.pool.side import SidePool
from kvcontract.pool.sides import Windowed
from kvcontract.store import resolve, side_fetch, side_saver, snapshots
from kvcontract.tiers.base import Code

Plant = Callable[[pytest.MonkeyPatch], None]


def a4_late_states_are_thrown_away(patch: pytest.MonkeyPatch) -> None:
    """What lands when nobody waits for it any more is not named."""
    given_up: set[bytes] = set()
    landed, came = side_fetch.SideFetcher._landed, side_fetch.SideFetcher._came

    async def waits(self: Any, search: Any, flights: Any) -> bool:
        found = await landed(self, search, flights)
        if not found:
            given_up.update(name.tobytes() for flight in flights for name in flight.names)
        return found

    def comes(self: Any, side: Any, reserved: Any, names: Any, codes: Any) -> None:
        late = any(name.tobytes() in given_up for name in names)
        came(self, side, reserved, names, np.full_like(codes, Code.FAILED) if late else codes)

    patch.setattr(side_fetch.SideFetcher, "_landed", waits)
    patch.setattr(side_fetch.SideFetcher, "_came", comes)


def a20_a_tier_may_take_as_long_as_it_likes(patch: pytest.MonkeyPatch) -> None:
    """A tier's own limit is not kept to when it is asked for states."""
    patch.setattr(side_fetch.SideFetcher, "_deadline", lambda _self, search, *_tiers: search.deadline)


def b4_the_promise_of_a_side_pool_stays(patch: pytest.MonkeyPatch) -> None:
    """What was booked for a request, hold or reservation is not given back at its end."""
    patch.setattr(SidePool, "_forget", Ledger._forget)


def c1_a_block_is_saved_although_it_has_another_occupant(patch: pytest.MonkeyPatch) -> None:
    """Nobody looks whether a block still holds what is to be saved."""

    def pin(self: SidePool, blocks: Any, _generations: Any) -> Any:
        now = self.generation[blocks].copy()
        return honest(self, blocks, now)

    honest = SidePool.pin_named
    patch.setattr(SidePool, "pin_named", pin)


def c3_what_a_retired_request_has_taken_is_not_saved(patch: pytest.MonkeyPatch) -> None:
    """A rolling checkpoint is left out at the end as well."""
    honest = side_saver.SideSaver.seal

    def seal(self: Any, *args: Any, last: bool, **more: Any) -> Any:
        del last
        return honest(self, *args, last=False, **more)

    patch.setattr(side_saver.SideSaver, "seal", seal)


def c11_a_reset_leaves_the_states(patch: pytest.MonkeyPatch) -> None:
    """A reset forgets full pages alone."""
    patch.setattr(Rooted, "clear", Guards.clear)


def e7_corrupt_states_are_named(patch: pytest.MonkeyPatch) -> None:
    """A state whose checksum is wrong is taken for whole."""
    honest = side_fetch.SideFetcher._came

    def comes(self: Any, side: Any, reserved: Any, names: Any, codes: Any) -> None:
        honest(self, side, reserved, names, np.where(codes == Code.CORRUPT, np.uint8(Code.OK), codes))

    patch.setattr(side_fetch.SideFetcher, "_came", comes)


def f1_the_live_slot_is_handed_out(patch: pytest.MonkeyPatch) -> None:
    """The slot that its owner goes on to write is found as a snapshot: nothing is copied."""

    def snapshot(_self: Any, _rank: Any, req: Any, boundary: int) -> Any:
        name, found = req.keys[boundary // req.pool.page_tokens - 1 :][:1].copy(), {}
        for view in req.beside.slots:
            if not view.entitlement.registered_pages:
                view.side.index.register(view.entitlement, name)
            found[view.key] = view.slot, int(view.side.index.generation[view.slot])
        return found, ()

    patch.setattr(snapshots.Snapshots, "_snapshot", snapshot)


def f2_published_before_it_is_copied(patch: pytest.MonkeyPatch) -> None:
    """A snapshot can be found while its copy stands in line."""
    honest = snapshots.Snapshots._published

    def published(self: Any, rank: Any, staged: Any, name: Any, _after: Any) -> Any:
        return honest(self, rank, staged, name, ())

    patch.setattr(snapshots.Snapshots, "_published", published)


def f2_published_under_another_boundary(patch: pytest.MonkeyPatch) -> None:
    """A snapshot is found at the boundary before the one it was taken at."""
    honest = snapshots.Snapshots._snapshot

    def snapshot(self: Any, rank: Any, req: Any, boundary: int) -> Any:
        before = boundary - req.checkpoints.granule_tokens
        return honest(self, rank, req, before or boundary)

    patch.setattr(snapshots.Snapshots, "_snapshot", snapshot)


def f3_a_failed_copy_is_published(patch: pytest.MonkeyPatch) -> None:
    """Nobody asks whether a copy was made."""
    honest = snapshots.take_snapshots

    def take(*args: Any) -> Any:
        try:
            return honest(*args)
        except Exception:  # noqa: BLE001 - that is what is planted
            return ()

    patch.setattr(snapshots, "take_snapshots", take)


def f4_the_snapshot_is_let_go_before_it_is_copied(patch: pytest.MonkeyPatch) -> None:
    """Who begins with a snapshot gives it back before its first step."""
    honest = Holdings.adopt

    def adopt(self: Holdings, held: SideHolds | None, pages: int) -> None:
        honest(self, held, pages)
        for view in self.slots:
            view.release()

    patch.setattr(Holdings, "adopt", adopt)


def f5_the_hit_is_not_cut(patch: pytest.MonkeyPatch) -> None:
    """Full pages beyond the deepest state count as hit, and are kept."""

    def cut(_self: Any, search: Any, held: SideHolds) -> None:
        search.hold.let_sides_go()
        search.hold.sides = held

    def settle(search: Any) -> None:
        if search.hold.sides is None:
            side_fetch_settle(search)

    side_fetch_settle = side_fetch.settle
    patch.setattr(side_fetch.SideFetcher, "_cut", cut)
    patch.setattr(resolve, "settle", settle)


def f7_a_worker_is_left_out(patch: pytest.MonkeyPatch) -> None:
    """The last worker copies nothing."""
    honest = snapshots.take_snapshots

    def take(workers: Any, copies: Any) -> Any:
        return honest(workers[: max(1, len(workers) - 1)], copies)

    patch.setattr(snapshots, "take_snapshots", take)


def r2_a_window_is_a_page_short(patch: pytest.MonkeyPatch) -> None:
    """The first page of a window is not asked for."""
    honest = Windowed.needed

    def needed(self: Windowed, pages: int) -> Any:
        found = honest(self, pages)
        first = int(self.first(np.array([pages * self.pool.page_tokens]))[0])
        return found[found != first] if first + 1 < pages else found

    patch.setattr(Windowed, "needed", needed)


def r3_pages_slide_out_too_early(patch: pytest.MonkeyPatch) -> None:
    """A page is let go although the next step reads it."""
    honest = WindowView.slide

    def slide(self: WindowView, frontier: int, checkpoint: int) -> None:
        honest(self, frontier + self.side.pool.page_tokens, checkpoint)

    patch.setattr(WindowView, "slide", slide)


HYBRID: tuple[Plant, ...] = (
    a4_late_states_are_thrown_away,
    a20_a_tier_may_take_as_long_as_it_likes,
    b4_the_promise_of_a_side_pool_stays,
    c1_a_block_is_saved_although_it_has_another_occupant,
    c3_what_a_retired_request_has_taken_is_not_saved,
    c11_a_reset_leaves_the_states,
    e7_corrupt_states_are_named,
    f1_the_live_slot_is_handed_out,
    f2_published_before_it_is_copied,
    f2_published_under_another_boundary,
    f3_a_failed_copy_is_published,
    f4_the_snapshot_is_let_go_before_it_is_copied,
    f5_the_hit_is_not_cut,
    f7_a_worker_is_left_out,
    r2_a_window_is_a_page_short,
)
"""To be found in declarations with slots."""

WINDOWED: tuple[Plant, ...] = (
    c11_a_reset_leaves_the_states,
    r3_pages_slide_out_too_early,
)
"""To be found in declarations with windows."""

"""Records of several pages: tiers give them whole, the device goes on page by page."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from bench_store import PAGE, SCOPE, Setup, model_of, prompt, setup

from kvcontract.pool.events import EventLog, Stored, replay
from kvcontract.store.events import TierEvents
from kvcontract.store.saves import NOTHING
from kvcontract.tiers.base import Code, Codes, SaveClass

STEP = 2
WIDE = model_of(key_tokens=STEP * PAGE)
TOKENS = prompt(5)


def resolved(s: Setup, tokens: list[int], **policy: Any) -> dict[str, int]:
    """Resolve, check what lies there, give it back; pages by source."""
    prefix = s.loop.run(s.resolve(tokens, **policy))
    if prefix.hit_tokens:
        s.check_content(tokens, prefix)
    prefix.release()
    assert sum(prefix.sources.values()) == prefix.hit_tokens
    return {name: count // PAGE for name, count in prefix.sources.items()}


def test_a12_tiers_give_whole_records_and_the_device_pages() -> None:
    """A12, A13: five pages make two records of two; the fifth page is hit where it is resident alone."""
    with setup(model=WIDE) as s:
        report = s.store.retire(s.compute(TOKENS)).value
        assert (report.pages, report.saved, report.failed) == (4, 4, {})
        assert s.tier.stats()["records"] == 2
        assert resolved(s, TOKENS) == {"device": 5}
        s.evict()
        assert resolved(s, TOKENS) == {"dram": 4}
        stats = s.store.stats()
        assert stats.hit_tokens["computed"] == 2 * len(TOKENS) - 9 * PAGE
        assert stats.counters["pages_loaded_dram"] == 4


@pytest.mark.parametrize(("tokens", "pages"), [(2 * PAGE, 0), (2 * PAGE + 1, 2), (4 * PAGE, 2)])
def test_a12_a_record_is_hit_if_a_token_stays_to_compute(tokens: int, pages: int) -> None:
    """A12: a record that reaches beyond the longest hit is not asked for."""
    with setup(model=WIDE) as s:
        s.stored(TOKENS)
        assert sum(resolved(s, TOKENS[:tokens]).values()) == pages
        assert s.tier.count("lookup") == (pages > 0)


def test_pages_of_an_incomplete_record_wait_for_the_next_seal() -> None:
    """Seal, C9: what is complete is saved once; a record follows with its last page."""
    with setup(model=WIDE) as s:
        req = s.admit(TOKENS, new=PAGE)
        saved = []
        while req.prefilling:
            chunk = req.schedule_prefill(PAGE)
            req.apply_prefill(chunk, 5 if chunk.emits else None)
            saved.append(s.store.seal(req).value.saved)
        assert saved == [0, 2, 0, 2, 0, 0]
        while not req.finished:
            assert s.store.seal(req).value == NOTHING
            req.apply_decode(req.schedule_decode(), 7)
        assert s.store.seal(req).value.saved == 2
        assert s.store.retire(req).value == NOTHING
        assert s.tier.stats()["records"] == 3


def test_a17_of_a_record_resident_in_part_the_missing_pages_are_loaded() -> None:
    """A17, B15: three of four pages are resident: one page is staged and written, and none twice."""
    with setup(model=WIDE, pages=6) as s:
        s.stored(TOKENS[: 4 * PAGE + 1])
        s.store.retire(s.compute(TOKENS[: 3 * PAGE + 1]))
        before = s.pool.cached
        assert resolved(s, TOKENS) == {"device": 3, "dram": 1}
        assert (before, s.pool.cached) == (3, 4)
        assert s.store.stats().counters["pages_loaded_dram"] == 1
        assert s.tier.count("load") == 1


def test_a17_pages_past_a_hole_are_not_written_again() -> None:
    """A17: where later pages are pinned, the first one alone is loaded, and the hit goes on behind it."""
    with setup(model=WIDE) as s:
        s.stored(TOKENS)
        req = s.compute(TOKENS)
        kept = req.pages[1:4].copy()
        s.pool.pin(kept)
        req.release()
        s.evict()
        assert (s.pool.held, s.pool.cached) == (3, 0)
        prefix = s.loop.run(s.resolve(TOKENS))
        s.check_content(TOKENS, prefix)
        assert prefix.sources == {"device": 3 * PAGE, "dram": PAGE}
        assert prefix.hold.pages[1:].tolist() == kept.tolist()
        assert s.store.stats().counters["pages_loaded_dram"] == 1
        prefix.release()
        s.pool.unpin(kept)


def test_records_that_part_inside_share_the_pages_before() -> None:
    """Keys: two prompts that differ in the second page of a record have a record each, and share a page."""
    other = [*TOKENS[:PAGE], *prompt(1, seed=9)]
    with setup(model=WIDE) as s:
        s.store.retire(s.compute(TOKENS[: 2 * PAGE + 1]))
        s.store.retire(s.compute(other, s.loop.run(s.resolve(other))))
        assert s.tier.stats()["records"] == 2
        s.evict()
        assert resolved(s, TOKENS) == {"dram": 2}
        assert resolved(s, other) == {"device": 1, "dram": 1}


def test_a16_one_load_serves_all_who_want_a_record() -> None:
    """A16: concurrent resolves of one cold prefix load it once."""
    with setup(model=WIDE, pages=32) as s:
        s.stored(TOKENS)
        s.tier.holding.add("load")

        async def all_of_them() -> list[Any]:
            tasks = [asyncio.create_task(s.resolve(TOKENS)) for _ in range(4)]
            await asyncio.sleep(0.1)
            s.tier.open("load")
            return await asyncio.gather(*tasks)

        for prefix in s.loop.run(all_of_them()):
            assert prefix.hit_tokens == 4 * PAGE
            s.check_content(TOKENS, prefix)
            prefix.release()
        assert s.tier.count("load") == 1


@pytest.mark.parametrize(("room", "pages"), [(5, 4), (4, 4), (3, 2), (2, 2), (1, 0)])
def test_a18_what_fits_is_loaded_in_whole_records(room: int, pages: int) -> None:
    """A18: with room for part of it, plain mode loads as many records as fit, and leaves nothing staged."""
    with setup(model=WIDE, pages=8) as s:
        s.stored(TOKENS)
        with s.admit(prompt(6 - room, seed=5, extra=0), new=1):
            assert s.pool.budget() == room
            assert sum(resolved(s, TOKENS, deadline_s=1.0).values()) == pages
            assert s.pool.gauges().reservations == 0


def lose(number: int) -> Any:
    """Codes with one record that was not kept."""

    def change(codes: Codes) -> Codes:
        return np.where(np.arange(len(codes)) == number, Code.FULL, codes).astype(np.uint8)

    return change


def test_c4_a_failed_record_is_tried_again_at_retire() -> None:
    """C4, C3: the cursor moves on success, record by record; only the failed one is written again."""
    with setup(model=WIDE) as s:
        s.tier.codes["save"] = lose(1)
        req = s.compute(TOKENS)
        first = s.store.seal(req).value
        assert (first.pages, first.saved, first.failed) == (4, 2, {"full": 2})
        s.tier.codes.clear()
        last = s.store.retire(req).value
        assert (last.pages, last.saved, last.failed) == (2, 2, {})
        assert [records for verb, records in s.tier.asked if verb == "save"] == [2, 1]


def test_c3_holes_heal_by_the_record() -> None:
    """C3: what is known of a record lies on its last page; a lost one is saved again, the others are not."""
    with setup(model=WIDE) as s:
        s.tier.codes["save"] = lose(0)
        assert s.store.retire(s.compute(TOKENS)).value.failed == {"full": 2}
        s.tier.codes.clear()
        again = s.compute(TOKENS, s.loop.run(s.resolve(TOKENS)))
        assert s.store.retire(again).value.saved == 2
        s.evict()
        assert resolved(s, TOKENS) == {"dram": 4}
        restored = s.compute(TOKENS, s.loop.run(s.resolve(TOKENS)))
        assert s.store.retire(restored).value == NOTHING


def test_c5_pins_of_a_save_are_those_of_whole_records() -> None:
    """C5, B9: a budget of three pages takes one record of two; the other one follows."""
    with setup(model=WIDE, pages=13, save_budget=0.25) as s:
        s.tier.holding.add("save")
        report = s.store.retire(s.compute(TOKENS))
        assert s.pool.gauges().pinned == 2
        s.tier.open("save")
        assert (report.value.saved, report.value.failed) == (2, {"shed": 2})
        assert s.tier.stats()["records"] == 2


def test_e7_a_record_that_came_back_wrong_is_a_miss_from_its_first_missing_page() -> None:
    """E7, I8: none of its pages is findable; the cut names the page."""
    with setup(model=WIDE) as s:
        s.stored(TOKENS)
        s.tier.codes["load"] = lambda codes: np.where(
            np.arange(len(codes)) == len(codes) - 1, Code.MISS, codes
        ).astype(np.uint8)
        prefix = s.loop.run(s.resolve(TOKENS))
        s.check_content(TOKENS, prefix)
        assert (prefix.hit_tokens, prefix.degraded) == (2 * PAGE, ("dram: miss",))
        assert s.store.explain(prefix).cuts[-1].page == 2
        prefix.release()
        assert s.pool.cached == 2


def test_what_comes_from_one_tier_is_brought_to_those_above_by_the_record() -> None:
    """Promotion, C3: the upper tier gets the records it lost, and no other."""
    with setup(model=WIDE, tiers=2) as s:
        s.stored(TOKENS)
        s.loop.run(s.store.areset(["dram"]))
        assert resolved(s, TOKENS) == {"disk": 4}
        assert s.tiers[0].stats()["records"] == 2
        s.evict()
        assert resolved(s, TOKENS) == {"dram": 4}
        assert s.tiers[1].count("save") == 1


def test_a7_a_full_hit_is_what_whole_records_can_give() -> None:
    """A7: the page past the last record is nobody's to wait for."""
    with setup(model=WIDE) as s:
        s.stored(TOKENS)
        assert resolved(s, TOKENS, full_hit=True, full_pages=True) == {"dram": 4}
        assert s.loop.time() < 1.0


def test_i7_events_tell_pages_on_the_device_and_records_in_tiers() -> None:
    """I7: each medium's stream is about what that medium keeps."""
    with setup(model=WIDE, events=TierEvents(), log=EventLog()) as s:
        s.store.retire(s.compute(TOKENS))
        told = [event for _, event in s.store.take_events()]
        sizes = {event.medium: event.token_ids.shape[1] for event in told if isinstance(event, Stored)}
        assert sizes == {"device": PAGE, "dram": STEP * PAGE}
        known = {
            medium: replay(event for event in told if event.medium == medium) for medium in ("device", "dram")
        }
        assert [len(known[medium]) for medium in ("device", "dram")] == [5, 2]
        records = s.store.record_keyer.chain(TOKENS[: 4 * PAGE], SCOPE)
        assert set(known["dram"]) == {key.tobytes() for key in records}
        ids = np.frombuffer(known["dram"][records[1].tobytes()][1], np.int64)
        assert ids.tolist() == TOKENS[2 * PAGE : 4 * PAGE]


def test_c7_a_handoff_counts_the_pages_of_its_records() -> None:
    """C7: confirmed once every complete record is there."""
    with setup(model=WIDE) as s:
        s.store.retire(s.compute(TOKENS), SaveClass.HANDOFF, handoff="h")
        report = s.loop.run(s.store.aflush_handoff("h"))
        assert (report.pages, report.saved, report.confirmed) == (4, 4, True)
        s.store.release_handoff("h")

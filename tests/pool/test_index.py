"""The index: presence of keys under insertion, removal and collisions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcontract.contract.errors import InternalFault
from kvcontract.pool.index import PageIndex


def as_keys(numbers: list[int]) -> np.ndarray:
    """Keys that share their low bits in fours, so that clusters form."""
    return np.array([[number % 4, number] for number in numbers], np.uint64).reshape(-1, 2)


def as_pages(pages: list[int]) -> np.ndarray:
    """As the index takes them."""
    return np.array(pages, np.int32)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20)), max_size=80))
def test_b15_presence_equals_a_dict(steps: list[tuple[bool, int]]) -> None:
    """However keys come and go, each lookup says what a dict says: no false miss, no lost presence."""
    index, expected = PageIndex(32), dict[int, int]()
    for insert, number in steps:
        if insert and number not in expected:
            page = min(set(range(1, 32)) - set(expected.values()))
            assert index.insert(as_keys([number]), as_pages([page])).tolist() == [page]
            expected[number] = page
        elif not insert and number in expected:
            index.remove(as_pages([expected.pop(number)]))
        found = index.lookup(as_keys(list(range(21)))).tolist()
        assert found == [expected.get(each, 0) for each in range(21)]
        assert len(index) == len(expected)


def test_b15_a_present_key_keeps_its_primary() -> None:
    """Inserting a key twice gives one primary, and the second page learns which."""
    index = PageIndex(8)
    index.insert(as_keys([5, 6]), as_pages([1, 2]))
    assert index.insert(as_keys([6, 7]), as_pages([3, 4])).tolist() == [2, 4]
    assert index.lookup(as_keys([5, 6, 7])).tolist() == [1, 2, 4]


def test_match_stops_at_the_first_hole() -> None:
    """A match is a prefix, whatever lies behind the hole."""
    index = PageIndex(8)
    index.insert(as_keys([1, 2, 4]), as_pages([1, 2, 4]))
    assert index.match(as_keys([1, 2, 3, 4])).tolist() == [1, 2]
    assert index.match(as_keys([])).tolist() == []


def test_removing_an_absent_page_is_our_fault() -> None:
    """A page that is not in the table is a broken invariant, said by name."""
    with pytest.raises(InternalFault, match="page 3"):
        PageIndex(8).remove(as_pages([3]))

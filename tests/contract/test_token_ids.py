"""Token ids: integers in order, and nothing that merely converts to them (D5)."""

from __future__ import annotations

from array import array
from collections import deque
from typing import Any

import numpy as np
import pytest

from kvcontract.contract.errors import UsageFault
from kvcontract.pool.keys import token_array


@pytest.mark.parametrize(
    "tokens",
    [
        {3, 1},
        frozenset({3}),
        {3: 1},
        b"12345678",
        bytearray(8),
        memoryview(b"12345678"),
        "12",
        ["1", "2"],
        [True, False],
        [5, True],
        (1, False),
        np.array([True]),
        [1.0],
        np.array([1.0]),
        array("d", [1.0]),
        iter([1, 2]),
        None,
        7,
    ],
    ids=lambda tokens: type(tokens).__name__,
)
def test_d5_what_is_no_integer_sequence_is_refused(tokens: Any) -> None:
    """Sets have no order, bytes would be read as words, booleans and floats are no ids (D5)."""
    with pytest.raises(UsageFault, match="integer"):
        token_array(tokens)


@pytest.mark.parametrize(
    "tokens",
    [
        [0, 1, 2],
        (0, 1, 2),
        range(3),
        deque([0, 1, 2]),
        array("i", [0, 1, 2]),
        np.arange(3),
        [np.int64(0), 1, 2],
    ],
    ids=lambda tokens: type(tokens).__name__,
)
def test_integer_sequences_are_taken(tokens: Any) -> None:
    """Whatever is an ordered sequence of integers."""
    assert token_array(tokens).tolist() == [0, 1, 2]

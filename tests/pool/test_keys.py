"""Page keys: one derivation, equal everywhere, different wherever content or audience differ."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import reference_keys
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.model import Scope
from kvcontract.pool import FleetSecret, Keyer

SECRET = FleetSecret(bytes(range(32)))
GOLDEN = {
    (1, None): "0aec73e123d6f5c71a083e8f578960ef0c675b5701f8d0f7070faf5b4f08c5f5",
    (3, "salt"): "2fd7382930b70926e17a531df130f0b0978c40f34a7e4d13b58e4a13a21e76d0",
    (16, None): "1c4cd41c4c68f4a202986e76672f9f88a9847f9fba9b0ec0fff971ea296f77f1",
}
"""First two keys of tokens 0, 1, 2, ... with fingerprint b"golden"; these never change within a format."""


def keyer(page_tokens: int = 4, fingerprint: bytes = b"model") -> Keyer:
    """A keyer with the fixed test secret."""
    return Keyer(fingerprint, SECRET, page_tokens)


def as_set(keys: np.ndarray) -> set[bytes]:
    """Keys as a set of 16-byte strings."""
    return {row.tobytes() for row in keys}


def test_reference_siphash_matches_the_published_vectors() -> None:
    """The reference agrees with vectors_sip128 of the authors' code."""
    key = bytes(range(16))
    published = [
        "a3817f04ba25a8e66df67214c7550293",
        "da87c1d86b99af44347659119b22fc45",
        "8177228da4a45dc7fca38bdef60affe4",
    ]
    for length, expected in enumerate(published):
        assert reference_keys.siphash_2_4_128(key, bytes(range(length))).hex() == expected


@settings(max_examples=60, deadline=None)
@given(
    page_tokens=st.sampled_from([1, 2, 3, 5, 16, 63]),
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=70),
    scope=st.tuples(*[st.one_of(st.none(), st.text(max_size=3).filter(str.isprintable))] * 3),
    extra=st.dictionaries(st.integers(0, 60), st.binary(max_size=4), max_size=3),
    dtype=st.sampled_from(["list", "int64", "uint32"]),
)
def test_r1_chain_equals_the_reference(
    page_tokens: int,
    tokens: list[int],
    scope: tuple[str | None, str | None, str | None],
    extra: dict[int, bytes],
    dtype: str,
) -> None:
    """Kernel and plain-Python derivation agree for any tokens, page size, scope and extra identity."""
    pages = len(tokens) // page_tokens
    extras = {page: identity for page, identity in extra.items() if page < pages}
    given_tokens = tokens if dtype == "list" else np.array(tokens, dtype)
    keys = keyer(page_tokens).chain(
        given_tokens, Scope(lora=scope[0], lora_revision=scope[1], salt=scope[2]), extras=extras
    )
    expected = reference_keys.chain(b"model", SECRET.value, page_tokens, tokens, scope, extras)
    assert [row.tobytes() for row in keys] == expected


@pytest.mark.parametrize(("page_tokens", "salt"), GOLDEN)
def test_d1_golden_vectors(page_tokens: int, salt: str | None) -> None:
    """Keys are equal across versions of this package."""
    keys = keyer(page_tokens, b"golden").chain(range(2 * page_tokens), Scope(salt=salt))
    assert keys.tobytes().hex() == GOLDEN[page_tokens, salt]


def test_d1_keys_do_not_depend_on_the_process() -> None:
    """Two processes with different PYTHONHASHSEED, one without the JIT, derive the same keys."""
    code = (
        "from kvcontract import FleetSecret, Keyer, Scope\n"
        "k = Keyer(b'm', FleetSecret(b's' * 16), 4)\n"
        "print(k.chain(range(12), Scope(lora='a', salt='b')).tobytes().hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **env}, check=True, capture_output=True
        ).stdout
        for env in ({"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2", "NUMBA_DISABLE_JIT": "1"})
    }
    assert len(outputs) == 1


def test_d2_scopes_never_meet() -> None:
    """Absent, empty and the text None are three values, and a value counts only in its own field."""
    values = [None, "", "None", "x"]
    names = ("lora", "lora_revision", "salt")
    scopes = [
        Scope(**dict(zip(names, fields, strict=True))) for fields in itertools.product(values, repeat=3)
    ]
    seen = as_set(np.concatenate([keyer().chain(range(8), scope) for scope in scopes]))
    assert len(seen) == 2 * len(scopes)
    assert Scope() == Scope(lora=None, salt=None)


def test_d6_identity_fields_separate_keys() -> None:
    """Another fingerprint, secret, or page size gives other keys."""
    keyers = [keyer(), keyer(fingerprint=b"other"), Keyer(b"model", FleetSecret(b"z" * 16), 4), keyer(8)]
    assert len(as_set(np.concatenate([each.chain(range(8), Scope()) for each in keyers]))) == 7


def test_d4_salt_and_secret_stay_out_of_reprs() -> None:
    """No repr shows a salt or a secret."""
    assert "tenant-7" not in repr(Scope(salt="tenant-7"))
    secret = FleetSecret(b"very secret bytes")
    assert "very" not in repr(secret)
    assert secret.id in repr(secret)
    assert FleetSecret.random() != FleetSecret.random()


@pytest.mark.parametrize("dtype", ["list", "int32", "int64"])
def test_d5_negative_ids_are_refused_with_their_positions(dtype: str) -> None:
    """Every bad position is named."""
    tokens = [1, -2, 3, -4]
    given_tokens = tokens if dtype == "list" else np.array(tokens, dtype)
    with pytest.raises(UsageFault, match="-2 at position 1, -4 at position 3"):
        keyer().chain(given_tokens, Scope())


def test_d5_large_ids_are_refused_and_the_list_is_capped() -> None:
    """Ids above 32 bits are refused in lists, arrays, and beyond 64 bits; at most eight are listed."""
    for tokens in ([0, 2**32], [0, 2**70], np.array([0, 2**63], np.uint64)):
        with pytest.raises(UsageFault, match="at position 1"):
            keyer().chain(tokens, Scope())
    with pytest.raises(UsageFault, match="and 12 more"):
        keyer().chain([-1] * 20, Scope())


@pytest.mark.parametrize("tokens", [[1.5, 2.0], np.ones(4), np.ones((2, 2), int), ["a"], np.ones(4, bool)])
def test_d5_other_than_flat_integers_are_refused(tokens: object) -> None:
    """Floats, booleans, text and nested arrays are no token ids."""
    with pytest.raises(UsageFault, match="integer"):
        keyer().chain(tokens, Scope())  # type: ignore[arg-type]


def test_any_integer_sequence_gives_the_same_keys() -> None:
    """Lists, ranges, tuples and arrays of any integer type, strided or read-only, agree."""
    expected = keyer().chain(list(range(20)), Scope())
    forms: list[object] = [range(20), tuple(range(20)), np.arange(40)[::2] // 2]
    forms += [np.arange(20, dtype=dtype) for dtype in "bBhHiIqQ"] + [np.arange(20, dtype=">i4")]
    frozen = np.arange(20, dtype=np.int32)
    frozen.flags.writeable = False
    for form in [*forms, frozen]:
        assert np.array_equal(keyer().chain(form, Scope()), expected)  # type: ignore[arg-type]


def test_extend_continues_a_chain() -> None:
    """Keys computed piece by piece equal keys computed at once."""
    whole = keyer().chain(range(40), Scope())
    first = keyer().chain(range(12), Scope())
    assert np.array_equal(np.concatenate([first, keyer().extend(first[-1], range(12, 40), Scope())]), whole)


def test_extra_identity_changes_its_page_and_all_after() -> None:
    """A media digest separates pages of equal tokens, from its page on; one for no page is refused."""
    plain = keyer().chain(range(16), Scope())
    media = keyer().chain(range(16), Scope(), extras={1: b"image"})
    assert (plain == media).all(axis=1).tolist() == [True, False, False, False]
    with pytest.raises(UsageFault, match="extras name pages"):
        keyer().chain(range(16), Scope(), extras={4: b"image"})


def test_d7_partial_pages_have_their_own_name_space() -> None:
    """A partial name depends on length and anchor, and never equals a natural one, even for a full page."""
    natural = keyer().chain(range(8), Scope())
    parent = natural[0]
    names = [
        keyer().partial(parent, range(4, 4 + count), Scope(), committed_tokens=length, anchor=anchor)
        for count, length, anchor in [(3, 7, None), (3, 7, 0), (3, 7, 9), (3, 11, 9), (4, 8, None), (4, 8, 8)]
    ]
    assert len(as_set(np.array([*names, *natural]))) == len(names) + 2
    with pytest.raises(UsageFault, match="1 to 4 tokens"):
        keyer().partial(parent, range(5), Scope(), committed_tokens=5, anchor=None)
    with pytest.raises(UsageFault, match="cannot end"):
        keyer().partial(parent, range(3), Scope(), committed_tokens=8, anchor=None)


def test_wrong_secrets_and_page_sizes_are_refused() -> None:
    """A short secret and an empty page are usage faults."""
    with pytest.raises(UsageFault, match="16 to 64"):
        FleetSecret(b"short")
    with pytest.raises(UsageFault, match="page_tokens is 0"):
        keyer(0)

"""Names of new plugins: what cannot be one is refused, with every reason and a name that can."""

from __future__ import annotations

import re
import sys
import types

import pytest

from kvc_templates.names import LONGEST, check_name
from kvcontract.contract.errors import UsageFault

HOSTILE = {
    "Qwen-3": "qwen_3",
    "3b": "model_3b",
    "class": "class_model",
    "match": "match_model",
    "kvc": "my_model",
    "kvcontract": "my_model",
    "kvc_mine": "mine",
    "kvc_kvc_kvcontract_7": "model_7",
    "numpy": "numpy_model",
    "json": "json_model",
    "модель": "my_model",
    "Café": "cafe",
    "a" * 80: "a" * LONGEST,
    "x__y_": "x_y",
    "../../etc/passwd": "etc_passwd",
    "a b\n": "a_b",
    "": "my_model",
    "{{ name }}": "name",
    "qwen3": "qwen3_model",
}


@pytest.mark.parametrize(("name", "instead"), HOSTILE.items())
def test_hostile_names_are_refused_with_one_that_is_taken(name: str, instead: str) -> None:
    """The suggestion is itself a name."""
    with pytest.raises(UsageFault, match=f"try {re.escape(repr(instead))}$"):
        check_name(name)
    check_name(instead)


def test_every_reason_is_named_at_once() -> None:
    """A name may be wrong in several ways."""
    with pytest.raises(UsageFault) as caught:
        check_name("Kvc-" + "X" * 80)
    assert "it has a-z first" in str(caught.value)
    assert f"it has 84 characters, {LONGEST} are allowed" in str(caught.value)


def test_a_name_that_is_taken_says_by_whom() -> None:
    """Two distributions with a plugin of one name would serve neither."""
    with pytest.raises(UsageFault, match="the distribution kvc-qwen3 has a plugin of that name"):
        check_name("qwen3")


@pytest.mark.parametrize("name", ["mymodel", "my_model_2", "x", "a" * LONGEST])
def test_sound_names(name: str) -> None:
    """Lower case, digits, single underscores."""
    check_name(name)


def test_what_this_process_has_loaded_from_elsewhere_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that was loaded from a file, as plugins are, is none that others could import."""
    monkeypatch.setitem(sys.modules, "mymodel", types.ModuleType("mymodel"))
    check_name("mymodel")

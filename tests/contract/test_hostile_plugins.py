"""Plugins that misbehave in the host: whatever they do is a finding or a fault, and stdout stays ours."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kvcontract import Config, Scope
from kvcontract.contract import plugins
from kvcontract.contract.errors import PluginLoadError
from kvcontract.contract.finding import Finding
from kvcontract.contract.options import Context

GOOD = """
from kvcontract import Arena, Field, Group, KvModel, hookimpl
KVC_CONTRACT = 1

def good(ctx, group="kv", arena="a", field="k", axes={"head": 2, "dim": 4}, page=16):
    one = Field(name=field, dtype="bfloat16", axes=axes)
    return KvModel(
        contract=1, name="loose", weights=ctx.weights, numerics="bfloat16", page_tokens=page,
        groups=(Group(name=group),), arenas=(Arena.planes(name=arena, group=group, fields=(one,)),),
    )

def with_field(ctx, **change):
    model = good(ctx)
    field = model.arenas[0].fields[0].model_copy(update=change)
    return model.model_copy(update={"arenas": (model.arenas[0].model_copy(update={"fields": (field,)}),)})
"""

Write = Callable[..., plugins.Plugin]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Load a plugin whose kvc_model has the given body."""

    def make(body: str, more: str = "") -> plugins.Plugin:
        file = tmp_path / "loose.py"
        hook = "@hookimpl\ndef kvc_model(ctx):\n" + textwrap.indent(body, "    ") + "\n"
        file.write_text(GOOD + hook + more)
        return plugins.load("loose", file=file)

    return make


def told(plugin: plugins.Plugin, ctx: Context | None = None) -> tuple[Finding, ...]:
    """The findings of declaring."""
    return plugin.declare(ctx or Context())[1]


@pytest.mark.parametrize(
    ("body", "path", "value"),
    [
        ('return good(ctx).model_copy(update={"page_tokens": -1})', "page_tokens", -1),
        ('return good(ctx).model_copy(update={"page_tokens": "16"})', "page_tokens", "16"),
        ('return good(ctx).model_copy(update={"page_tokens": True})', "page_tokens", True),
        ('return good(ctx).model_copy(update={"arenas": None})', "arenas", None),
        ('return good(ctx).model_copy(update={"extra": 1})', "extra", 1),
        ('return KvModel.model_construct(contract=1, name="loose")', "page_tokens", None),
        ('return with_field(ctx, axes={"head": 0})', "arenas[0].fields[0].axes", "{'head': 0}"),
        ('return with_field(ctx, axes={"head": 2})', "arenas[0].fields[0].axes", "{'head': 2}"),
        (
            'from kvcontract.contract.model import Axes\nreturn with_field(ctx, axes=Axes([("head", 0)]))',
            "arenas[0].fields[0].axes",
            "{'head': 0}",
        ),
    ],
)
def test_what_went_round_validation_is_found(write: Write, body: str, path: str, value: Any) -> None:
    """KVC-DECL-04: copies and constructs are judged like constructor calls, with paths and lines."""
    found = {item.path: item for item in told(write(body))}
    assert {item.clause for item in found.values()} == {"KVC-DECL-04"}
    assert found[path].value == value
    assert found[path].where is not None


def test_a_list_or_a_subclass_is_not_the_contracts_object(write: Write) -> None:
    """KVC-DECL-04: what could change after it was judged, or loosen the rules, is refused."""
    body = 'model = good(ctx)\nreturn model.model_copy(update={"arenas": list(model.arenas)})'
    assert [item.path for item in told(write(body))] == ["arenas"]
    body = "class Mine(KvModel):\n    extra: int = 1\nreturn Mine(**dict(good(ctx)))"
    assert [(item.clause, item.value) for item in told(write(body))] == [("KVC-DECL-04", "Mine")]


def test_a_sound_copy_keeps_its_lines(write: Write) -> None:
    """A legal model_copy is no fault, and later findings still show the author's line."""
    model, found = write('return good(ctx).model_copy(update={"page_tokens": 32})').declare(Context())
    assert found == ()
    assert model is not None
    assert model.arenas[0].where is not None


@pytest.mark.parametrize("raised", ["SystemExit(0)", "BaseException('b')", "GeneratorExit()"])
def test_i1_a_factory_cannot_end_the_host(write: Write, raised: str) -> None:
    """KVC-DECL-01: an exit in kvc_model is a finding, never silence."""
    [found] = told(write(f"raise {raised}"))
    assert found.clause == "KVC-DECL-01"
    assert raised.partition("(")[0] in found.message
    assert "loose.py" in str(found.where)


def test_an_error_that_cannot_be_read_is_still_told(write: Write) -> None:
    """KVC-DECL-01: an exception whose own text raises is named by its type."""
    [found] = told(write("class E(Exception):\n    def __str__(self): raise RuntimeError\nraise E"))
    assert found.value == "E"


def test_an_exit_at_the_second_call_is_an_impurity(write: Write) -> None:
    """KVC-DECL-05: the second call has no other rights than the first."""
    more = "CALLS = []\n"
    plugin = write("CALLS.append(1)\nif len(CALLS) > 1: raise SystemExit\nreturn good(ctx)", more)
    assert [item.clause for item in told(plugin)] == ["KVC-DECL-05"]


@pytest.mark.parametrize(
    ("body", "clause"),
    [
        ("return 5", "KVC-DECL-04"),
        ("return int", "KVC-DECL-04"),
        ("raise RuntimeError('o')", "KVC-DECL-01"),
        ("raise SystemExit(0)", "KVC-DECL-01"),
        (
            "from pydantic import BaseModel, create_model\nreturn create_model('Own', x=(int, ...))",
            "KVC-DECL-04",
        ),
    ],
)
@pytest.mark.parametrize("hook", ["kvc_options", "kvc_samples"])
def test_optional_hooks_fail_with_their_clause(write: Write, hook: str, body: str, clause: str) -> None:
    """KVC-DECL-01 and -04: what kvc_options and kvc_samples raise or return amiss is a load error."""
    more = f"@hookimpl\ndef {hook}(ctx):\n" + textwrap.indent(body, "    ") + "\n"
    plugin = write("return good(ctx)", more)
    called = plugin.options if hook == "kvc_options" else plugin.samples
    with pytest.raises(PluginLoadError, match=hook) as caught:
        called(Context())
    assert caught.value.clause == clause


@pytest.mark.parametrize("samples", ["'abc'", "None", "({'a': object()},)", "({'a': float('nan')},)", "(1,)"])
def test_samples_are_parsed_json(write: Write, samples: str) -> None:
    """KVC-DECL-04: samples become config.json files, so they are what JSON can say."""
    plugin = write("return good(ctx)", f"@hookimpl\ndef kvc_samples(ctx): return {samples}\n")
    with pytest.raises(PluginLoadError, match="kvc_samples returns") as caught:
        plugin.samples(Context())
    assert caught.value.clause == "KVC-DECL-04"


@pytest.mark.parametrize("name", ["", "a\\ud800", "a\\nb", "a\\u202eb", "\\x00"])
@pytest.mark.parametrize("what", ["group", "arena", "field"])
def test_names_are_printable(write: Write, what: str, name: str) -> None:
    """KVC-DECL-06: empty names, control characters, direction marks and lone surrogates are refused."""
    found = told(write(f'return good(ctx, {what}="{name}")'))
    assert {item.clause for item in found} == {"KVC-DECL-06"}


def test_no_slash_in_half_of_a_tensors_key(write: Write) -> None:
    """KVC-DECL-06: a/b + c and a + b/c would be one key; a group's name is no key."""
    found = told(write('return good(ctx, arena="a/b", field="c/d", group="e/f")'))
    assert [item.path for item in found] == ["arenas[0].name", "arenas[0].fields[0].name"]


def test_texts_that_cannot_be_written_are_found(write: Write) -> None:
    """KVC-DECL-04: a declaration that has no JSON cannot leave the process."""
    model, found = write('return good(ctx).model_copy(update={"page_tokens_reason": "\\ud800"})').declare(
        Context()
    )
    assert model is None
    assert [item.clause for item in found] == ["KVC-DECL-04"]


@pytest.mark.parametrize(
    "body",
    [
        'return good(ctx, axes={"head": 10**9, "dim": 10**9})',
        'return good(ctx, axes={"head": 10**5000})',
        "return good(ctx, page=10**12)",
        (
            'return good(ctx).model_copy(update={"arenas": '
            '(good(ctx).arenas[0].model_copy(update={"align_bytes": 2**41}),)})'
        ),
    ],
)
def test_absurd_sizes_are_findings(write: Write, body: str) -> None:
    """KVC-LAYOUT-01: sizes beyond any memory are refused before anything is computed from them."""
    [found] = told(write(body))
    assert found.clause == "KVC-LAYOUT-01"
    assert found.line()


@pytest.mark.parametrize("stated", ["True", "1.0", "'1'"])
def test_i2_the_revision_is_an_integer(write: Write, stated: str) -> None:
    """KVC-DECL-03: what only equals 1 is not revision 1."""
    with pytest.raises(PluginLoadError, match="is written for contract") as caught:
        write("return good(ctx)", f"KVC_CONTRACT = {stated}\n")
    assert caught.value.clause == "KVC-DECL-03"


def test_plugins_print_to_stderr(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """Stdout is data: what a plugin prints at import and in hooks goes elsewhere."""
    told(write("print('in model')\nreturn good(ctx)", "print('at import')\n"))
    out, err = capsys.readouterr()
    assert out == ""
    assert "at import" in err
    assert "in model" in err


def test_d4_a_salt_is_in_no_error(write: Write) -> None:
    """What Scope refuses is not shown, since it may be the salt (D4)."""
    with pytest.raises(ValidationError) as caught:
        Scope.model_validate({"salt": b"tenant-secret", "slat": "tenant-secret"})
    assert "tenant-secret" not in str(caught.value)
    found = told(write("from kvcontract import Scope\nScope(slat='tenant-secret')"))
    assert found
    assert "tenant-secret" not in "".join(item.line() for item in found)


def test_i3_counts_are_positive_integers_and_all_faults_come_at_once(write: Write) -> None:
    """KVC-DECL-11: absent, null and wrong values are told apart and together."""
    plugin = write("ctx.config.counts('layers', 'heads', 'dim', 'rank', 'ok')")
    ctx = Context(config=Config({"layers": "28", "heads": None, "dim": True, "ok": 3}))
    found = {item.path: item for item in told(plugin, ctx)}
    assert set(found) == {"config.layers", "config.heads", "config.dim", "config.rank"}
    assert {item.clause for item in found.values()} == {"KVC-DECL-11"}
    assert (found["config.layers"].value, found["config.layers"].allowed) == ("28", "a positive integer")
    message = found["config.layers"].message
    for text in ("lacks rank", "has null for heads", "layers = '28', which is not a positive integer"):
        assert text in message
    assert Config({"a": 1, "b": 2}).counts("b", "a") == (2, 1)


def test_i4_a_refused_fact_of_the_config_is_named(write: Write) -> None:
    """KVC-DECL-11: the key, its value, what is allowed and the author's line."""
    plugin = write("raise ctx.refuse('config.model_type', allowed='mine', why='another family')")
    [found] = told(plugin, Context(config=Config({"model_type": "theirs"})))
    assert (found.clause, found.path, found.value) == ("KVC-DECL-11", "config.model_type", "theirs")
    assert found.allowed == "mine"
    assert "config.model_type = 'theirs'" in found.message
    assert "loose.py" in str(found.where)

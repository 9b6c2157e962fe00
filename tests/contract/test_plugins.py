"""The loader: names from metadata, one bad plugin hurts no other, faults come with their clause."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcontract.contract import plugins
from kvcontract.contract.errors import DuplicatePlugin, NotConformant, PluginLoadError, PluginNotFound
from kvcontract.contract.options import Context, LaunchOptions

GOOD = """
    from kvcontract import Arena, Field, Group, KvModel, hookimpl

    KVC_CONTRACT = 1

    @hookimpl
    def kvc_model(ctx):
        field = Field(name="k", dtype="bfloat16", axes={"head": 2, "dim": 4})
        return KvModel(
            contract=1, name="NAME", weights=ctx.weights, numerics="bfloat16",
            page_tokens=ctx.options.page_tokens or 16, groups=(Group(name="kv"),),
            arenas=(Arena.planes(name="a", group="kv", fields=(field,)),),
        )
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Put a distribution with one plugin module on the path, metadata included."""
    before = set(sys.modules)

    def add(name: str, source: str = GOOD, *, dist: str | None = None) -> None:
        dist = dist or f"kvc-{name}"
        home = tmp_path / dist
        info = home / f"{dist.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n")
        module = f"plug_{dist.replace('-', '_')}"
        (info / "entry_points.txt").write_text(f"[kvcontract]\n{name} = {module}\n")
        (home / f"{module}.py").write_text(textwrap.dedent(source).replace("NAME", name))
        monkeypatch.syspath_prepend(str(home))

    yield add
    for name in set(sys.modules) - before:
        if name.startswith("plug_"):
            del sys.modules[name]


def test_installed_reads_metadata_only(install: Install) -> None:
    """Listing imports nothing, not even a plugin that would fail."""
    install("boom", "raise RuntimeError('boom')")
    listed = {item.name: item for item in plugins.installed()}
    assert listed["boom"].dist == "kvc-boom"
    assert "plug_kvc_boom" not in sys.modules


def test_i1_a_broken_plugin_fails_alone_and_with_its_reason(install: Install) -> None:
    """Asking for the broken one raises its reason and keeps the cause; the other loads."""
    install("boom", "raise RuntimeError('no such lib')")
    install("fine")
    with pytest.raises(PluginLoadError, match="no such lib") as caught:
        plugins.load("boom")
    assert caught.value.clause == "KVC-DECL-01"
    assert isinstance(caught.value.cause, RuntimeError)
    assert plugins.load("fine").model(Context()).name == "fine"


def test_i1_a_plugin_that_exits_is_a_broken_plugin(install: Install) -> None:
    """sys.exit at import does not end the host."""
    install("quits", "import sys; sys.exit(3)")
    with pytest.raises(PluginLoadError, match="SystemExit"):
        plugins.load("quits")


def test_i1_namesakes_are_an_error_that_names_both(install: Install) -> None:
    """Two distributions with one name: neither is chosen in silence."""
    install("twin", dist="kvc-twin-a")
    install("twin", dist="kvc-twin-b")
    with pytest.raises(DuplicatePlugin, match=r"kvc-twin-\w 1.0 and kvc-twin-\w 1.0"):
        plugins.load("twin")


@pytest.mark.parametrize(
    ("line", "found"), [("", "states no KVC_CONTRACT"), ("KVC_CONTRACT = 7", "contract 7")]
)
def test_i2_another_revision_is_refused_before_any_call(install: Install, line: str, found: str) -> None:
    """Both revisions are named; the plugin's hooks are not called."""
    install("other", GOOD.replace("KVC_CONTRACT = 1", line))
    with pytest.raises(PluginLoadError, match=f"{found}.*this host serves contract 1") as caught:
        plugins.load("other")
    assert caught.value.clause == "KVC-DECL-03"


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("@hookimpl\n    def kvc_modle(ctx): ...", "did you mean kvc_model"),
        ("def kvc_executer(ctx): ...", "did you mean kvc_executor"),
        ("def kvc_executor(ctx): ...", "not marked @hookimpl"),
        ("@hookimpl\n    def kvc_executor(context): ...", "context"),
    ],
)
def test_i1_misspelt_hooks_are_found(install: Install, wrong: str, hint: str) -> None:
    """A typo in a hook's name or argument, or a forgotten mark, is an error with the right name."""
    install("typo", GOOD + "\n    " + wrong + "\n")
    with pytest.raises(PluginLoadError, match=hint) as caught:
        plugins.load("typo")
    assert caught.value.clause == "KVC-DECL-02"


def test_i4_an_unknown_name_suggests_the_nearest(install: Install) -> None:
    """A typo in a model's name is answered with what is near, or with what there is."""
    install("gemma")
    with pytest.raises(PluginNotFound, match="did you mean gemma"):
        plugins.load("gema")
    with pytest.raises(PluginNotFound, match=r"installed: .*gemma"):
        plugins.load("zzz")


def test_a_plugin_file_needs_no_installation(tmp_path: Path) -> None:
    """An unpackaged plugin is named by its file's stem."""
    file = tmp_path / "loose.py"
    file.write_text(textwrap.dedent(GOOD).replace("NAME", "loose"))
    assert plugins.load("loose", file=file).model(Context()).name == "loose"
    with pytest.raises(PluginNotFound, match="is named 'loose', not 'tight'"):
        plugins.load("tight", file=file)
    with pytest.raises(PluginNotFound, match="no plugin file"):
        plugins.load("gone", file=tmp_path / "gone.py")


def findings(install: Install, source: str, ctx: Context | None = None) -> dict[str, str]:
    """Clause -> message of what declaring comes to."""
    install("one", source)
    _, found = plugins.load("one").declare(ctx or Context())
    return {item.clause: item.message for item in found}


def test_i3_shape_faults_are_findings_with_the_authors_line(install: Install) -> None:
    """Pydantic's refusals become findings of one clause, one per field."""
    source = GOOD.replace('name="k", dtype="bfloat16"', 'name=3, dtpe="bfloat16"')
    install("one", source)
    model, found = plugins.load("one").declare(Context())
    assert model is None
    assert {item.path for item in found} == {"Field.name", "Field.dtype", "Field.dtpe"}
    assert {item.clause for item in found} == {"KVC-DECL-04"}
    assert all(item.where is not None and "plug_kvc_one.py:8" in item.where for item in found)


def test_an_impure_factory_is_found(install: Install) -> None:
    """Two calls that differ are a finding, since every worker process calls."""
    source = "    import itertools\n    COUNT = itertools.count(1)\n" + GOOD.replace(
        '"dim": 4', '"dim": next(COUNT)'
    )
    assert "KVC-DECL-05" in findings(install, source)


def test_a_factory_that_raises_or_returns_something_else_is_found(install: Install) -> None:
    """The exception's text and line are the finding."""
    assert "ZeroDivisionError" in findings(install, GOOD.replace('"dim": 4', '"dim": 1 // 0'))["KVC-DECL-01"]
    install("two", GOOD.replace("return KvModel", "return dict"))
    _, found = plugins.load("two").declare(Context())
    assert [(item.clause, item.value) for item in found] == [("KVC-DECL-04", "dict")]


def test_a_model_of_another_name_or_revision_is_found(install: Install) -> None:
    """The declaration bears the plugin's name and the host's revision."""
    assert "KVC-DECL-06" in findings(install, GOOD.replace('name="NAME"', 'name="else"'))
    install("two", GOOD.replace("contract=1", "contract=2"))
    _, found = plugins.load("two").declare(Context())
    assert [item.clause for item in found] == ["KVC-DECL-03"]


def test_i4_an_option_nobody_looks_at_is_a_finding(install: Install) -> None:
    """Given options are read by the plugin, or honoured by value, or they are findings."""
    ctx = Context(options=LaunchOptions(kv_dtype="float16", key_tokens=64, page_tokens=32, tp=2))
    install("one", GOOD)
    _, found = plugins.load("one").declare(ctx)
    assert {item.path for item in found if item.clause == "KVC-DECL-10"} == {
        "options.kv_dtype",
        "options.key_tokens",
    }


def test_i4_unknown_options_suggest_the_nearest_and_come_all_at_once(install: Install) -> None:
    """Core and plugin options share one set of suggestions; values are converted and checked."""
    source = GOOD + textwrap.indent(
        """
@hookimpl
def kvc_options(ctx):
    from pydantic import BaseModel
    class Own(BaseModel):
        rope_scale: float = 1.0
    return Own
""",
        "    ",
    )
    install("one", source)
    plugin = plugins.load("one")
    ctx, found = plugin.context(Context(), {"tp": "two", "page_token": 3}, {"rope_scal": "2", "drafter": "x"})
    text = {item.path: item.message for item in found}
    assert "did you mean page_tokens" in text["options.page_token"]
    assert "did you mean rope_scale" in text["options.rope_scal"]
    assert set(text) == {"options.tp", "options.page_token", "options.rope_scal", "options.drafter"}
    ctx, found = plugin.context(Context(), {"tp": "2"}, {"rope_scale": "2.5"})
    assert not found
    assert (ctx.options.tp, ctx.plugin_options.rope_scale) == (2, 2.5)


def test_i3_missing_facts_are_all_named(install: Install) -> None:
    """A config without the keys a plugin needs names them all, with near misses."""
    from kvcontract import Config  # noqa: PLC0415 - beside its use

    source = GOOD.replace(
        "field = Field(", "ctx.config.facts('heads', 'head_dim', 'layers')\n        field = Field("
    )
    install("one", source)
    _, found = plugins.load("one").declare(Context(config=Config({"head_dims": 3, "layers": 2})))
    assert [(item.clause, item.path) for item in found] == [
        ("KVC-DECL-11", "config.heads"),
        ("KVC-DECL-11", "config.head_dim"),
    ]
    assert "is it head_dims?" in found[0].message


def test_model_raises_with_every_finding(install: Install) -> None:
    """The Python API refuses with one error that carries them all."""
    install("bad", GOOD.replace('name="a", group="kv"', 'name="a", group="vk"'))
    with pytest.raises(NotConformant) as caught:
        plugins.load("bad").model(Context())
    assert {item.clause for item in caught.value.findings} == {"KVC-DECL-06", "KVC-DECL-09"}
    assert caught.value.exit_code == 1

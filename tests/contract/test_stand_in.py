"""Facts that are still to be filled in keep a plugin from any level (KVC-DECL-11)."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from kvc_conformance import report as reports
from kvc_conformance.outcomes import Outcome
from kvc_conformance.runner import Request, run
from kvcontract import fill_in
from kvcontract.cli.main import main
from kvcontract.contract.errors import UsageFault

MARKED = """
    from kvcontract import Arena, Field, Group, KvModel, fill_in, hookimpl

    KVC_CONTRACT = 1
    LAYERS = fill_in("number of layers", 3)
    HEADS = fill_in("number of heads", 2)

    @hookimpl
    def kvc_model(ctx):
        dtype = ctx.options.kv_dtype or "float16"
        k = Field(name="k", dtype=dtype, axes={"head": HEADS, "dim": 4})
        arenas = tuple(Arena.planes(name=f"l{i}", group="kv", layer=i, fields=(k,)) for i in range(LAYERS))
        return KvModel(
            contract=1, name="mine", weights=ctx.weights, numerics=dtype,
            key_tokens=ctx.options.key_tokens, page_tokens=ctx.options.page_tokens or 4,
            groups=(Group(name="kv"),), arenas=arenas,
        )
"""


def write(folder: Path, source: str) -> Path:
    """A plugin file."""
    file = folder / "mine.py"
    file.write_text(textwrap.dedent(source))
    return file


def test_marked_facts_keep_a_plugin_from_every_level(tmp_path: Path) -> None:
    """Nothing fails, and nothing is certified: the last line names the facts, the clause their first line."""
    file = write(tmp_path, MARKED)
    for level in ("L0", "L1"):
        report = run(Request(name="mine", file=file, level=level))
        assert report.verdict.exit_code == 3
        assert report.verdict.level is None
        lines = reports.lines(report)
        assert lines[-1] == (
            "mine: L0 needs facts that are still to be filled in: number of layers, number of heads"
        )
        others = {item.clause: item.outcome for item in report.results if item.outcome is not Outcome.PASS}
        assert others.pop("KVC-DECL-11") is Outcome.COULD_NOT_RUN
        assert set(others.values()) <= {Outcome.NOT_APPLICABLE}
    [marked] = [item for item in report.results if item.clause == "KVC-DECL-11"]
    assert marked.evidence.where == f"{file}:5"


def test_a_selection_does_not_certify_past_a_mark(tmp_path: Path) -> None:
    """A run of one clause is incomplete, as ever."""
    report = run(Request(name="mine", file=write(tmp_path, MARKED), level="L1", only=("KVC-LAYOUT-06",)))
    assert report.verdict.exit_code == 3


def test_without_marks_the_same_plugin_is_conformant(tmp_path: Path) -> None:
    """Putting the facts in place of the marks is all it takes."""
    filled = MARKED.replace('fill_in("number of layers", 3)', "5").replace(
        'fill_in("number of heads", 2)', "4"
    )
    report = run(Request(name="mine", file=write(tmp_path, filled), level="L1"))
    assert report.verdict.sentence == "mine: conformant at L1"


def test_check_lists_the_marks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`kvc check` tells each with its line and exits 3; its JSON has them too."""
    file = write(tmp_path, MARKED)
    arguments = ["check", "mine", "--plugin", str(file)]
    assert main(arguments) == 3
    out = capsys.readouterr().out
    assert f"TO FILL IN  number of heads ({file}:6)" in out
    assert out.splitlines()[-1].endswith("number of layers, number of heads")
    assert main([*arguments, "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"]
    assert found["to_fill_in"][0] == {"fact": "number of layers", "where": f"{file}:5"}
    assert found["geometry"]["arenas"] == 3


def test_a_mark_in_a_function_is_refused(tmp_path: Path) -> None:
    """It would be known only once the function ran: the plugin does not load, and says why."""
    hidden = MARKED.replace("HEADS, ", 'fill_in("heads", 2), ')
    report = run(Request(name="mine", file=write(tmp_path, hidden), level="L0"))
    [failed] = [item for item in report.results if item.outcome is Outcome.FAIL]
    assert "fill_in: it is called at the top of a module, not in kvc_model" in failed.evidence.saw


def test_a_mark_names_its_fact() -> None:
    """Every fault is named at once."""
    with pytest.raises(UsageFault, match=r"names the fact.* not ' '; it is called at the top of a module"):
        fill_in(" ", 1)

"""The runner on small plugins: plan, results, verdicts, exit codes, isolation."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from kvc_conformance import report as reports
from kvc_conformance.outcomes import Outcome, Result
from kvc_conformance.runner import Report, Request, run
from kvcontract.cli.main import main
from kvcontract.contract.errors import UsageFault

GOOD = """
    from kvcontract import Arena, Conversion, Field, Group, KvModel, Repack, hookimpl

    KVC_CONTRACT = 1

    def plane(name, dim):
        return Field(name=name, dtype="float16", axes={"head": 2, "dim": dim}, shard_axis="head")

    def arenas(order):
        return tuple(
            Arena.planes(name=f"layer.{i}", group="kv", layer=i, fields=tuple(plane(n, 3) for n in order))
            for i in range(3)
        )

    def declare(ctx, **more):
        given = dict(
            contract=1, name="mine", weights=ctx.weights, numerics="float16",
            page_tokens=ctx.options.page_tokens or 4, key_tokens=ctx.options.key_tokens,
            groups=(Group(name="kv"),), arenas=arenas("kv"),
        )
        if ctx.options.kv_dtype:
            raise ctx.refuse("kv_dtype", allowed="none", why="there is one element type")
        return KvModel(**{**given, **more})

    @hookimpl
    def kvc_model(ctx):
        return declare(ctx)
"""


def write(folder: Path, tail: str = "", source: str = GOOD) -> Path:
    """A plugin file named mine.py; `tail` is appended, and a second kvc_model replaces the first."""
    file = folder / "mine.py"
    file.write_text(textwrap.dedent(source) + textwrap.dedent(tail))
    return file


def certify(file: Path, **more: Any) -> Report:
    """A run up to level 1, unless said otherwise."""
    return run(Request(**{"name": "mine", "file": file, "level": "L1", **more}))


def broken(report: Report) -> set[str]:
    """Clauses that failed."""
    return {item.clause for item in report.results if item.outcome in {Outcome.FAIL, Outcome.ERROR}}


def text_of(report: Report, clause: str) -> str:
    """What the first failure of a clause saw."""
    return next(r.evidence.saw for r in report.results if r.clause == clause and r.outcome is Outcome.FAIL)


def test_a_sound_declaration_is_conformant_at_l1(tmp_path: Path) -> None:
    """Plan and results agree one to one, and the verdict is exit 0."""
    report = certify(write(tmp_path))
    assert report.verdict.sentence == "mine: conformant at L1"
    assert report.verdict.exit_code == 0
    assert [(item.clause, item.case) for item in report.results] == list(report.plan)


def test_without_an_executor_l2_is_incomplete_and_says_so(tmp_path: Path) -> None:
    """Level 1 is reached; the sentence says what level 2 needs; exit 3."""
    report = certify(write(tmp_path), level="L2")
    assert report.verdict.exit_code == 3
    assert report.verdict.sentence.startswith("mine: conformant at L1; L2 needs an executor")


def test_a_selection_certifies_nothing(tmp_path: Path) -> None:
    """One clause and what it requires run; the rest is deselected; exit 3."""
    report = certify(write(tmp_path), only=("KVC-LAYOUT-06",))
    assert report.verdict.exit_code == 3
    outcomes = {item.clause: item.outcome for item in report.results}
    assert outcomes["KVC-LAYOUT-06"] is Outcome.PASS
    assert outcomes["KVC-LAYOUT-05"] is Outcome.DESELECTED


SWAP = """
    def pack(src, dst):
        for name, values in src.items():
            dst[name].copy_(values)

    def unpack(src, dst):
        for name, values in src.items():
            arena, field = name.split("/")
            dst[f"{arena}/{'v' if field == 'k' else 'k'}"].copy_(values)

    @hookimpl
    def kvc_model(ctx):
        names = Conversion(to_wire="mine:pack", from_wire="mine:unpack")
        return declare(ctx, repack=Repack(arenas=arenas("kv"), conversion=names))
"""


def test_a_swap_in_restore_is_decoded(tmp_path: Path) -> None:
    """The failure says whose value was found where."""
    report = certify(write(tmp_path, SWAP))
    assert broken(report) == {"KVC-REPACK-03"}
    saw = text_of(report, "KVC-REPACK-03")
    assert "found the value of layer 0 V page 0 token 0 head 0 dim 0" in saw
    assert "where layer 0 K page 0 token 0 head 0 dim 0 belongs" in saw
    assert report.verdict.exit_code == 1


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("for name, values in src.items(): values.zero_(); dst[name].copy_(values)", "changed its source"),
        ("for name, values in src.items(): dst[name][1:].copy_(values[1:])", "unwritten"),
        (
            "for name, values in src.items(): N.append(1); dst[name].copy_(values); dst[name] += len(N)",
            "bytes",
        ),
    ],
)
def test_badly_behaved_conversions_are_found(tmp_path: Path, body: str, said: str) -> None:
    """Touching the source, leaving gaps, or being different the next time: one clause, its own words."""
    tail = SWAP.replace("dst[name].copy_(values)\n\n", "dst[name].copy_(values)\n\n    N = []\n\n", 1)
    tail = tail.replace(
        "        for name, values in src.items():\n            dst[name].copy_(values)\n", f"        {body}\n"
    )
    tail = tail.replace("'v' if field == 'k' else 'k'", "field")
    report = certify(write(tmp_path, tail))
    assert "KVC-REPACK-04" in broken(report)
    assert said in text_of(report, "KVC-REPACK-04")


def test_a_conversion_nobody_can_import_is_found(tmp_path: Path) -> None:
    """The name and the reason are told, and what needs it is blocked."""
    report = certify(write(tmp_path, SWAP.replace("mine:unpack", "mine:unpak")))
    assert "KVC-REPACK-02" in broken(report)
    blocked = {item.clause for item in report.results if item.outcome is Outcome.BLOCKED}
    assert {"KVC-REPACK-03", "KVC-REPACK-04"} <= blocked


def test_a_derived_repack_is_certified(tmp_path: Path) -> None:
    """Another field order on the wire, derived: conformant, and checked against the oracle."""
    tail = """
    @hookimpl
    def kvc_model(ctx):
        return declare(ctx, repack=Repack(arenas=arenas("vk")))
    """
    assert certify(write(tmp_path, tail)).verdict.exit_code == 0


def test_a_declaration_that_follows_tp_is_found(tmp_path: Path) -> None:
    """Dividing by tp changes the identity, so peers of unequal degree would never meet."""
    tail = """
    @hookimpl
    def kvc_model(ctx):
        return declare(ctx, numerics=f"float16 at tp {ctx.options.tp}")
    """
    assert broken(certify(write(tmp_path, tail))) == {"KVC-LAYOUT-08"}


def test_static_faults_block_what_rests_on_them(tmp_path: Path) -> None:
    """The root cause fails, the rest is blocked and names it; nothing cascades."""
    tail = """
    @hookimpl
    def kvc_model(ctx):
        return declare(ctx, page_tokens_allowed=(16,), groups=(Group(name="vk"),))
    """
    report = certify(write(tmp_path, tail))
    assert broken(report) == {"KVC-DECL-06", "KVC-DECL-07", "KVC-DECL-09"}
    layout = next(item for item in report.results if item.clause == "KVC-LAYOUT-06")
    assert (layout.outcome, "KVC-DECL-06" in layout.because) == (Outcome.BLOCKED, True)


@pytest.mark.parametrize(
    ("source", "clause", "said"),
    [
        ("raise RuntimeError('no such driver')", "KVC-DECL-01", "no such driver"),
        ("import sys; sys.exit(0)", "KVC-DECL-01", "SystemExit"),
        (GOOD.replace("KVC_CONTRACT = 1", "KVC_CONTRACT = 9"), "KVC-DECL-03", "contract 9"),
        (GOOD.replace("def kvc_model", "def kvc_modle"), "KVC-DECL-02", "did you mean kvc_model"),
    ],
)
def test_i1_a_plugin_that_does_not_load_is_exit_4(
    tmp_path: Path, source: str, clause: str, said: str
) -> None:
    """The clause that says why fails alone; everything else is blocked by it."""
    report = certify(write(tmp_path, source=source))
    assert report.verdict.exit_code == 4
    assert broken(report) == {clause}
    assert said in text_of(report, clause)
    assert said in report.verdict.sentence


def test_a_plugin_that_kills_its_process_is_an_error_not_a_pass(tmp_path: Path) -> None:
    """os._exit in a conversion ends the child; the parent goes on and judges."""
    report = certify(write(tmp_path, SWAP.replace("arena, field", "import os; os._exit(0); arena, field")))
    assert broken(report) == {"KVC-REPACK-04"}
    assert report.verdict.exit_code == 1


HOOK = """
    @hookimpl
    def {name}(ctx):
        {body}
"""


@pytest.mark.parametrize(
    ("name", "body", "clause", "said"),
    [
        ("kvc_samples", "return None", "KVC-DECL-04", "kvc_samples returns a tuple"),
        ("kvc_samples", "return 'config.json'", "KVC-DECL-04", "config.json"),
        ("kvc_samples", "return ({'a': {1, 2}},)", "KVC-DECL-04", "kvc_samples"),
        ("kvc_samples", "raise ValueError('no such size')", "KVC-DECL-01", "no such size"),
        ("kvc_samples", "import sys; sys.exit(0)", "KVC-DECL-01", "SystemExit"),
        ("kvc_samples", "import os; os._exit(0)", "KVC-DECL-01", "ended with code 0"),
        ("kvc_options", "raise KeyboardInterrupt", "KVC-DECL-01", "KeyboardInterrupt"),
        ("kvc_options", "return 7", "KVC-DECL-04", "kvc_options"),
    ],
)
def test_i1_a_hook_that_misbehaves_is_a_failure_with_a_report(
    tmp_path: Path, name: str, body: str, clause: str, said: str
) -> None:
    """One clause fails by the plugin's fault, everything else is blocked, exit 1, and the report is whole."""
    report = certify(write(tmp_path, HOOK.format(name=name, body=body)))
    assert broken(report) == {clause}
    assert said in text_of(report, clause)
    assert report.verdict.exit_code == 1
    others = {item.outcome for item in report.results if item.clause != clause}
    assert others == {Outcome.BLOCKED}
    assert {item.fault for item in report.results if item.outcome is Outcome.FAIL} == {"plugin"}


@pytest.mark.parametrize("body", ["import os; os._exit(3)", "raise KeyboardInterrupt"])
def test_i1_a_plugin_that_ends_its_process_at_import_is_exit_4(tmp_path: Path, body: str) -> None:
    """Whatever ends the import, it was not loaded."""
    report = certify(write(tmp_path, source=body))
    assert (report.verdict.exit_code, broken(report)) == (4, {"KVC-DECL-01"})
    assert "could not be loaded" in report.verdict.sentence


def test_a_plugin_that_forks_is_answered_for_once(tmp_path: Path) -> None:
    """The forked process does not answer in its parent's place."""
    tail = """
    @hookimpl
    def kvc_samples(ctx):
        import os
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
        return ()
    """
    assert certify(write(tmp_path, tail)).verdict.exit_code == 0


def test_garbage_on_the_channel_is_the_plugins_error(tmp_path: Path) -> None:
    """A conversion that writes to the suite's socket: an error of that clause, and the rest goes on."""
    noise = "import os, sys; os.write(int(sys.argv[1]), b'x' * 4096); arena, field"
    report = certify(write(tmp_path, SWAP.replace("arena, field", noise, 1)))
    assert "KVC-REPACK-04" in broken(report)
    errors = [item for item in report.results if item.outcome is Outcome.ERROR]
    assert {item.fault for item in errors} == {"plugin"}
    assert "no message" in errors[0].evidence.saw


def test_a_conversion_that_seldom_differs_is_found(tmp_path: Path) -> None:
    """KVC-REPACK-04: every 7th call is another."""
    tail = """
    CALLS = []

    def pack(src, dst):
        CALLS.append(1)
        for name, values in src.items():
            dst[name].copy_(values)
            if len(CALLS) % 7 == 0:
                dst[name].zero_()

    def unpack(src, dst):
        for name, values in src.items():
            dst[name].copy_(values)

    @hookimpl
    def kvc_model(ctx):
        names = Conversion(to_wire="mine:pack", from_wire="mine:unpack")
        return declare(ctx, repack=Repack(arenas=arenas("kv"), conversion=names))
    """
    assert "KVC-REPACK-04" in broken(certify(write(tmp_path, tail)))


def test_a_field_of_bools_is_certified(tmp_path: Path) -> None:
    """KVC-LAYOUT-06, KVC-REPACK-03: bools hold 0 and 1, and nothing else is written into them."""
    assert certify(write(tmp_path, source=GOOD.replace('"float16"', '"bool"', 1))).verdict.exit_code == 0


def test_a_page_beyond_any_machine_could_not_run(tmp_path: Path) -> None:
    """In words, with a whole report: not out of memory, and no traceback."""
    report = certify(write(tmp_path, source=GOOD.replace('"dim": dim', '"dim": dim << 30')), level="L1")
    assert not broken(report)
    assert report.verdict.exit_code == 3
    said = [item.evidence.saw for item in report.results if item.outcome is Outcome.COULD_NOT_RUN]
    assert any("needs pages of at most" in text for text in said)


def test_a_broken_checkpoint_is_the_requests_fault(tmp_path: Path) -> None:
    """Missing shards and cut-off files are named before a plugin is looked at: exit 2."""
    (tmp_path / "config.json").write_text("{}")
    file = write(tmp_path)
    with pytest.raises(UsageFault, match=r"missing: model\.safetensors"):
        certify(file, checkpoint=tmp_path)
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    whole = len(header).to_bytes(8, "little") + header + bytes(16)
    for data, said in (
        (whole[:4], "too few"),
        (whole[:20], "its header should have"),
        (whole[:-3], "cut off"),
        (len(header).to_bytes(8, "little") + b"{" * len(header), "no safetensors header"),
    ):
        (tmp_path / "model.safetensors").write_bytes(data)
        with pytest.raises(UsageFault, match=said):
            certify(file, checkpoint=tmp_path)
    (tmp_path / "model.safetensors").write_bytes(whole)
    assert certify(file, checkpoint=tmp_path, level="L0").verdict.exit_code == 0


def test_what_passes_is_told_folded(tmp_path: Path) -> None:
    """Progress has one line for each outcome of a clause, and every failure by itself."""
    told: list[Result] = []
    report = run(Request("mine", write(tmp_path), level="L1"), progress=told.append)
    assert len(told) < len(report.results)
    assert len({(item.clause, item.outcome) for item in told}) == len(told)
    assert next(item for item in told if item.clause == "KVC-LAYOUT-07").case == "12 cases"


def test_nothing_in_the_environment_sways_the_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hostile PYTHONPATH module that shadows the suite's own is not seen by the child."""
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    (hostile / "sitecustomize.py").write_text("import os; os._exit(0)")
    (hostile / "numpy.py").write_text("raise SystemExit(0)")
    monkeypatch.setenv("PYTHONPATH", str(hostile))
    monkeypatch.setenv("PYTEST_ADDOPTS", "--co -q")
    monkeypatch.chdir(hostile)
    assert certify(write(tmp_path)).verdict.exit_code == 0


def test_what_a_plugin_prints_harms_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --json, stdout is one document whatever the plugin writes to its own stdout."""
    file = write(tmp_path, "print('hello {')\n")
    code = main(["conformance", "mine", "--plugin", str(file), "--level", "L0", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert (code, document["exit_code"], document["verdict"], document["level"]) == (0, 0, "conformant", "L0")
    assert document["schema"] == "kvc.report/1"
    assert len(document["plan"]) == len(document["results"])


def test_a_failure_reads_as_one_record(tmp_path: Path) -> None:
    """Clause, rule, what was seen, why, what to try, whose fault, how to run it again."""
    file = write(tmp_path, SWAP)
    text = "\n".join(reports.lines(certify(file)))
    for label in ("rule:", "saw:", "why:", "try:", "fault: plugin", "again: kvc conformance mine", "more:"):
        assert label in text
    assert f"--plugin {file} --level L1 --clause KVC-REPACK-03" in text
    assert text.splitlines()[-1].startswith("mine: not conformant: KVC-REPACK-03")


def test_the_same_run_gives_the_same_words(tmp_path: Path) -> None:
    """No timings, addresses or temporary paths in the report's lines."""
    file = write(tmp_path, SWAP)
    assert reports.lines(certify(file)) == reports.lines(certify(file))

"""The command line: exit codes, JSON, errors that suggest, nothing but data on stdout."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvcontract
from kvcontract.cli.main import COMMANDS, main

CONFIGS = Path(__file__).parents[1] / "configs"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command line."""
    code = main(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    """Exit code and the one JSON document on stdout."""
    code, out, _ = run(capsys, *arguments, "--json")
    return code, json.loads(out)


def check(capsys: pytest.CaptureFixture[str], size: str, *arguments: str) -> tuple[int, Any]:
    """`kvc check` on a real config."""
    return run_json(capsys, "check", "qwen3", "--config", str(CONFIGS / f"qwen3-{size}.json"), *arguments)


@pytest.mark.parametrize(
    ("size", "layers"), [("0.6b", 28), ("1.7b", 28), ("4b", 36), ("8b", 36), ("14b", 40), ("32b", 64)]
)
def test_check_gives_the_published_geometry(
    capsys: pytest.CaptureFixture[str], size: str, layers: int
) -> None:
    """8 heads of 128 in bfloat16: 65,536 B a slice at page 16, whatever the depth."""
    code, found = check(capsys, size)
    assert code == 0
    figures = found["geometry"]
    assert figures["arenas"] == layers
    assert figures["slice_bytes"] == {"kv": 65_536}
    assert figures["page_bytes"] == layers * 65_536
    assert figures["bytes_per_token"] == layers * 4_096


def test_check_at_page_64_and_tp_2(capsys: pytest.CaptureFixture[str]) -> None:
    """Pages of 64 are four times as large; tp 2 halves a worker's bytes under one fingerprint."""
    whole = check(capsys, "4b")[1]["geometry"]
    assert (whole["page_bytes"], whole["bytes_per_token"]) == (2_359_296, 147_456)
    assert check(capsys, "4b", "--page-tokens", "64")[1]["geometry"]["page_bytes"] == 9_437_184
    half = check(capsys, "4b", "--tp", "2")[1]["geometry"]
    assert half["page_bytes"] * 2 == whole["page_bytes"]
    assert half["fingerprint"] == whole["fingerprint"]


def test_equal_geometry_under_other_weights_is_another_identity(capsys: pytest.CaptureFixture[str]) -> None:
    """4B and 8B keep the same bytes per token and must never meet (D6)."""
    four, eight = check(capsys, "4b")[1]["geometry"], check(capsys, "8b")[1]["geometry"]
    assert four.pop("fingerprint") != eight.pop("fingerprint")
    assert four == eight


def test_an_ungated_page_size_is_refused_with_its_clause(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 1, the clause, the reason, what is allowed and the author's line."""
    code, found = check(capsys, "4b", "--page-tokens", "32")
    assert (code, found["ok"], found["geometry"]) == (1, False, None)
    [item] = found["findings"]
    assert (item["clause"], item["path"], item["value"]) == ("KVC-DECL-07", "page_tokens", 32)
    assert item["allowed"] == "16 or 64"
    assert "gates" in item["message"]
    assert "kvc_qwen3" in item["where"]


def test_i3_findings_of_options_and_declaration_come_together(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown plugin option beside a tp that does not fit: both are told."""
    code, found = check(capsys, "4b", "--tp", "3", "-O", "rope=2")
    assert code == 1
    assert {item["clause"] for item in found["findings"]} == {"KVC-DECL-10", "KVC-LAYOUT-02"}


def test_another_familys_config_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The plugin says whose config it got."""
    code, found = run_json(capsys, "check", "qwen3", "--config", str(CONFIGS / "glm-5.2.json"))
    assert code == 1
    assert "glm_moe_dsa" in found["findings"][0]["message"]


def test_inspect_shows_where_the_bytes_go(capsys: pytest.CaptureFixture[str]) -> None:
    """Fields with offsets, and what a record holds; the declaration reads back as JSON."""
    arguments = ("inspect", "qwen3", "--config", str(CONFIGS / "qwen3-4b.json"))
    code, found = run_json(capsys, *arguments)
    assert code == 0
    assert len(found["arenas"]) == 72
    assert found["arenas"][1] == {
        "arena": "layers.0.kv",
        "group": "kv",
        "field": "v",
        "dtype": "bfloat16",
        "shape": {"token": 16, "head": 8, "dim": 128},
        "offset_bytes": 32_768,
        "content_bytes": 32_768,
    }
    assert found["records"][0]["payload_bytes"] == 2_359_296
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    assert "2,359,296 B" in out
    assert "147,456 B" in out


def test_models_lists_and_loads(capsys: pytest.CaptureFixture[str]) -> None:
    """The installed plugins are listed with their distributions, and load."""
    code, found = run_json(capsys, "models", "--load")
    assert code == 0
    listed = {item["name"]: (item["distribution"], item["status"]) for item in found["models"]}
    for name in ("gemma4", "qwen3", "qwen35"):
        assert listed[name] == (f"kvc-{name}", "loads")


def test_explain_one_and_all(capsys: pytest.CaptureFixture[str]) -> None:
    """A clause with its rule, or the list; not both, not neither."""
    code, found = run_json(capsys, "explain", "kvc-layout-05")
    assert (code, found["clauses"][0]["id"]) == (0, "KVC-LAYOUT-05")
    assert len(run_json(capsys, "explain", "--all")[1]["clauses"]) > 30
    assert run(capsys, "explain")[0] == 2
    code, _, err = run(capsys, "explain", "KVC-LAYUOT-05")
    assert code == 2
    assert "KVC-LAYOUT-05" in err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("check", "qwen"), 4, "did you mean qwen3"),
        (("check", "qwen3", "--config", "/no/such.json"), 2, "no such file"),
        (("check", "qwen3", "--config", __file__), 2, "not readable as JSON"),
        (("check", "qwen3", "--checkpoint", "/no/such"), 2, "no such"),
        (("check", "qwen3", "-O", "rope"), 2, "NAME=VALUE"),
        (("check", "qwen3", "--page-tokens", "x"), 2, "valid integer"),
        (("check", "qwen3", "--pagetokens", "16"), 2, "--page-tokens"),
        (("chekc", "qwen3"), 2, "check"),
        (("help", "x"), 2, "exit-codes"),
        (("conformance", "qwen3", "--level", "L9"), 2, "L0, L1, L2"),
        (("conformance", "qwen3", "--clause", "KVC-X"), 2, "there is no clause"),
    ],
)
def test_i4_faults_exit_with_their_code_and_suggest(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, said: str
) -> None:
    """One clear line on stderr, no traceback; with --json one document on stdout."""
    found, out, err = run(capsys, *arguments)
    assert found == code
    assert said in err
    assert "Traceback" not in err
    assert out == ""
    found, document = run_json(capsys, *arguments)
    assert (found, document["exit_code"]) == (code, code)
    assert said in document["error"]


def test_exit_codes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """`kvc help exit-codes` lists all seven."""
    assert set(run_json(capsys, "help", "exit-codes")[1]["exit_codes"]) == {
        "0",
        "1",
        "2",
        "3",
        "4",
        "5",
        "130",
    }


def test_names_in_brackets_print_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """User text is never read as markup."""
    _, _, err = run(capsys, "check", "[red]")
    assert "[red]" in err


def test_kvc_alone_prints_help_and_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    """No command: the help, whole first lines of every command, exit 2; nothing reported as a fault."""
    code, out, err = run(capsys)
    assert code == 2
    assert err == ""
    assert "..." not in out.split("Commands:")[1]
    for name, (home, line) in COMMANDS.items():
        assert name in out
        assert line in out
        module = importlib.import_module(home)
        told = module.app.info.help if hasattr(module, "app") else module.command.__doc__
        assert (told or "").splitlines()[0] == line


def test_help_imports_no_command() -> None:
    """`kvc --help` answers at once: neither pydantic nor rich nor a command's module is loaded."""
    script = (
        "import sys\nfrom kvcontract.cli.main import main\nmain(['--help'])\n"
        "print({'pydantic', 'numpy', 'rich', 'kvcontract.cli.check'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_json_is_one_document_whatever_a_plugin_prints(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Prints at import and in hooks do not reach stdout; exits are findings with exit 1."""
    file = tmp_path / "talks.py"
    hook = "from kvcontract import hookimpl\nKVC_CONTRACT = 1\nprint('hello')\n@hookimpl\n"
    file.write_text(hook + "def kvc_model(ctx):\n    print('again')\n    raise SystemExit(0)\n")
    code, found = run_json(capsys, "check", "talks", "--plugin", str(file))
    assert (code, found["findings"][0]["clause"]) == (1, "KVC-DECL-01")
    file.write_text(hook + "def kvc_model(ctx):\n    raise ValueError('\\ud800')\n")
    assert run_json(capsys, "check", "talks", "--plugin", str(file))[0] == 1


def test_i4_bounds_of_an_option_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    """`--tp 0` is answered with what tp may be."""
    [item] = check(capsys, "4b", "--tp", "0")[1]["findings"]
    assert (item["clause"], item["path"], item["allowed"]) == ("KVC-DECL-10", "options.tp", "at least 1")


def test_i4_a_config_of_another_dtype_names_the_key(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The config's own dtype is at fault, so its key is named, not an option nobody gave."""
    config = json.loads((CONFIGS / "qwen3-4b.json").read_text())
    for change, path in (
        ({"torch_dtype": "float8_e4m3fn"}, "config.torch_dtype"),
        ({"num_hidden_layers": "36"}, "config.num_hidden_layers"),
        ({"head_dim": None}, "config.head_dim"),
        ({"use_sliding_window": True}, "config.use_sliding_window"),
    ):
        file = tmp_path / "config.json"
        file.write_text(json.dumps({**config, **change}))
        code, found = run_json(capsys, "check", "qwen3", "--config", str(file))
        assert code == 1
        [item] = found["findings"]
        assert (item["clause"], item["path"]) == ("KVC-DECL-11", path)


def test_equal_findings_are_told_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Eight arenas with one fault: three places, and how many more; --json has them all."""
    file = tmp_path / "many.py"
    file.write_text(
        "from kvcontract import Arena, Field, Group, KvModel, hookimpl\nKVC_CONTRACT = 1\n"
        "@hookimpl\ndef kvc_model(ctx):\n"
        "    one = Field(name='k', dtype='odd', axes={'dim': 8})\n"
        "    arenas = tuple(Arena.rows(name=f'l{i}', group='kv', fields=(one,)) for i in range(8))\n"
        "    return KvModel(contract=1, name='many', weights=ctx.weights, numerics='n', page_tokens=16,\n"
        "                   groups=(Group(name='kv'),), arenas=arenas)\n"
    )
    arguments = ("check", "many", "--plugin", str(file))
    code, out, _ = run(capsys, *arguments)
    assert code == 1
    assert out.count("FAIL") == 1
    assert "5 more (8 in all" in out
    assert "many: 8 findings" in out
    assert len(run_json(capsys, *arguments)[1]["findings"]) == 8
    file.write_text(file.read_text().replace("range(8)", "range(1)").replace("odd", "int8"))
    assert "1 arena," in run(capsys, *arguments)[1]


def test_inspect_writes_shapes_and_counts_for_readers(capsys: pytest.CaptureFixture[str]) -> None:
    """Shapes by axis, thousands separated."""
    _, out, _ = run(capsys, "inspect", "qwen3", "--config", str(CONFIGS / "qwen3-4b.json"))
    assert "[token 16, head 8, dim 128]" in out
    assert "32,768" in out
    assert "{" not in out


def test_explain_tells_what_an_object_of_a_declaration_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    """Its docstring and fields with defaults, and nothing of pydantic; of a field, the dtypes there are."""
    _, out, _ = run(capsys, "explain", "Group")
    assert "boundary_tokens" in out
    assert "restore='stored'" in out
    assert "model_dump" not in out
    assert "float8_e4m3fn" in run(capsys, "explain", "Field")[1]
    for name in kvcontract.__all__:
        assert run(capsys, "explain", name)[0] == 0
    assert run_json(capsys, "explain", "Window")[1]["fields"]["sink_tokens"] == "=0"


def test_explain_says_where_a_clause_applies(capsys: pytest.CaptureFixture[str]) -> None:
    """Everywhere, on every tier, or where a declaration has what it is about; JSON names the capability."""
    assert "applies:  to every declaration\n" in run(capsys, "explain", "KVC-DECL-05")[1]
    assert "applies:  to every tier\n" in run(capsys, "explain", "KVC-TIER-02")[1]
    said = run(capsys, "explain", "KVC-REPACK-02")[1]
    assert "applies:  where the repack names callables (Repack.conversion)\n" in said
    [rule] = run_json(capsys, "explain", "KVC-REPACK-02")[1]["clauses"]
    assert (rule["capability"], rule["since"], rule["who"]) == ("conversion", 1, "author")

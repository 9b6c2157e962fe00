"""The house: which room imports which, what an import costs, how long a module may be."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("contract", "core", "pool", "memory", "tiers", "store", "engine", "cli")
MODULES = sorted((ROOT / "kvcontract").rglob("*.py"))
SUITE = sorted((ROOT / "conformance").rglob("*.py"))
TEMPLATES = sorted((ROOT / "templates").rglob("*.py"))
SOURCES = [*MODULES, *SUITE, *TEMPLATES, *sorted((ROOT / "plugins").rglob("*.py"))]
TORCH_ROOMS = {"memory", "engine"}
LONGEST_MODULE = 450
LONGEST_FUNCTION = 50


def imports(tree: ast.AST) -> set[str]:
    """Every module that a tree imports, at any depth, type-checking blocks left out."""
    found = set()
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            skipped |= {inner for child in node.body for inner in ast.walk(child)}
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def room(module: str) -> str | None:
    """The room of a dotted name, if it is one of ours."""
    parts = module.split(".")
    return parts[1] if parts[0] == "kvcontract" and len(parts) > 1 and parts[1] in ROOMS else None


@pytest.mark.parametrize(
    "file",
    [file for file in MODULES if file.parent.name in ROOMS],
    ids=lambda file: f"{file.parent.name}/{file.name}",
)
def test_rooms_import_only_earlier_rooms(file: Path) -> None:
    """contract, core, pool, memory, tiers, store, engine, cli: no arrow points back."""
    mine = ROOMS.index(file.parent.name)
    for module in imports(ast.parse(file.read_text())):
        theirs = room(module)
        assert theirs is None or ROOMS.index(theirs) <= mine, f"{file} imports {module}"


@pytest.mark.parametrize("file", MODULES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_torch_stays_in_its_rooms(file: Path) -> None:
    """Only memory and engine know tensors; the suite is used by cli and engine alone."""
    for module in imports(ast.parse(file.read_text())):
        top = module.split(".")[0]
        if top in {"torch", "transformers", "safetensors"}:
            assert file.parent.name in TORCH_ROOMS, f"{file} imports {module}"
        if top == "kvc_conformance":
            assert file.parent.name in {"cli", "engine"}, f"{file} imports {module}"
        if top == "kvc_templates":
            assert file.parent.name == "cli", f"{file} imports {module}"


@pytest.mark.parametrize("file", TEMPLATES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_templates_rest_on_the_contract_alone(file: Path) -> None:
    """They write plugins, so they know what a plugin may know."""
    for module in imports(ast.parse(file.read_text())):
        assert room(module) in {None, "contract"}, f"{file} imports {module}"
        assert module.split(".")[0] != "kvc_conformance", f"{file} imports {module}"


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_long_modules_and_functions_give_a_reason(file: Path) -> None:
    """Above 450 lines a module, above 50 a function says why in a comment that begins with 'long:'."""
    text = file.read_text()
    lines = text.splitlines()
    assert len(lines) <= LONGEST_MODULE or "# long:" in text, f"{file}: {len(lines)} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            body = lines[node.lineno - 1 : node.end_lineno]
            assert len(body) <= LONGEST_FUNCTION or any("# long:" in line for line in body), (
                f"{file}: {node.name}"
            )


def test_no_model_is_named_in_the_library() -> None:
    """Model names live in plugins, tests and docs."""
    names = re.compile(r"qwen|llama|gemma|deepseek|glm|gpt.?oss|kimi|mistral", re.IGNORECASE)
    for file in [*MODULES, *SUITE, *TEMPLATES, *sorted((ROOT / "templates").rglob("*.j2"))]:
        for number, line in enumerate(file.read_text().splitlines(), 1):
            assert not names.search(line) or "kvc " in line, f"{file}:{number}: {line.strip()}"


def loaded_after(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after some code."""
    script = f"{code}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import kvcontract", {"torch", "pydantic", "numba", "numpy", "pluggy"}),
        ("from kvcontract import KvModel, hookimpl", {"torch", "numba", "numpy", "transformers"}),
        ("import kvc_gemma4", {"torch", "numba", "transformers"}),
        ("import kvc_qwen3", {"torch", "numba", "transformers"}),
        ("import kvc_qwen35", {"torch", "numba", "transformers"}),
        ("from kvcontract import BlockPool, Keyer", {"torch", "numba", "transformers"}),
        ("import kvcontract.tiers.dram", {"torch", "numba", "transformers"}),
        ("import kvcontract.cli.main as m; m.main(['--help'])", {"torch", "numba", "transformers", "jinja2"}),
        ("import kvc_templates.scaffold", {"torch", "numba", "transformers"}),
    ],
)
def test_imports_load_nothing_heavy(code: str, absent: set[str]) -> None:
    """What a first import costs is kept small on purpose."""
    assert not loaded_after(code) & absent


def test_public_names_resolve() -> None:
    """Every name in __all__ exists, and an unknown one says so."""
    import kvcontract  # noqa: PLC0415 - what is tested

    for name in kvcontract.__all__:
        assert getattr(kvcontract, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'KvModle'"):
        _ = kvcontract.KvModle

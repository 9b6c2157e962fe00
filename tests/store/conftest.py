"""Makes the helpers beside the tests importable; runs what counts no records with all kinds of models."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import bench_store


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every kind, for tests over `bench_store.setup` that are not marked `paged`."""
    own = getattr(metafunc.module, "setup", None) is bench_store.setup
    if own and "model_kind" in metafunc.fixturenames and not metafunc.definition.get_closest_marker("paged"):
        kinds = getattr(metafunc.module, "KINDS", tuple(bench_store.KINDS))
        metafunc.parametrize("model_kind", kinds, indirect=True)


@pytest.fixture(autouse=True)
def model_kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """What models keep beside full pages: nothing, unless the test runs with every kind."""
    before, bench_store.kind = bench_store.kind, getattr(request, "param", "paged")
    yield bench_store.kind
    bench_store.kind = before

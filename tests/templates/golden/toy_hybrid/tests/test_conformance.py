"""The plugin is conformant at level 2."""

from kvc_conformance.runner import Request, run


def test_conformance() -> None:
    """A small model of the kind, with random weights, is run over the declared arenas and judged."""
    report = run(Request(name="toy_hybrid"))
    assert report.verdict.sentence == "toy_hybrid: conformant at L2"

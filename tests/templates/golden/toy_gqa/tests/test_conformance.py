"""The plugin is conformant at level 2: a small model of the kind, with random weights, is run and judged."""

from kvc_conformance.pytest_plugin import certify

TestConformance = certify("toy_gqa")

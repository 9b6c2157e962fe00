# Everything runs in a virtual environment inside the clone.
#   make conformance    set up, then certify the qwen3 plugin on a small generated checkpoint
#   make zoo            certify every plugin that is wrong on purpose, and write docs/zoo.md
#   make test           set up, then lint, type-check and test
#   make mutants        change the suite's checks 400 times over; nearly every change must be noticed (an hour)
# TORCH is what pip is asked for first; set it to take another build, for example a CUDA one:
#   make conformance TORCH=torch==2.11.0

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup conformance test lint types tests tests-of-suite tests-of-library test-slow test-cuda test-wheel zoo mutants clean

setup: $(READY)

$(READY): pyproject.toml $(wildcard plugins/*/pyproject.toml)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[hf,crypto,dev]'
	$(BIN)/python -m pip install --quiet $(patsubst %/pyproject.toml,--editable %,$(wildcard plugins/*/pyproject.toml))
	touch $(READY)

conformance: setup
	$(BIN)/kvc conformance qwen3

test: lint types tests

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

# Two halves of about the same length, beside each other: one is the suite's, the other the library's.
tests: setup
	$(MAKE) --no-print-directory --jobs 2 tests-of-suite tests-of-library

OURS := tests/conformance tests/contract tests/zoo

tests-of-suite: setup
	$(BIN)/python -m pytest -m "not slow and not cuda and not wheel" $(OURS)

tests-of-library: setup
	$(BIN)/python -m pytest -m "not slow and not cuda and not wheel" -p no:cacheprovider tests $(OURS:%=--ignore=%)

# Longer seeds of the same properties.
test-slow: setup
	$(BIN)/python -m pytest -m slow

# Needs a CUDA device, and a torch built for it.
test-cuda: setup
	$(BIN)/python -m pytest -m cuda

# Builds the wheels, installs them into an empty environment outside the clone, certifies there.
test-wheel: setup
	TORCH='$(TORCH)' $(BIN)/python -m pytest -m wheel

# Every animal of the zoo, by every clause: half an hour on two cores.
zoo: setup
	$(BIN)/python tests/zoo/matrix.py

# Writes docs/mutants.md; one that was ended goes on where it was.
mutants: setup
	$(BIN)/python -m pip install --quiet --editable '.[mutants]'
	$(BIN)/python tests/mutants/run.py --count 400 --seed 0 --jobs 2

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .mutants build dist

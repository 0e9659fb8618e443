# `make demo`, then `make test`: nothing else is needed on a machine with Python 3.11, make and a C++ compiler.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

# Nothing here asks a model hub: models are made from their configurations, or come in a package.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-one lint bench bench-train bench-gpu clean

help:  ## say what there is
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

setup: $(READY)  ## make .venv with everything that the other targets need (they do it themselves)

# PyTorch comes first and by itself: it is by far the largest, and its version decides the rest.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "autofuse needs Python 3.11 or newer")'
	@echo "Installing PyTorch and what the demo and the tests need into $(VENV); this takes some minutes."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(READY)  ## train a small GPT-2 with and without autofuse, and compare (5 minutes)
	$(BIN)/python examples/demo.py

test: lint  ## every check: ruff, mypy, the tests and the docstrings' examples
	$(BIN)/python -m pytest -n 2

test-one: $(READY)  ## some tests: make test-one T=tests/test_step.py::test_accumulation
	$(BIN)/python -m pytest $(T)

lint: $(READY)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)  ## what autofuse itself costs
	$(BIN)/python -m benchmarks.overhead

bench-train: $(READY)  ## a step by autofuse, by hand and by other libraries, on all models (long); ARGS="--models gpt2"
	mkdir -p bench-output
	$(BIN)/python -m benchmarks.train_step --memory --json bench-output/train.json --plot bench-output/train.png $(ARGS)

bench-gpu: $(READY)  ## everything that only a CUDA machine can tell (8 minutes)
	$(BIN)/python -m benchmarks.gpu --out bench-output/gpu $(ARGS)

clean:  ## remove what was made here, .venv too
	rm -rf $(VENV) build demo-output bench-output *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

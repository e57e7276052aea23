# Everything runs in .venv; `make setup` is implied by all targets that need it.
#   make demo                     train the example on 4 processes
#   make test ARGS='-k bucket'    ARGS goes to pytest, to the demo or to the benchmark
#   make PYTHON=python3.12 setup  another interpreter

SHELL := /bin/bash
PYTHON ?= python3
TORCH := torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
PACKAGES := hyper_parallel passes hp_compile

# One thread per rank: ranks share the cores, and sums do not depend on the number of cores.
export OMP_NUM_THREADS := 1
export PYTHONPATH := $(CURDIR)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow lint format mutants bench clean distclean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP)  ## create .venv with everything that the other targets need

# torch comes first and alone: whatever is installed after it finds its requirement satisfied, and is
# told the version again so that no resolver replaces it.
$(STAMP): pyproject.toml Makefile
	@command -v $(PYTHON) >/dev/null || { \
	  echo "make setup: no '$(PYTHON)'; install Python 3.10 or newer, or pass PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 10) else \
	  "make setup: Python 3.10 or newer is needed, %s is %d.%d; pass PYTHON=..." % (sys.executable, v[0], v[1]))'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "make setup: $(PYTHON) has no venv module; install it (Debian: python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet '$(TORCH)'
	$(PIP) install --quiet --editable '.[test,examples,bench,hf,dev]' '$(TORCH)'
	@touch $@

demo: $(STAMP)  ## capture, plan, prove, compile and train a model on 4 processes
	$(BIN)/python examples/train.py --mesh dp_replicate=2,dp_shard=2 --dim 128 --layers 2 --steps 40 \
	  --compare --output outputs/demo --overwrite $(ARGS)

# Tests are handed out one by one, so that all workers end together.
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest --numprocesses $(JOBS) --dist load --maxschedchunk 1
test: $(STAMP)  ## run the tests, about twelve minutes on two cores
	$(PYTEST) -m 'not slow' $(ARGS)

test-slow: $(STAMP)  ## run the long tests, which CI runs too: scripts from start to end, large matrices
	$(PYTEST) -m slow $(ARGS)

lint: $(STAMP)  ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(wildcard $(PACKAGES))

format: $(STAMP)  ## rewrite the sources in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

mutants: $(STAMP)  ## damage programs in many ways, and renew the table of what the verifier sees
	$(BIN)/python tools/mutation_score.py --write --jobs $(JOBS) $(ARGS)

bench: $(STAMP)  ## time a training step against PyTorch's own fully_shard
	$(BIN)/python benchmarks/step.py $(ARGS)

clean:  ## remove caches, build products and outputs; .venv stays
	rm -rf build dist outputs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## also remove .venv
	rm -rf $(VENV)

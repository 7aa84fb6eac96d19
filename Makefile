PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp
INTEGRATIONS_STAMP := $(VENV)/.integrations-stamp
PIP := $(BIN)/python -m pip --disable-pip-version-check

# One BLAS thread per pytest worker: two workers with a thread pool each only fight over two cores.
TEST_WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS)

# A GPU machine may bring its own torch and no network: the GPU target runs without `make setup` there,
# with pure-Python test tools carried along in vendor/.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)

# pyright would ask the registry for a newer version of itself on every run.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-slow test-pipeline test-integrations test-browser test-root lint format bench bench-parallel bench-pipeline bench-simulate bench-soak bench-guards gpu clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## Create .venv with everything pinned (does nothing when up to date)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "setup: no python3 found; install Python 3.11 or newer" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "setup: $(PYTHON) is older than Python 3.11; name another with PYTHON=..." >&2; exit 1; }
	@echo "setup 1/3: virtual environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -qq --constraint constraints.txt pip setuptools
	@echo "setup 2/3: torch (the largest download)"
	@$(PIP) install -qq --constraint constraints.txt torch
	@echo "setup 3/3: wholestep and its tools"
	@$(PIP) install -qq --constraint constraints.txt --no-build-isolation --editable '.[test,dev,plot]'
	@touch $@
	@echo "setup done"

# Beside `setup`: the frameworks bring as many packages as everything else together. torch is there already, and stays.
$(INTEGRATIONS_STAMP): $(STAMP)
	@echo "setup: transformers, accelerate, lightning, timm and peft"
	@$(PIP) install -qq --constraint constraints.txt --no-build-isolation --editable '.[integrations]'
	@touch $@

demo: setup ## Compile a training step, show what changed and check it against eager
	@$(BIN)/python -m wholestep.cli demo

test: setup ## Run the tests (not slow, gpu, root or browser)
	@$(PYTEST) $(ARGS)

test-slow: setup ## Run the slow tests
	@$(PYTEST) -m "slow and not gpu and not root and not integration" $(ARGS)

test-pipeline: setup ## Run all tests of pipelines, with every model, schedule and number of ranks
	@$(PYTEST) -m "not gpu and not root and not integration" tests/unit/pipe tests/unit/runtime/pipeline tests/property/test_schedules.py \
		tests/distributed/test_pipeline.py tests/distributed/test_pipeline_ranks.py $(ARGS)

test-integrations: $(INTEGRATIONS_STAMP) ## Run the tests with transformers, accelerate, lightning, timm and peft, which it installs
	@$(PYTEST) -m "integration and not gpu" tests/integrations $(ARGS)

test-browser: setup ## Look at reports in a headless browser (chromium)
	@$(BIN)/python -m pytest -m browser tests/unit/report $(ARGS)

lint: setup ## Check style, formatting and types
	@echo "lint 1/3: ruff check"
	@$(BIN)/ruff check --quiet .
	@echo "lint 2/3: ruff format"
	@$(BIN)/ruff format --check --quiet .
	@echo "lint 3/3: pyright"
	@$(BIN)/pyright

format: setup ## Rewrite the sources in house style
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

bench: setup ## Measure the overhead of a compiled step against eager
	@$(BIN)/python -m benchmarks.overhead $(ARGS)

bench-parallel: setup ## Measure data parallel steps against DDP over slow links (root on Linux)
	@$(BIN)/python -m benchmarks.data_parallel --only peers compiled ours $(ARGS)

bench-pipeline: setup ## Measure pipelines against torch's and against the ideal
	@$(BIN)/python -m benchmarks.pipeline $(ARGS)

bench-soak: setup ## Train 2,000 steps with everything on beside eager, and watch memory
	@$(BIN)/python -m benchmarks.soak $(ARGS)

bench-guards: setup ## Measure what the guards of a step cost at each call
	@$(BIN)/python -m benchmarks.guards $(ARGS)

bench-simulate: setup ## Hold the simulator against steps over slow links (root on Linux)
	@$(BIN)/python -m benchmarks.simulate $(ARGS)

test-root: setup ## Run the tests that need root (network namespaces)
	@$(PYTEST) -m "root and not gpu and not integration" $(ARGS)

gpu: ## Run the GPU tests, then the GPU benchmarks where there are some
	@PYTHONPATH=src:vendor $(GPU_PYTHON) -m pytest -m gpu tests/gpu $(ARGS)
	@if [ -e benchmarks/gpu.py ] || [ -e benchmarks/gpu ]; then PYTHONPATH=src:vendor $(GPU_PYTHON) -m benchmarks.gpu; fi

clean: ## Remove caches and build outputs (.venv stays)
	@rm -rf build dist outputs .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	@find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# Everything a developer or a CI job runs. Needs Python 3.11 (or newer), cargo, a C compiler, git and make.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

UV := $(shell command -v uv 2>/dev/null || echo $(CURDIR)/target/tools/bin/uv)
RUN := $(UV) run --frozen --no-sync
PYTEST_ARGS ?= -n auto --maxprocesses 4
NEWEST := $(CURDIR)/target/torch-newest
BENCH_RANKS ?= 2
BENCH_ARGS ?= bert 4 --sizes 4 128 64
export UV_PROJECT_ENVIRONMENT := $(CURDIR)/.venv
# An activated environment of another project must not be picked up by any tool below.
unexport VIRTUAL_ENV
# Tests start hundreds of processes: each would compile the sources of torch again (4.5 s, otherwise 2.5).
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test test-rust test-python contract covering test-torch-newest test-wheel wheel lint bench bench-planning ci clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: | $(UV) ## Make .venv with all dependencies and a release build of pyrannc
	# The library stands among the sources, so uv does not see when it has been deleted.
	$(UV) sync --frozen $(if $(wildcard python/pyrannc/_native*.so),,--reinstall-package pyrannc)

$(CURDIR)/target/tools/bin/uv:
	python3 -m venv target/tools
	target/tools/bin/pip install --quiet uv

demo: setup ## Train a BERT over four local processes and compare with one process
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(RUN) torchrun --standalone --nproc-per-node 4 examples/bert_pretraining.py

test: test-rust test-python ## Run all tests

test-rust: ## Run the tests of the Rust crates
	if cargo nextest --version >/dev/null 2>&1; then \
		cargo nextest run --locked --workspace --exclude rannc-py --no-tests=warn; \
	else \
		cargo test --locked --workspace --exclude rannc-py; \
	fi

test-python: setup ## Run the Python tests (PYTEST_ARGS="-k name" chooses)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(RUN) pytest $(PYTEST_ARGS)

contract: setup ## Run all habits under each of their settings (half an hour on two cores), not under one of them
	CONTRACT=covering OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(RUN) pytest $(PYTEST_ARGS) tests/contract

covering: setup ## Run 22 habits under all rows of the covering array of precisions, ZeRO, Stages and losses
	COVERING=all OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(RUN) pytest $(PYTEST_ARGS) tests/covering

test-torch-newest: setup ## Run chosen tests with the newest torch, torchvision and transformers of the registry
	trap 'rm -rf "$(NEWEST)"' EXIT; \
	$(UV) venv --quiet --clear --python $(UV_PROJECT_ENVIRONMENT)/bin/python $(NEWEST); \
	$(UV) pip install --quiet --link-mode hardlink --python $(NEWEST)/bin/python \
		torch torchvision transformers timm rich 'tomli; python_version < "3.11"' \
		numpy hypothesis pytest pytest-timeout pytest-xdist; \
	$(UV) pip list --python $(NEWEST)/bin/python | grep -E '^(torch|torchvision|transformers) '; \
	PYTHONPATH=$(CURDIR)/python OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} \
		$(NEWEST)/bin/python -m pytest -p no:cacheprovider $(PYTEST_ARGS) @tests/torch_newest.txt

wheel: setup ## Build dist/*.whl for any x86-64 Linux with glibc 2.17 or newer, and the source distribution
	# Zig links against the old glibc; a build with the compiler of this machine would need this machine's glibc.
	$(RUN) --with ziglang==0.17.1 maturin build --release --locked --zig --compatibility manylinux_2_17 --out dist
	$(RUN) maturin sdist --out dist

test-wheel: setup ## Install a wheel into an empty environment and use it (WHEEL=dist/NAME.whl takes that one)
	WHEEL="$(WHEEL)" $(RUN) pytest tests/test_wheel.py

lint: setup ## Check formatting, lints and types of Rust and Python
	cargo fmt --all --check
	PYO3_PYTHON=$(CURDIR)/.venv/bin/python cargo clippy --locked --workspace --all-targets -- -D warnings
	$(RUN) ruff format --check
	$(RUN) ruff check
	$(RUN) mypy
	$(RUN) stubtest pyrannc._native

bench: setup ## Time a step of RaNNC beside DDP and FSDP2 (BENCH_RANKS=8 BENCH_ARGS="bert 32 --sizes 24 1024 512")
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(RUN) torchrun --standalone --nproc-per-node $(BENCH_RANKS) \
		benches/step_time.py $(BENCH_ARGS)

bench-planning: setup ## Time the planning of large models, without a GPU (PLANNING_ARGS='--cases "bert-24 on 8 H200"')
	$(RUN) python benches/planning.py --graphs target/graphs $(PLANNING_ARGS)

ci: lint test ## What a CI job runs

clean: ## Remove everything that the targets above have made
	rm -rf .venv target dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find python -name '*.so' -delete
	find python tests benches examples -name __pycache__ -prune -exec rm -rf {} +

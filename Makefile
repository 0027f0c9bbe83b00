# Two commands do everything from a fresh clone:
#   make run            a real model answers (make run PROMPT="..." answers once, without: a chat)
#   make test           formatting, types, floors and tests
# Both create .venv and install what they need, pinned by constraints.txt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?= smollm2-135m
COMPILER := $(shell command -v g++ || command -v clang++ || command -v c++)
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: run test test-slow gpu-test bench bench-cpu bench-quality bench-gpu format clean

run: $(VENV)/.run
	@$(BIN)/kvant run $(MODEL) $(if $(PROMPT),--prompt "$(PROMPT)")

test: $(VENV)/.test
	$(BIN)/ruff format --check kvant tests benchmarks
	$(BIN)/ruff check kvant tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/kvant pull smollm2-135m
	$(BIN)/kvant pull gemma3-270m
	$(BIN)/python -m pytest -n 2 -m "not slow and not gpu"

test-slow: $(VENV)/.test
	$(BIN)/python -m pytest -m "slow"

gpu-test: $(VENV)/.test
	$(BIN)/python -m pytest -m "gpu"

bench: $(VENV)/.test
	$(BIN)/python benchmarks/first.py

# Kvant against llama.cpp on this machine's CPU; the first call builds the peer (12 minutes). docs/benchmarks.md says more.
bench-cpu: $(VENV)/.run
	$(BIN)/python -m benchmarks.peers.build_llama_cpp
	$(BIN)/python -m benchmarks.cpu $(or $(ARGS),--output benchmarks/cpu.json)

# The network on an NVIDIA GPU, against the limits of the card: 8 minutes, 16 GB of disk. docs/benchmarks.md says more.
bench-gpu: $(VENV)/.test
	$(BIN)/python -m benchmarks.h200 $(ARGS)

# What speed costs: perplexity, KL and top-1 agreement with fp32 of the same file, both models, llama.cpp beside.
bench-quality: $(VENV)/.test
	$(BIN)/python -m benchmarks.peers.build_llama_cpp
	$(BIN)/python -m benchmarks.quality $(or $(ARGS),--output benchmarks/quality.json)

format: $(VENV)/.test
	$(BIN)/ruff format kvant tests benchmarks
	$(BIN)/ruff check --fix kvant tests benchmarks

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

# What answering needs. torch (200 MB) is not part of it where a C++ compiler is, since then the native executor runs the model.
$(VENV)/.run: constraints.txt pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -c "import sys; sys.version_info >= (3, 11) or sys.exit('Kvant needs Python 3.11 or newer, this is ' + sys.version.split()[0] + '; choose another with: make PYTHON=python3.12 ...')"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing Kvant and what it needs into $(VENV) (once)"
	@$(INSTALL) $(if $(COMPILER),--editable .,torch --editable .)
	@touch $@

$(VENV)/.test: $(VENV)/.run
	@echo "Installing what the tests need"
	@$(INSTALL) torch
	@$(INSTALL) --editable ".[test]"
	@touch $@

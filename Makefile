# Two commands do everything from a fresh clone:
#   make run            a real model answers (make run PROMPT="..." answers once, without: a chat)
#   make test           formatting, types, floors and tests
# Both create .venv and install what they need, pinned by constraints.txt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?= smollm2-135m
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: run test test-slow gpu-test bench format clean

run: $(VENV)/.run
	@$(BIN)/kvant run $(MODEL) $(if $(PROMPT),--prompt "$(PROMPT)")

test: $(VENV)/.test
	$(BIN)/ruff format --check kvant tests benchmarks
	$(BIN)/ruff check kvant tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/kvant pull smollm2-135m
	$(BIN)/kvant pull gemma3-270m
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-slow: $(VENV)/.test
	$(BIN)/python -m pytest -m "slow"

gpu-test: $(VENV)/.test
	$(BIN)/python -m pytest -m "gpu"

bench: $(VENV)/.test
	$(BIN)/python benchmarks/first.py

format: $(VENV)/.test
	$(BIN)/ruff format kvant tests benchmarks
	$(BIN)/ruff check --fix kvant tests benchmarks

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

# torch comes first and pinned: asked for without a version, an index may answer with gigabytes of CUDA libraries.
$(VENV)/.run: constraints.txt pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -c "import sys; sys.exit('Kvant needs Python 3.11 or newer; this is ' + sys.version.split()[0] + ' (choose another with make PYTHON=...)' if sys.version_info < (3, 11) else 0)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing Kvant and what it needs into $(VENV) (about a minute, once)"
	@$(INSTALL) torch
	@$(INSTALL) --editable .
	@touch $@

$(VENV)/.test: $(VENV)/.run
	@echo "Installing what the tests need"
	@$(INSTALL) --editable ".[test]"
	@touch $@

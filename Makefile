# `make test` and `make demo` do all the set-up on a bare machine: Python 3.11 or newer with pip and
# venv, and gcc. Everything is installed into .venv once, and again when pyproject.toml changes.

# The interpreter that makes the virtual environment.
PYTHON ?= python3
# The PyTorch to install where .venv has none yet; several words are allowed, for instance
# `make test TORCH="torch --index-url <PyTorch's CPU index>"`. Any release from 2.11 on works.
TORCH ?= torch==2.13.0
VENV ?= .venv
# Oldest releases that are supported, for `make test-oldest`.
OLDEST ?= transformers==5.19.* gymnasium==1.2.* stable-baselines3==2.8.*
OLDEST_TESTS ?= tests/decoder tests/envs tests/agents
DEMO_FLAGS ?=
PYTEST_FLAGS ?=
BENCH_FLAGS ?=
BENCHMARKS ?= ragged_cost depth_zero versus_transformers decision_cost replay_speed cost_model_error causal_rules

BIN := $(VENV)/bin
INSTALL := -m pip --disable-pip-version-check install $(if $(CI),--quiet --quiet)
quoted = $(foreach word,$(1),'$(word)')
existing = $(wildcard $(1))

.DEFAULT_GOAL := help
.PHONY: help dev demo test test-oldest lint type format bench docs clean distclean

help: ## Say what there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

dev: $(VENV)/.ready ## Set up .venv with specdepth (editable) and the developers' tools

demo: $(VENV)/.ready ## Profile, train on replay, export and compare on the default model (10 minutes)
	$(BIN)/specdepth demo $(DEMO_FLAGS)

test: lint type ## Check style and types, then run all tests
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

lint: $(VENV)/.ready ## Check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(VENV)/.ready ## Check types
	$(BIN)/mypy -p specdepth
	$(BIN)/mypy $(call existing,tests benchmarks examples docs/hooks)

format: $(VENV)/.ready ## Format the code and repair what can be repaired
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.ready ## Measure every bar; each benchmark prints one JSON line last
	@set -e; for name in $(BENCHMARKS); do \
		echo "== $$name"; $(BIN)/python benchmarks/$$name.py $(BENCH_FLAGS); \
	done

docs: $(VENV)/.ready-docs ## Build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

test-oldest: $(VENV)-oldest/.ready ## Run the tests against the oldest supported libraries
	$(VENV)-oldest/bin/python -m pip --disable-pip-version-check install --quiet $(call quoted,$(OLDEST))
	$(VENV)-oldest/bin/python -m pytest $(PYTEST_FLAGS) $(call existing,$(OLDEST_TESTS))

clean: ## Remove what tools and builds left behind
	rm -rf build dist site specdepth.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean ## Remove the virtual environments too
	rm -rf $(VENV) $(VENV)-oldest

# One rule for both environments; the file marks one that was finished. An interrupted set-up goes on
# where it was, and a torch that is there already is left alone.
%/.ready: pyproject.toml
	@test -x '$*/bin/pip' || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "specdepth needs Python 3.11 or newer, which '$(PYTHON)' is not; name one, as in:" \
		"make $(or $(firstword $(MAKECMDGOALS)),dev) PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x '$*/bin/pip' || $(PYTHON) -m venv '$*' || { \
		echo "'$(PYTHON) -m venv' failed; Debian and Ubuntu keep it in the package python3-venv." >&2; \
		exit 1; }
	@echo "Installing specdepth and what it needs into $* (once)" >&2
	@'$*/bin/python' -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null || \
		'$*/bin/python' $(INSTALL) $(call quoted,$(TORCH))
	@'$*/bin/python' $(INSTALL) --editable '.[dev]'
	@touch $@

$(VENV)/.ready-docs: $(VENV)/.ready
	@$(BIN)/python $(INSTALL) --editable '.[docs]'
	@touch $@

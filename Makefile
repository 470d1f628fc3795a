PYTHON ?= python3
BIN := .venv/bin
# two stamps: ppctl with the packages that training needs; the extra `dev` (tests, lint, docs) on top of it
INSTALLED := .venv/installed
DEV := .venv/installed-dev
# tests of a file stay in one process: they share its fixtures and compiled programs; tests/conftest.py
# puts the longest files first
WORKERS := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: help setup train test test-full check lint smoke docs exhaustive chaos fuzz soak golden tutorial bench bench-gpu bench-groups bench-plan bench-published bench-scale bench-start bench-vocabulary clean

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /|/' | awk -F'|' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(DEV) ## create .venv and install ppctl with the tools of tests, lint and docs into it

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ppctl needs Python >= 3.11, this is " + sys.version.split()[0] + ". Use: make PYTHON=python3.12 setup")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(DEV): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

train: $(INSTALLED) ## train a small transformer on 8 simulated devices (2 x 4, interleaved); run it again to resume
	$(BIN)/ppctl train recipes=stdlib_2x4

test: $(DEV) ## the tests: a covering selection of cases; the ten slowest are shown
	$(BIN)/python -m pytest $(WORKERS) --durations=10

test-full: $(DEV) ## every test with every case, before a release
	$(BIN)/python -m pytest $(WORKERS) --durations=10 -m ''

check: lint ## format, lint, types and the fast tests
	$(BIN)/python -m pytest $(WORKERS) -m 'not slow and not full'

lint: $(DEV) ## format, lint and types, without changing a file
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

smoke: $(INSTALLED) ## a short run of each kind of schedule on simulated devices
	rm -rf runs/smoke
	$(BIN)/ppctl train --multirun recipes=tiny run.name=smoke schedule=gpipe,1f1b,eager_1f1b,interleaved,zb_h1,zb_v

docs: $(DEV) ## the pages of docs/ as a site in dist/docs; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --config-file docs/site/mkdocs.yml

exhaustive: $(DEV) ## gradients of every schedule x mesh x chunks x remat x layers, not only of a covering selection
	$(BIN)/python tests/benchmarks/exhaustive.py

chaos: $(DEV) ## 200 times kill -9 of a random process of a run or a sweep, at random moments; half an hour
	PYTHONPATH=tests $(BIN)/python -m support.chaos

soak: $(DEV) ## 20,000 steps with evaluations, checkpoints and TensorBoard: memory, open files, records; 10 minutes or more
	$(BIN)/python tests/benchmarks/long_run.py

fuzz: $(DEV) ## 30 random requests through plan, verify and five train steps, compared with the reference
	$(BIN)/python tests/fuzz.py 30 0

golden: $(DEV) ## rewrite the golden schedules and show what changed; then the tiny models of transformers (extra oracle)
	$(BIN)/python tests/support/golden.py
	$(BIN)/python tests/support/oracle.py

tutorial: $(DEV) ## run the code of docs/tutorial.md, and write its outputs and docs/tutorial.ipynb
	$(BIN)/python tests/support/tutorial.py

bench: $(INSTALLED) ## CPU seconds of a pipelined step compared with the un-pipelined one, compile time, memory
	$(BIN)/ppctl bench recipes=bench

bench-gpu: $(DEV) ## on one accelerator: steps, predictions, ranks, traces, kernels next to their bars; 40 minutes
	$(BIN)/python tests/benchmarks/accelerator.py

bench-groups: $(DEV) ## gains of ranks of unequal sizes on published models: the table of docs/planning.md; 30 minutes
	$(BIN)/python tests/benchmarks/unequal_groups.py

bench-plan: $(DEV) ## rehearsed and measured steps of 26 layouts: errors, ranking, regret; about 20 minutes
	$(BIN)/python tests/benchmarks/bench_plan.py

bench-start: $(DEV) ## CPU seconds from a command to its result: imports, help, plan, the first step, verify; 10 minutes
	$(BIN)/python tests/benchmarks/start_up.py

bench-vocabulary: $(DEV) ## a large head whole, balanced, and divided over the ranks: makespan, CPU seconds, memory of each rank
	$(BIN)/python tests/benchmarks/vocabulary_bench.py

bench-published: $(DEV) ## predicted next to published steps: docs/published.md and its picture
	$(BIN)/python tests/benchmarks/published

bench-scale: $(DEV) ## plan for 8 to 16,384 devices, compile for 32 to 512 (extras cuda12, tpu); about 10 minutes
	$(BIN)/python tests/benchmarks/scaling

clean: ## remove .venv and what runs left
	rm -rf .venv runs dist/docs

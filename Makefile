# make quickstart    install asyncrl[train], then train a small model from random weights (RUN: options of asyncrl run)
# make test          install asyncrl[test], then run the tests that need no real runs and no extras (minutes on 2 cores)
# make test-slow     the rest: real runs, killed and resumed, extras, and a real vLLM if there is one (about 12 minutes)
# make test-all      all tests but the long ones at once (about 20 minutes)
# make test-long     those: lost hosts, a step beside TRL's, starts that fail (about 15 minutes)
# make check         install asyncrl[dev], then lint, types and the plan of the house
# make setup         install asyncrl[dev]; no work when nothing changed, as in all other commands
# make setup-vllm    install vLLM's CPU build into .venv-vllm, for rollout.engine=vllm without a GPU (about 2 minutes)
# make setup-frameworks  install agent frameworks into .venv-frameworks, for the tests that run them unmodified (about a minute)
# make bench         every benchmark, a short table each
# make gpu           on a machine with a CUDA device: what it computes against a CPU, and how fast; results in benchmarks/results
# make fuzz          kill real runs some 300 times, resume them, and check what they did (an hour)
# make faults        the tests that kill hosts of a network, ROUNDS times (20; some minutes each); needs root
# make docs          write docs/configuration.md anew from the settings
# make site          install, then build the site of docs/ into build/site; a warning ends it
.PHONY: site setup setup-vllm setup-frameworks quickstart test test-slow test-vllm test-runs test-others test-all test-long check bench gpu fuzz faults docs

BIN := .venv/bin
# The tests of `make test`; test-slow runs all others.
QUICK := not slow and not vllm and not gpu and not extras and not long
# A file's tests share what they start, and wait more than they compute; conftest.py has the order of the files.
BY_FILE := $(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder --durations=10
# Only files with such tests are imported to collect them.
OF_RUNS := $(shell grep -lE 'mark\.(slow|extras|gpu)' tests/test_*.py)
OF_VLLM := $(shell grep -lE 'mark\.vllm|contract_servers' tests/test_*.py)

setup:
	@bash scripts/setup.sh

setup-vllm:
	@bash scripts/setup_vllm.sh

setup-frameworks:
	@bash scripts/setup_frameworks.sh

quickstart:
	@bash scripts/setup.sh train
	$(BIN)/asyncrl run configs/quickstart.yaml $(RUN)

test:
	@bash scripts/setup.sh test
	$(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist loadgroup -m "$(QUICK)"

# The two parts at once: each waits more than it works.
test-slow: setup
	$(MAKE) -j2 test-runs test-vllm

test-runs:
	$(BY_FILE) -m "not ($(QUICK)) and not vllm and not long" $(OF_RUNS)

test-vllm:
	$(BIN)/python -m pytest -q -m "vllm and not long" --durations=10 $(OF_VLLM)

# vLLM's beside all others: its tests wait for one server after the other.
test-all: setup
	$(MAKE) -j2 test-others test-vllm

# In one go: what a worker imports to collect tests, and the process that real runs are forked from, are there once.
test-others:
	$(BY_FILE) -m "not vllm and not long"

test-long: setup
	$(BY_FILE) -m long

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/reference_pages.py --check
	$(BIN)/python scripts/budget.py

bench: setup
	for name in engine publish buffer async_vs_sync interrupt trainer in_flight run_efficiency checkpoint gateway colocation startup; do $(BIN)/python benchmarks/$$name.py || exit 1; done

# One part after the other, each less than 9 minutes; what needs a device that is not here is not run.
gpu: setup
	failed=0; for part in 1 2 3 4 5; do $(BIN)/python scripts/gpu_acceptance.py --part $$part || failed=1; done; exit $$failed

fuzz: setup
	$(BIN)/python scripts/fuzz.py

ROUNDS := 20
FAULTS := tests/test_several_hosts.py tests/test_job_vllm.py

# It ends at the first failure, whose output has its seed: repeat it with ASYNCRL_TEST_SEED=.
faults: setup
	for round in $$(seq $(ROUNDS)); do echo "round $$round"; \
	    $(BIN)/python -m pytest -q -x -p no:cacheprovider -m "slow and (long or not vllm)" $(FAULTS) || exit 1; done

docs: setup
	$(BIN)/python scripts/reference_pages.py

site: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# make quickstart    install asyncrl[train], then train a small model from random weights (RUN: options of asyncrl run)
# make test          install asyncrl[test], then run the tests that need no real runs and no extras (minutes on 2 cores)
# make test-core     the tests of `make test` without extensions, as if their folders were deleted (FILES: only these)
# make test-slow     the rest: real runs, killed and resumed, extras, and a real vLLM if there is one (about 12 minutes)
# make test-all      all tests except the long ones (about 20 minutes)
# make test-long     the long ones: lost hosts, a step compared with TRL's, starts that fail (about 15 minutes)
# make check         install asyncrl[dev], then lint, types, import contracts and budgets
# make setup         install asyncrl[dev]; like all commands it does nothing if nothing has changed
# make setup-vllm    install vLLM's CPU build into .venv-vllm, for rollout.engine=vllm without a GPU (about 2 minutes)
# make setup-frameworks  install agent frameworks into .venv-frameworks, for the tests that run them unmodified (about a minute)
# make test-harbor   install Harbor into .venv-harbor (HARBOR_PYTHON: Python 3.12 or newer), and run its tests (about 10 minutes)
# make wheel        build the wheel of the last commit into dist; TAG=v0.2.0 refuses another version
# make test-wheel   install the wheel from a local index into a clean environment, and train with it (minutes)
# make bench         every benchmark, a short table each
# make gpu           compare a CUDA device with the CPU and measure its speed; results in benchmarks/results
# make fuzz          kill real runs about 300 times, resume them, and check the results (an hour)
# make faults        the tests that kill hosts of a network, ROUNDS times (20; some minutes each); needs root
# make docs          regenerate docs/configuration.md and docs/metrics.md
# make site          build the site of docs/ into build/site; a warning fails it
.PHONY: site setup setup-vllm setup-frameworks quickstart test test-core test-slow test-vllm test-runs test-others test-all test-long test-harbor wheel test-wheel check bench gpu fuzz faults docs

BIN := .venv/bin
# Some images set it. Without bytecode, each of hundreds of processes compiles asyncrl again.
unexport PYTHONDONTWRITEBYTECODE
# The tests of `make test`; test-slow runs all others.
QUICK := not slow and not vllm and not gpu and not extras and not long
# The tests of a file share processes, and wait more than they compute; conftest.py has the order of the files.
BY_FILE := $(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder --durations=10
BY_GROUP := $(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist loadgroup --no-loadscope-reorder --durations=10
# Collecting imports only the files that have such tests.
OF_QUICK := $(shell grep -LE '^pytestmark = \[?pytest\.mark\.(slow|vllm|gpu|extras|long)|^    pytest\.mark\.(slow|vllm|gpu|extras|long),' tests/test_*.py)
OF_RUNS := $(shell grep -lE 'mark\.(slow|extras|gpu)|costly_cases' tests/test_*.py)
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
	$(BY_GROUP) -m "$(QUICK)" $(OF_QUICK)

# Without extensions: tests that need an extension are skipped.
test-core:
	ASYNCRL_EXTENSIONS=core $(BY_GROUP) -m "$(QUICK)" $(or $(FILES),$(OF_QUICK))

# Both parts run in parallel: each waits more than it computes.
test-slow: setup
	$(MAKE) -j2 test-runs test-vllm

test-runs:
	$(BY_FILE) -m "not ($(QUICK)) and not vllm and not long" $(OF_RUNS)

test-vllm:
	$(BIN)/python -m pytest -q -m "vllm and not long" --durations=10 $(OF_VLLM)

# The tests of vLLM run in parallel with all others: they wait for one server after the other.
test-all: setup
	$(MAKE) -j2 test-others test-vllm

# In one pytest: workers import the tests once, and real runs are forked from one process.
test-others:
	$(BY_FILE) -m "not vllm and not long"

test-long: setup
	$(BY_FILE) -m long

HARBOR_PYTHON := python3.12

test-harbor: setup
	PYTHON=$(HARBOR_PYTHON) bash scripts/setup_harbor.sh
	$(BIN)/python -m pytest -q --durations=10 tests/test_harbor_trial.py

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/reference_pages.py --check
	$(BIN)/python scripts/budget.py

wheel:
	@bash scripts/wheel.sh

test-wheel: setup
	$(BIN)/python -m pytest -q --durations=10 tests/test_packaging.py

bench: setup
	for name in engine adapters publish buffer async_vs_sync interrupt trainer in_flight run_efficiency streaming_step checkpoint gateway colocation startup reward_model; do $(BIN)/python benchmarks/$$name.py || exit 1; done

# Parts of less than 9 minutes each; tests of devices that this machine lacks are skipped.
gpu: setup
	failed=0; for part in 1 2 3 4 5; do $(BIN)/python scripts/gpu_acceptance.py --part $$part || failed=1; done; exit $$failed

fuzz: setup
	$(BIN)/python scripts/fuzz.py

ROUNDS := 20
FAULTS := tests/test_several_hosts.py tests/test_job_vllm.py

# Ends at the first failure, whose output has its seed: repeat it with ASYNCRL_TEST_SEED=.
faults: setup
	for round in $$(seq $(ROUNDS)); do echo "round $$round"; \
	    $(BIN)/python -m pytest -q -x -p no:cacheprovider -m "slow and (long or not vllm)" $(FAULTS) || exit 1; done

docs: setup
	$(BIN)/python scripts/reference_pages.py

site: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

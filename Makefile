# make quickstart    install, then train a small model from random weights (about 3 minutes on 2 cores)
# make test          install, then run all tests
# make check         install, then lint, types and the plan of the house
# make setup         the install step of all of them; seconds when nothing changed
# make setup-vllm    install vLLM's CPU build into .venv-vllm, for rollout.engine=vllm without a GPU (about 2 minutes)
# make bench         every benchmark, a short table each
# make fuzz          kill real runs some 300 times, resume them, and check what they did (an hour)
# make docs          write docs/configuration.md anew from the settings
.PHONY: setup setup-vllm quickstart test check bench fuzz docs

BIN := .venv/bin

setup:
	@bash scripts/setup.sh

setup-vllm:
	@bash scripts/setup_vllm.sh

quickstart: setup
	$(BIN)/asyncrl run configs/quickstart.yaml

test: setup
	$(BIN)/python -m pytest -q

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/config_reference.py --check

bench: setup
	for name in engine publish buffer async_vs_sync trainer journal checkpoint long_run gateway offload colocation break_even startup; do $(BIN)/python benchmarks/$$name.py || exit 1; done

fuzz: setup
	$(BIN)/python scripts/fuzz.py

docs: setup
	$(BIN)/python scripts/config_reference.py

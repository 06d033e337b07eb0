# make quickstart    install, then train a small model from random weights (about 3 minutes on 2 cores)
# make test          install, then run all tests
# make check         install, then lint, types and the plan of the house
# make setup         the install step of all of them; seconds when nothing changed
# make bench         every benchmark, a short table each
# make docs          write docs/configuration.md anew from the settings
.PHONY: setup quickstart test check bench docs

BIN := .venv/bin

setup:
	@bash scripts/setup.sh

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
	for name in engine publish buffer async_vs_sync; do $(BIN)/python benchmarks/$$name.py || exit 1; done

docs: setup
	$(BIN)/python scripts/config_reference.py

"""scripts/pairs.py: its rows, its oracle, and some of its rows."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from pathlib import Path

import pairs
import pairs_oracle
import pytest
from pairs import FACTORS, config_of, refusal

# Of torch, which loads a checkpoint in one process, and of peft.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:torch.distributed is disabled", "ignore::FutureWarning"
    ),
]


@pytest.fixture(scope="module")
def rows() -> list[pairs.Row]:
    return pairs.rows()


def test_each_pair_of_values_is_in_a_row_or_refused(rows: list[pairs.Row]) -> None:
    for one, other in itertools.combinations(FACTORS, 2):
        for left, right in itertools.product(FACTORS[one], FACTORS[other]):
            is_in = any((row[one], row[other]) == (left, right) for row in rows)
            is_refused = bool(refusal(frozenset({(one, left), (other, right)})))
            assert is_in != is_refused, (one, left, other, right)


def test_no_value_overwrites_what_another_one_sets() -> None:
    for pair in pairs.all_pairs():
        one, other = map(dict, (pair, reversed([*pair])))
        assert refusal(pair) or config_of(one) == config_of(other), pair


SPOILED = {
    "trained.jsonl": ('"version": 3', '"version": 2'),
    "config.yaml": ("temperature: 1.0", "temperature: 0.9"),
    "summary.json": ('"headline": "', '"headline": "Learned: '),
    "logs/controller.log": ("INFO", "WARNING"),
}


@pytest.mark.parametrize("name", ["nothing", *SPOILED])
def test_the_oracle_sees_a_spoiled_file(name: str, whole: Path, tmp_path: Path) -> None:
    run_dir = shutil.copytree(whole, tmp_path / "run")
    if name in SPOILED:
        path = run_dir / name
        path.write_text(path.read_text().replace(*SPOILED[name]))
    run = pairs_oracle.read_run(run_dir)
    faults = list[str]()
    for check in pairs_oracle.CHECKS:
        try:
            check(run)
        except AssertionError as fault:
            faults.append(str(fault))
    assert bool(faults) == (name in SPOILED), faults


@pytest.mark.timeout(1800)  # four runs of half a minute to two, beside other tests
def test_rows_that_the_commit_draws_pass(tmp_path: Path) -> None:
    asked = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(asked, cwd=pairs.ROOT, capture_output=True, text=True)
    out = tmp_path / "pairs.jsonl"
    all_pass = pairs.run_rows(pairs.chosen_rows(f"drawn:{commit.stdout}"), out)
    lines = map(json.loads, out.read_text().splitlines())
    assert all_pass, [line for line in lines if line["fault"]]

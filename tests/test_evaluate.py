"""`asyncrl eval` of a run's weights, against the evaluations that the run itself logged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from job_runs import environment, read_lines, write_config

from asyncrl.base.errors import ConfigError
from asyncrl.job.evaluate import evaluate

SAMPLED = (
    "reward_mean",
    "standard_error",
    "length_mean",
    "truncated_fraction",
    "failed",
)


def asyncrl(folder: Path, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl.cli", *map(str, arguments)],
        cwd=folder,
        env=environment(COLUMNS="160"),
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_eval_of_a_step_equals_the_evaluation_of_the_run(tmp_path: Path) -> None:
    task = {"python": "asyncrl.tasks.toy:Letters", "size": 50}
    config = write_config(
        tmp_path,
        trainer={"num_steps": 6},
        checkpoint={"every": 3, "keep_last": 9},
        eval={"task": task, "every": 3, "num_prompts": 12, "samples": 2}
        | {"temperature": 1.0, "engine": "own"},
    )
    said = asyncrl(tmp_path, "run", config, "--run-dir", "run")
    start = said.partition("ready after")[0]
    assert [line.split(": ")[0][:5] for line in start.splitlines()[1:]] == ["after"] * 3
    logged = {
        line["policy_version"]: line for line in read_lines(tmp_path / "run/eval.jsonl")
    }
    assert logged[3] != logged[6]
    for step, more in ((3, ["--step", "3"]), (6, [])):
        found = json.loads(asyncrl(tmp_path, "eval", "run", *more, "--json"))
        (scores,) = found["evaluations"]
        assert (scores["policy_version"], scores["num_prompts"]) == (step, 12)
        for name in SAMPLED:
            assert scores[name] == logged[step][f"eval/{name}"], (step, name)
        mean, error = scores["reward_mean"], scores["standard_error"]
        assert scores["interval_95"] == pytest.approx(
            [mean - 1.96 * error, mean + 1.96 * error]
        )
    assert "interval 95" in asyncrl(tmp_path, "eval", config, "eval.num_prompts=4")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_eval_refuses_what_it_cannot_score(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    with pytest.raises(ConfigError, match="has no section eval"):
        evaluate(config)
    with pytest.raises(ConfigError, match="is a config"):
        evaluate(config, step="3")
    with pytest.raises(ConfigError, match="is not a run directory"):
        evaluate(tmp_path)

"""task.split={eval: ...}: the sides of one file, against sets of prompts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from job_runs import CONFIG

from asyncrl.base.errors import ConfigError
from asyncrl.config import RunConfig, load_config, run_config_yaml
from asyncrl.job.check import validate
from asyncrl.tasks.sources import build_task

ROWS = [{"prompt": f"What is {n}?", "answer": str(n)} for n in range(300)]


def write(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def config_of(
    files: str, evaluation: object, split: object = {"eval": 0.1}
) -> dict[str, Any]:
    characters = "".join(map(chr, range(32, 127)))
    scratch = CONFIG["model"]["scratch"] | {"characters": characters}
    task = {"files": [files], "reward": "math", "split": split}
    return CONFIG | {"model": {"scratch": scratch}, "task": task, "eval": evaluation}


def sides(folder: Path, rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return the training prompts and the held-out prompts of a run on these rows."""
    config = RunConfig.model_validate(
        config_of(write(folder, rows), {"num_prompts": 1})
    )
    assert not isinstance(config.task, list)
    tasks = [build_task(config.task, 0)]
    tasks.append(build_task(config.evals[""].task, 1, is_evaluated=True))
    return [
        [str(task.prompt(index).content) for index in range(len(task))]  # type: ignore[union-attr]
        for task in tasks
    ]


def test_the_split_follows_from_prompts_alone(tmp_path: Path) -> None:
    trained, evaluated = sides(tmp_path, ROWS)
    assert sorted(trained + evaluated) == sorted(row["prompt"] for row in ROWS)
    assert not {*trained} & {*evaluated}
    assert 10 <= len(evaluated) <= 60, "0.1 of 300, at six standard deviations"
    # Other order, other answers, other columns, and every row twice.
    other = [row | {"answer": "7", "level": 3} for row in ROWS] + ROWS
    random.Random(3).shuffle(other)
    again = sides(tmp_path, other)
    assert [{*side} for side in again] == [{*trained}, {*evaluated}]
    assert len(again[1]) == 2 * len(evaluated)
    # A chat of one message is the same prompt as its text.
    chats = [
        row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS
    ]
    assert len(sides(tmp_path, chats)[1]) == len(evaluated)


def test_a_run_checks_both_sides_and_reads_its_own_config(tmp_path: Path) -> None:
    given = tmp_path / "given.yaml"
    given.write_text(
        yaml.safe_dump(config_of(write(tmp_path, ROWS), {"num_prompts": 5}))
    )
    config = load_config(given)
    found = validate(config)
    (task,), ((held_out, prompts),) = found.tasks.values(), found.evals.values()
    assert len(task) + len(held_out) == 300
    assert len(prompts) == 5
    written = tmp_path / "config.yaml"
    written.write_text(run_config_yaml(config))
    assert load_config(written) == config
    # An override after the section was filled changes the evaluation only.
    assert load_config(given, ["eval.every=7"]).evals[""].every == 7


def test_several_tasks_hold_out_their_rows(tmp_path: Path) -> None:
    config = config_of(write(tmp_path, ROWS), {"num_prompts": 3})
    tasks = [config["task"] | {"name": name} for name in ("a", "b")]
    tasks[1] = tasks[1] | {"files": [write(tmp_path, ROWS, "other.jsonl")]}
    found = RunConfig.model_validate(config | {"task": tasks}).evals
    assert [one.task.files for one in found.values()] == [one["files"] for one in tasks]
    assert [*found] == ["a", "b"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"evaluation": {"task": {"files": ["x.jsonl"], "reward": "math"}}},
            "names others",
        ),
        ({"split": {"eval": 0.0}, "evaluation": {}}, "greater than 0"),
        ({"split": {"eval": 1.0}, "evaluation": {}}, "less than 1"),
        ({"split": {"eval": 0.5, "test": 0.1}, "evaluation": {}}, "test"),
        ({"split": "train", "evaluation": {}}, "eval.task"),
    ],
)
def test_contradicting_splits_are_refused(
    tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    path = tmp_path / "given.yaml"
    path.write_text(yaml.safe_dump(config_of(write(tmp_path, ROWS), **config)))
    with pytest.raises(ConfigError, match=words):
        load_config(path)


@pytest.mark.parametrize(("rows", "fraction"), [(ROWS[:1] * 50, 0.5), (ROWS[:3], 1e-6)])
def test_an_empty_side_is_refused(
    tmp_path: Path, rows: list[dict[str, Any]], fraction: float
) -> None:
    config = config_of(write(tmp_path, rows), {}, {"eval": fraction})
    with pytest.raises(ConfigError, match="leaves one side of .* rows empty"):
        validate(RunConfig.model_validate(config))

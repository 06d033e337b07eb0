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
from asyncrl.config import load_config, run_config_yaml
from asyncrl.job.check.config_check import validate

ROWS = [{"prompt": f"What is {n}?", "answer": str(n)} for n in range(300)]
TENTH = {"eval": 0.1}


def config_of(
    folder: Path, rows: list[dict[str, Any]], evaluation: object, split: object = TENTH
) -> Path:
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    characters = "".join(map(chr, range(32, 127)))
    scratch = CONFIG["model"]["scratch"] | {"characters": characters}
    task = {"files": [str(folder / "rows.jsonl")], "reward": "math", "split": split}
    path = folder / "given.yaml"
    sections = {"model": {"scratch": scratch}, "task": task, "eval": evaluation}
    path.write_text(yaml.safe_dump(CONFIG | sections))
    return path


def sides(folder: Path, rows: list[dict[str, Any]]) -> list[list[Any]]:
    """Return the training prompts and the held-out prompts of a run on these rows."""
    config = load_config(config_of(folder, rows, {"num_prompts": 1}))
    found = validate(config)
    tasks: list[Any] = [found.tasks[""], found.evals[""][0]]
    return [[task.prompt(at).content for at in range(len(task))] for task in tasks]


def test_the_split_follows_from_prompts_alone(tmp_path: Path) -> None:
    trained, evaluated = sides(tmp_path, ROWS)
    assert {*trained} | {*evaluated} == {row["prompt"] for row in ROWS}
    assert len(trained) + len(evaluated) == 300
    assert 10 <= len(evaluated) <= 60, "0.1 of 300, at six standard deviations"
    # Another order, other answers and columns, and every row twice.
    other = [row | {"answer": "7", "level": 3} for row in ROWS] + ROWS
    random.Random(3).shuffle(other)
    again = sides(tmp_path, other)
    assert [{*side} for side in again] == [{*trained}, {*evaluated}]
    assert len(again[1]) == 2 * len(evaluated)
    # A chat of one message is the same prompt as its text.
    chats = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    held_out = sides(tmp_path, [chat | {"answer": "7"} for chat in chats])[1]
    assert [chat[0]["content"] for chat in held_out] == evaluated


def test_a_resume_reads_the_same_split_from_its_config(tmp_path: Path) -> None:
    config = load_config(config_of(tmp_path, ROWS, {"num_prompts": 5}))
    (tmp_path / "config.yaml").write_text(run_config_yaml(config))
    assert load_config(tmp_path / "config.yaml") == config


def test_several_tasks_hold_out_their_rows(tmp_path: Path) -> None:
    values = yaml.safe_load(config_of(tmp_path, ROWS, {}).read_text())
    values["task"] = [values["task"] | {"name": name} for name in ("a", "b")]
    path = tmp_path / "two.yaml"
    path.write_text(yaml.safe_dump(values))
    evals = load_config(path).evals
    assert {name: one.task.files for name, one in evals.items()} == {
        task["name"]: task["files"] for task in values["task"]
    }


@pytest.mark.parametrize(
    ("split", "evaluation", "words"),
    [
        (TENTH, {"task": {"files": ["x.jsonl"], "reward": "math"}}, "names other rows"),
        ("train", {"task": {"files": ["x.jsonl"], "split": TENTH}}, "names other rows"),
        (TENTH, None, "is absent"),
        ({"eval": 0.0}, {}, "greater than 0"),
        ({"eval": 1.0}, {}, "less than 1"),
        ("train", {}, "eval.task"),
        ({"eval": 1e-6}, {}, "leaves one side of 300 rows empty"),
        ({"eval": 1 - 1e-6}, {}, "leaves one side of 300 rows empty"),
    ],
)
def test_a_split_without_two_sides_is_refused(
    tmp_path: Path, split: object, evaluation: object, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        validate(load_config(config_of(tmp_path, ROWS, evaluation, split)))

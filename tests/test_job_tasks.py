"""A real run of two tasks and two evaluations, killed and resumed."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import yaml
from crash_fuzz import differences, killed_on_the_way
from job_runs import read_lines, run, start, write_config
from resume_checker import read_evidence

from asyncrl.messages.records import task_of
from asyncrl.observe.show import render_status

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NUM_STEPS = 10
LETTERS = {"python": "asyncrl.tasks.toy:Letters"}
WORDS = [{"prompt": f"{letter} 2", "answer": letter} for letter in "abcdef"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an undisturbed run, with its config and data in the parent."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "words.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in WORDS))
    words = {"files": [str(data)], "reward": "rewards_for_test:begins_with"}
    letters = {"name": "letters", **LETTERS, "size": 5, "sampling": "by_difficulty"}
    held_out = {"task": {**LETTERS, "size": 9}, "num_prompts": 4, "slots": 4}
    config = write_config(
        folder,
        trainer={"num_steps": NUM_STEPS},
        buffer={"filter": "equal_rewards"},
        checkpoint={"every": 4, "keep_best": "seldom"},
    )
    values = yaml.safe_load(config.read_text())
    values["task"] = [letters | {"share": 0.6}, words | {"share": 0.4}]
    values["eval"] = [{"name": "often", "every": 3, **held_out}, {"name": "seldom", "every": 8, **held_out}]
    config.write_text(json.dumps(values))
    answer = run(config, folder / "run")
    assert answer.returncode == 0, (answer.stdout, answer.stderr)
    (folder / "said.txt").write_text(answer.stdout)
    return folder / "run"


def groups_of(run_dir: Path) -> list[tuple[Any, ...]]:
    return [(one.group_id, one.prompt_id, one.state, one.version) for one in read_evidence(run_dir).groups]


def test_tasks_have_their_share_metrics_and_evaluations(whole: Path) -> None:
    drawn = [task_of(prompt_id) for _, prompt_id, _, _ in groups_of(whole)]
    for end in range(1, len(drawn) + 1):
        assert abs(drawn[:end].count("letters") - 0.6 * end) < 1
    last = read_lines(whole / "metrics.jsonl")[-1]
    states = [(task_of(prompt_id), state) for _, prompt_id, state, _ in groups_of(whole)]
    filtered = states.count(("words", "filtered"))
    assert last["rollout/filtered/words"] == filtered > 0
    assert last["rollout/filtered"] == filtered + states.count(("letters", "filtered"))
    assert 0 < last["reward/mean/letters"] < 1
    found = [(line["policy_version"], line["name"]) for line in read_lines(whole / "eval.jsonl")]
    assert set(found) <= {(version, "often") for version in (0, 3, 6, 9, 10)} | {
        (version, "seldom") for version in (0, 8, 10)
    }
    assert {(0, "often"), (0, "seldom"), (10, "often"), (10, "seldom")} <= set(found)
    assert any("eval/seldom/reward_mean" in line for line in read_lines(whole / "metrics.jsonl"))
    said = (whole.parent / "said.txt").read_text()
    assert " (letters 0." in said
    assert "eval seldom v10 reward 0." in said
    assert "by task" in render_status(whole)
    epochs = {prompt_id.split("/")[1] for _, prompt_id, _, _ in groups_of(whole) if "letters" in prompt_id}
    with sqlite3.connect(whole / "journal.sqlite") as database:
        (told,) = database.execute("SELECT count(*) FROM meta WHERE key GLOB 'epoch/*/letters'").fetchone()
    assert told == len(epochs) > 2, "each epoch is in the journal"


def test_resumed_run_computes_the_same(whole: Path, tmp_path: Path) -> None:
    config, run_dir = whole.parent / "config-for-test.yaml", tmp_path / "run"
    killed_on_the_way(
        lambda: start(config, run_dir), lambda: len(read_lines(run_dir / "metrics.jsonl")) >= 6, run_dir
    )
    answer = run(config, run_dir)
    assert answer.returncode == 0, (answer.stdout, answer.stderr)
    assert groups_of(run_dir) == groups_of(whole), "once each, and the same"
    assert differences(whole, run_dir) == []

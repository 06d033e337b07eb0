"""A real run of two tasks and two evaluations."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
import yaml
from job_runs import read_lines, run, write_config
from resume_checker import read_evidence

from asyncrl.messages.records import task_of
from asyncrl.observe.show import render_status

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NUM_STEPS = 10
LETTERS = {"python": "asyncrl.tasks.toy:Letters"}
WORDS = [{"prompt": f"{letter} 2", "answer": letter} for letter in "abcdef"]


def test_tasks_have_their_share_metrics_and_evaluations(tmp_path: Path) -> None:
    data = tmp_path / "words.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in WORDS))
    words = {
        "files": [str(data)],
        "reward": "rewards_for_test:begins_with",
        "share": 0.4,
    }
    letters = {
        "name": "letters",
        **LETTERS,
        "size": 5,
        "sampling": "by_difficulty",
        "share": 0.6,
    }
    held_out = {"task": {**LETTERS, "size": 9}, "num_prompts": 4, "slots": 4}
    config = write_config(
        tmp_path,
        trainer={"num_steps": NUM_STEPS},
        buffer={"filter": "equal_rewards"},
        checkpoint={"every": 4, "keep_best": True},
    )
    values = yaml.safe_load(config.read_text())
    values["task"] = [letters, words]
    values["eval"] = [
        {"name": "seldom", "every": 8, **held_out},
        {"name": "often", "every": 3, **held_out},
    ]
    config.write_text(json.dumps(values))
    whole = tmp_path / "run"
    answer = run(config, whole)
    assert answer.returncode == 0, (answer.stdout, answer.stderr)
    groups = [
        (task_of(one.prompt_id), one.prompt_id, one.state)
        for one in read_evidence(whole).groups
    ]
    for end in range(1, len(groups) + 1):
        assert (
            abs([task for task, _, _ in groups[:end]].count("letters") - 0.6 * end) < 1
        )
    last = read_lines(whole / "metrics.jsonl")[-1]
    states = [(task, state) for task, _, state in groups]
    filtered = states.count(("words", "filtered"))
    assert last["rollout/filtered/words"] == filtered > 0
    assert last["rollout/filtered"] == filtered + states.count(("letters", "filtered"))
    assert 0 < last["reward/mean/letters"] < 1
    found = {
        (line["policy_version"], line["name"])
        for line in read_lines(whole / "eval.jsonl")
    }
    due = {"often": (0, 3, 6, 9, 10), "seldom": (0, 8, 10)}
    assert found <= {
        (version, name) for name, versions in due.items() for version in versions
    }
    assert {(0, "often"), (0, "seldom"), (10, "often"), (10, "seldom")} <= found
    assert any(
        "eval/seldom/reward_mean" in line
        for line in read_lines(whole / "metrics.jsonl")
    )
    assert " (letters 0." in answer.stdout
    assert "eval seldom v10 reward 0." in answer.stdout
    assert "by task" in render_status(whole)
    epochs = {
        prompt_id.split("/")[1] for task, prompt_id, _ in groups if task == "letters"
    }
    with sqlite3.connect(whole / "journal.sqlite") as database:
        (told,) = database.execute(
            "SELECT count(*) FROM meta WHERE key GLOB 'epoch/*/letters'"
        ).fetchone()
    assert told == len(epochs) > 2, "each epoch is in the journal"

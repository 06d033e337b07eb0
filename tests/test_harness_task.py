"""A task with its answer, and one without: both are plain records, and only reading the missing answer is an
error.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest

from asyncrl.agents import Task
from asyncrl.agents.harness import AnyTask, TaskWithoutAnswer
from asyncrl.errors import ConfigError

FIELDS: dict[str, Any] = {
    "prompt_id": "p",
    "messages": ({"role": "user", "content": "6*7?"},),
    "info": {"kind": "times"},
    "seed": 1,
}


@pytest.mark.parametrize("task", [Task(**FIELDS, answer=42), TaskWithoutAnswer(**FIELDS)])
def test_a_task_is_a_record_with_or_without_its_answer(task: AnyTask) -> None:
    assert (
        task
        == copy.deepcopy(task)
        == pickle.loads(pickle.dumps(task))
        == type(task)(**dataclasses.asdict(task))
    )
    assert dataclasses.replace(task, seed=2) != task
    assert "42" not in repr(task)


def test_an_answer_that_is_not_given_is_missing_and_to_read_it_names_the_setting() -> None:
    task: Any = TaskWithoutAnswer(**FIELDS)
    assert not hasattr(task, "answer")
    assert getattr(task, "answer", "no answer") == "no answer"
    assert "answer" not in dataclasses.asdict(task)
    with pytest.raises(
        ConfigError, match=r"task\.answer, which it is not given(.|\n)*generator\.give_answer=true"
    ):
        _ = task.answer

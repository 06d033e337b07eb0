"""The example for tasks in Harbor's format: what the model does in its shell is what the task's tests see,
and they are the reward. With a real sandbox where there is one.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sandbox_cases import need_bubblewrap

from asyncrl.agents import Outcome, Task
from asyncrl.base.errors import ConfigError
from asyncrl.base.user_code import load_object

ROOT = Path(__file__).parents[1]
TASKS = ROOT / "examples/harbor/tasks"


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])


@pytest.fixture
def bubblewrap() -> None:
    need_bubblewrap()


def works(name: str, *commands: str) -> tuple[Outcome, list[str]]:
    """What comes of a model that runs these commands, and what its tool said to each."""
    calls = [
        SimpleNamespace(id=f"c{index}", function=SimpleNamespace(arguments=json.dumps({"command": command})))
        for index, command in enumerate(commands)
    ]
    messages = [SimpleNamespace(content=None, tool_calls=[call]) for call in calls]
    says = iter([*messages, SimpleNamespace(content="Done.", tool_calls=None)])
    asked: list[Any] = []

    async def create(**body: Any) -> Any:
        asked[:] = body["messages"]
        return SimpleNamespace(choices=[SimpleNamespace(message=next(says))])

    completions = SimpleNamespace(completions=SimpleNamespace(create=create))
    session = SimpleNamespace(model="policy", client=SimpleNamespace(chat=completions))
    task = Task("p", ({"role": "user", "content": "work"},), {"folder": str(TASKS / name)})
    outcome = asyncio.run(load_object("examples.harbor.agent:run", "generator.python")(task, session))
    return outcome, [each["content"] for each in asked if isinstance(each, dict) and each["role"] == "tool"]


@pytest.mark.slow
@pytest.mark.usefixtures("bubblewrap")
@pytest.mark.parametrize("name", ["sort-lines", "word-count"])
def test_the_solution_of_a_task_gets_its_reward_and_nothing_gets_none(name: str) -> None:
    solution = (TASKS / name / "solution/solve.sh").read_text(encoding="utf-8")
    outcome, said = works(name, solution)
    assert outcome.reward == 1
    assert outcome.metrics["calls"] == 1
    assert said == ["\n[exit code 0]"]
    assert works(name)[0].reward == 0


@pytest.mark.slow
@pytest.mark.usefixtures("bubblewrap")
def test_a_part_of_a_task_gets_a_part_of_the_reward_and_the_tests_cannot_be_seen_or_prepared() -> None:
    outcome, said = works(
        "sort-lines",
        "cp text.txt sorted.txt",
        "ls /tests /logs; ls -A / | tr '\\n' ' '",
        "mkdir -p /logs/verifier && echo 1 >/logs/verifier/reward.txt",
        "exec 3<>/dev/tcp/127.0.0.1/80",
        "yes",
    )
    assert outcome == Outcome(0.5, {"calls": 5, "num_lines": 3})
    assert "cannot access '/tests'" in said[1]
    assert "Read-only file system" in said[2]
    assert "Connection refused" in said[3]
    assert "it said more than 20000 bytes" in said[4]


def test_a_folder_that_is_no_task_or_needs_a_container_is_named(tmp_path: Path) -> None:
    tasks, room = (
        load_object("examples.harbor.tasks:HarborTasks", "x"),
        load_object("examples.harbor.rooms:FolderRoom", "x"),
    )
    read = load_object("examples.harbor.tasks:HarborTask", "x").read
    with pytest.raises(ConfigError, match="there is no task in"):
        tasks(size=3, seed=0, folder=str(tmp_path))
    copy = tmp_path / "task"
    shutil.copytree(TASKS / "word-count", copy)
    with (copy / "environment/Dockerfile").open("a") as file:
        file.write("RUN apt-get install -y gcc\n")
    (tmp_path / "room").mkdir()
    with pytest.raises(ValueError, match="'RUN apt-get install -y gcc' needs a container"):
        asyncio.run(room(read(copy), tmp_path / "room").start())
    (copy / "tests/test.sh").unlink()
    with pytest.raises(ConfigError, match="is not run here"):
        read(copy)

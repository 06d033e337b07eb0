"""The example for tasks in Harbor's format: what the model does in its shell is what the task's tests see,
and they are the reward. With a real sandbox where there is one.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sandbox_cases import need_bubblewrap

from asyncrl.agents import Outcome, Task
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
def test_only_a_solution_gets_the_reward(name: str) -> None:
    solution = (TASKS / name / "solution/solve.sh").read_text(encoding="utf-8")
    outcome, said = works(name, solution)
    assert outcome.reward == 1
    assert outcome.metrics["calls"] == 1
    assert said == ["\n[exit code 0]"]
    assert works(name)[0].reward == 0

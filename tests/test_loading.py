"""Tasks and reward functions by name: found from the working directory, refused with what is missing."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import TaskConfig
from asyncrl.errors import ConfigError
from asyncrl.messages.records import Prompt
from asyncrl.tasks import build_task
from asyncrl.tasks.from_config import build_score

MODULE = """
    class Good:
        def __init__(self, *, size, seed, length=4):
            if length < 0: raise ValueError(f"length={length} is below 0")
            self.size, self.seed, self.length = size, seed, length
        def __len__(self): return self.size
        def prompt(self, index): return f"{index} of {self.seed}, {self.length} letters"
        def score(self, prompt, completion): return 0.5
    class NoScore:
        def __init__(self, *, size, seed): pass
        def __len__(self): return 1
        def prompt(self, index): return "x"
    class OddScore(NoScore):
        def __init__(self, *, size, seed): pass
        def score(self, completion): return 1.0
    def reward(prompt, completion, answer): return float(completion == answer)
    def two(prompt, completion): return 1.0
    number = 7
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the module `tasks_here`, which is not on sys.path yet."""
    (tmp_path / "tasks_here.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "broken_here.py").write_text("import json\njson.no_such_thing\n")
    (tmp_path / "needs_more_here.py").write_text("import a_package_that_is_not_here\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x", "answer": "y"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    for name in ("tasks_here", "broken_here", "needs_more_here"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def python_task(name: str, **settings: Any) -> Any:
    return build_task(TaskConfig(python=name, **settings), seed=9)


def test_a_reward_function_scores_rows_and_needs_no_rows_to_be_built(here: Path) -> None:
    config = TaskConfig(files=["rows.jsonl"], reward="tasks_here:reward")
    prompt = Prompt("0/0", (), answer="y")
    assert build_task(config, 0).score(prompt, "y") == 1.0
    (here / "rows.jsonl").unlink()
    assert build_score(config, 0)(prompt, "n") == 0.0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "nowhere_here:Task",
            r"there is no module nowhere_here; modules are looked for in the working directory",
        ),
        (
            "needs_more_here:Task",
            r"importing needs_more_here raised ModuleNotFoundError: No module named "
            r"'a_package_that_is_not_here'",
        ),
        ("broken_here:Task", r"importing broken_here raised AttributeError"),
        ("tasks_here:Goood", r"tasks_here has no Goood(.|\n)*did you mean Good\?"),
        ("tasks_here.Good", r"is not module:name"),
        ("tasks_here:number", r"is 7, which cannot be called"),
        ("tasks_here:NoScore", r"made a NoScore without score; a task has __len__"),
        ("tasks_here:OddScore", r"cannot be called as score\(prompt, completion\)"),
    ],
)
def test_a_task_that_cannot_be_had_says_what_is_missing(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        python_task(name)
    assert caught.value.way_out
    assert name in str(caught.value)


def test_settings_that_a_task_does_not_know_are_named() -> None:
    with pytest.raises(
        ConfigError,
        match=r"cannot be called as Good\(size=1000, seed=9, lenght=2\): got an unexpected keyword argument "
        r"'lenght'",
    ):
        python_task("tasks_here:Good", args={"lenght": 2})


def test_what_a_task_raises_while_it_is_built_is_shown_with_its_place() -> None:
    with pytest.raises(
        ConfigError,
        match=r"Good\(.*length=-1\) raised ValueError: length=-1 is below 0 .tasks_here.py line 4.",
    ):
        python_task("tasks_here:Good", args={"length": -1})


def test_a_reward_function_of_another_shape_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"two\(prompt, completion\) cannot be called as reward\(prompt, completion, answer\)",
    ):
        build_task(TaskConfig(files=["rows.jsonl"], reward="tasks_here:two"), 0)

"""Tasks and reward functions by name: found from the working directory, refused with
the missing name.
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest

from asyncrl.base.errors import ConfigError
from asyncrl.config import TaskConfig
from asyncrl.messages.records import Prompt
from asyncrl.tasks import build_task
from asyncrl.tasks.sources import build_score

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
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the module `tasks_here`, which is not on sys.path yet."""
    (tmp_path / "tasks_here.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "broken_here.py").write_text("import json\njson.no_such_thing\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x", "answer": "y"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    for name in ("tasks_here", "broken_here"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_reward_function_scores_rows_and_is_built_without_any(here: Path) -> None:
    config = TaskConfig(files=["rows.jsonl"], reward="tasks_here:reward")
    prompt = Prompt("0/0", (), answer="y")
    assert build_task(config, 0).score(prompt, "y") == 1.0
    (here / "rows.jsonl").unlink()
    assert build_score(config, 0)(prompt, "n") == 0.0
    with pytest.raises(
        ConfigError, match=r"two.* cannot be called as reward\(.*, answer\)"
    ):
        build_task(TaskConfig(files=["rows.jsonl"], reward="tasks_here:two"), 0)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "nowhere_here:Task",
            "No module named 'nowhere_here'; modules are imported from the working dir",
        ),
        ("broken_here:Task", r"broken_here:Task cannot be loaded: AttributeError"),
        (
            "tasks_here:NoScore",
            r"made a NoScore, which lacks a method; a task has __len__",
        ),
        ("tasks_here:OddScore", r"cannot be called as score\(prompt, completion\)"),
        (
            'tasks_here:Good {"lenght": 2}',
            r"Good\(size=1000, seed=9, lenght=2\): got an unexpected",
        ),
        (
            'tasks_here:Good {"length": -1}',
            r"ValueError: length=-1 is below 0 .tasks_here.py line 4.",
        ),
    ],
)
def test_unavailable_task_names_the_missing_part(name: str, words: str) -> None:
    python, _, args = name.partition(" ")
    with pytest.raises(ConfigError, match=words) as caught:
        build_task(TaskConfig(python=python, args=json.loads(args or "{}")), seed=9)
    assert caught.value.way_out
    assert python in str(caught.value)

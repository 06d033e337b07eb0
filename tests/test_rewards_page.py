"""The functions of docs/rewards.md, in the file that the page has a user save."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import load_config
from asyncrl.messages.records import Prompt
from asyncrl.tasks.sources import look_at_task

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/rewards.md").read_text(encoding="utf-8")
CODE = "\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE))
(CONFIG,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
PROMPT = Prompt("0", ({"role": "user", "content": "1 + 1?"},), "1")


@pytest.fixture(scope="module")
def rewards() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(CODE, "docs/rewards.md", "exec"), names)
    return names


@pytest.mark.parametrize(
    ("name", "completion", "answer", "reward"),
    [
        ("exact", " paris.", "Paris", 1.0),
        ("exact", "It is Paris", "Paris", 0.0),
        ("mathematics", "So it is \\boxed{\\frac{1}{2}}.", "0.5", 1.0),
        ("mathematics", "So it is \\boxed{3}.", "0.5", 0.0),
        ("form", "<think>a</think> <answer>Paris</answer>", "Paris", 1.0),
        ("form", "<answer>Paris</answer>", "Paris", 0.0),
        ("form", "<think>a</think><answer>a</answer><answer>b</answer>", "a", 0.0),
        ("combined", "<think>a</think><answer>Paris</answer>", "Paris", 1.0),
        ("combined", f"<think>{'a' * 400}</think><answer>Paris</answer>", "Paris", 0.9),
        ("combined", "<think>a</think><answer>Rome</answer>", "Paris", 0.1),
        ("combined", "Paris", "Paris", 0.0),
    ],
)
def test_a_reward_of_the_page(
    rewards: dict[str, Any], name: str, completion: str, answer: str, reward: float
) -> None:
    assert rewards[name](PROMPT, completion, answer) == pytest.approx(reward)


def test_the_config_of_the_page_finds_the_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "my_rewards.py").write_text(CODE)
    (tmp_path / "config.yaml").write_text(f"model: {{path: a-model}}\n{CONFIG}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    task, _ = look_at_task(load_config("config.yaml").task, 0)
    assert task is not None
    assert task.score(PROMPT, "x") == 0.0

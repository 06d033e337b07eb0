"""A task that can hold a run: its rewards wait until a test lets the run continue; and
advantages that do so.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from asyncrl.algorithms.advantages import rloo
from asyncrl.messages.records import Prompt
from asyncrl.tasks.toy import Letters

RUN_DIR = "HELD_RUN_DIR"
"""Environment variable with the run directory. Without it no reward waits."""


class HeldLetters(Letters):
    """Letters whose rewards wait once a run has recorded the steps that its hold
    allows.
    """

    def score(self, prompt: Prompt, completion: str) -> float:
        run_dir = os.environ.get(RUN_DIR)
        while run_dir and _is_held(Path(run_dir)):
            time.sleep(0.02)
        return super().score(prompt, completion)


class PickyLetters(HeldLetters):
    """Held letters whose reward raises on an answer that begins with a digit."""

    def score(self, prompt: Prompt, completion: str) -> float:
        if completion[:1].isdigit():
            raise ValueError("a digit")
        return super().score(prompt, completion)


class HeldGroups(Letters):
    """Letters whose whole groups are scored: by letters, minus the mean of the group."""

    def score_group(self, prompt: Prompt, completions: list[str | None]) -> list[float]:
        run_dir = os.environ.get(RUN_DIR)
        while run_dir and _is_held(Path(run_dir)):
            time.sleep(0.02)
        rewards = [self.score(prompt, text or "") for text in completions]
        mean = sum(rewards) / len(rewards)
        return [reward - mean for reward in rewards]


class PartLetters(HeldLetters):
    """Held letters whose reward is one part."""

    def score(self, prompt: Prompt, completion: str) -> Any:
        return {"letters": super().score(prompt, completion)}


class HeldParts(HeldLetters):
    """Held letters whose groups are scored by two parts, and a third that applies to
    some answers only.
    """

    def score_group(self, prompt: Prompt, completions: list[str | None]) -> list[Any]:
        return [
            {
                "letters": self.score(prompt, text or ""),
                "digits": sum(map(str.isdigit, text or "")) / 24,
                "first": 0.1 if text and text[0] != " " else None,
            }
            for text in completions
        ]


def held_rloo(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Advantages that wait within the trainer's time slice while a test holds it."""
    run_dir = os.environ.get(RUN_DIR)
    while run_dir and held_slice(Path(run_dir)).exists():
        time.sleep(0.02)
    return rloo(reward_B, group_B)


def held_slice(run_dir: Path) -> Path:
    """Return the file that holds a run in the trainer's time slice while it exists."""
    return run_dir.with_name(f"{run_dir.name}.slice")


def hold(run_dir: Path, num_steps: int) -> None:
    """Let the run record about `num_steps` steps: rewards of later ones wait."""
    _path(run_dir).write_text(str(num_steps))


def release(run_dir: Path) -> None:
    _path(run_dir).unlink(missing_ok=True)


def _path(run_dir: Path) -> Path:
    return run_dir.with_name(f"{run_dir.name}.hold")


def _is_held(run_dir: Path) -> bool:
    try:
        allowed = int(_path(run_dir).read_text() or 0)
        return (run_dir / "metrics.jsonl").read_bytes().count(b"\n") >= allowed
    except FileNotFoundError:
        return False

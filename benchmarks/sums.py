"""Questions of reasoning-gym's chain_sum, and a reward for the last number of a completion."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

SETTINGS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
"""Before training, SmolLM2-135M-Instruct ends 12 of 100 completions with the right number (64 prompts at
temperature 1; with a third term 3 to 6, with one digit 30, with two 5).
"""


def last_number(prompt: Any, completion: str, answer: str) -> float:
    """Return 1 if the last number of the completion is the answer, else 0."""
    numbers = re.findall(r"-?\d+", completion.replace(",", ""))
    return float(numbers[-1:] == [answer])


def write_sums(path: Path, size: int, *, seed: int = 0) -> None:
    """Write `size` questions with their answers as JSONL. Needs reasoning-gym, which a run does not."""
    import reasoning_gym

    questions = reasoning_gym.create_dataset("chain_sum", size=size, seed=seed, **SETTINGS)
    rows = ({"prompt": one["question"], "answer": one["answer"]} for one in questions)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")

"""Additions and subtractions of reasoning-gym's chain_sum, with a reward for the last
number of a completion.

    pip install -e '.[smollm2]'
    python examples/smollm2.py
    python examples/arithmetic.py      # writes runs/arithmetic.jsonl; only this needs reasoning-gym
    asyncrl run examples/arithmetic.yaml

The library's own score is the answer's share of the text, of which a model that answers
in sentences earns hardly any.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PATH = Path("runs/arithmetic.jsonl")
NUM_ROWS = 40_000
SETTINGS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
"""Before training, SmolLM2-135M-Instruct ends 12 of 100 completions with the right
number (64 prompts at temperature 1). With two or three terms it is 6 of 100, with three
terms of one digit 3.
"""


def last_number(prompt: Any, completion: str, answer: str) -> float:
    """Return 1 if the last number of the completion is the answer, else 0."""
    numbers = re.findall(r"-?\d+", completion.replace(",", ""))
    return float(numbers[-1:] == [answer])


def main() -> None:
    """Write questions with their answers as JSONL."""
    import reasoning_gym

    PATH.parent.mkdir(exist_ok=True)
    questions = reasoning_gym.create_dataset(
        "chain_sum", size=NUM_ROWS, seed=0, **SETTINGS
    )
    rows = ({"prompt": one["question"], "answer": one["answer"]} for one in questions)
    PATH.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()

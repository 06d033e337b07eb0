"""Code with tests: MBPP's problems, and a reward for functions that pass its tests.

    pip install -e '.[vllm]'
    asyncrl run examples/code.yaml

The reward executes what the model writes. Run it in a container without a network and
without your files; the limits below stop endless loops and large allocations, not
malice.
"""

from __future__ import annotations

import re
import secrets
import subprocess
import sys
from typing import Any

from asyncrl.messages.records import Prompt
from asyncrl.tasks import Item

QUESTION = "{text}\nWrite a Python function in one ```python block. It must pass this test:\n{test}"
LIMITS = """
import resource
resource.setrlimit(resource.RLIMIT_CPU, (5, 5))
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
"""
TIMEOUT_S = 10.0


class Mbpp:
    """The problems of a split. The prompt shows the first of three tests; the reward
    needs all.
    """

    def __init__(self, *, size: int, seed: int, split: str = "train") -> None:
        import datasets

        rows: Any = datasets.load_dataset("google-research-datasets/mbpp", split=split)
        self.rows = list(rows)[:size]

    def __len__(self) -> int:
        return len(self.rows)

    def prompt(self, index: int) -> Item:
        row = self.rows[index]
        question = QUESTION.format(text=row["text"], test=row["test_list"][0])
        return Item(question, answer=[row["test_setup_code"], *row["test_list"]])

    def score(self, prompt: Prompt, completion: str) -> float:
        """Return 1 if the last code block passes all tests, else 0."""
        blocks = re.findall(r"```python\n(.*?)```", completion, flags=re.DOTALL)
        return float(bool(blocks) and passes(blocks[-1], prompt.answer))


def passes(code: str, tests: list[str]) -> bool:
    """Execute code and tests in a process. The word at the end shows that no exit came
    before it.
    """
    word = secrets.token_hex(16)
    program = "\n".join([LIMITS, code, *tests, f"print('{word}')"])
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-"],
            input=program,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0 and done.stdout.endswith(f"{word}\n")

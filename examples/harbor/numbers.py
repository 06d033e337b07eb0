"""Writes ten folders in Harbor's format: each asks for a number in /app/answer.txt.

python examples/harbor/numbers.py runs/harbor-numbers
"""

from __future__ import annotations

import sys
from pathlib import Path

SETTINGS = """\
schema_version = "1.4"

[agent]
timeout_sec = 60.0

[verifier]
timeout_sec = 60.0

[environment]
cpus = 1
memory_mb = 256
"""
DOCKERFILE = """\
FROM debian:bookworm-slim
WORKDIR /app
"""
TEST = """\
#!/bin/bash
if [ "$(cat /app/answer.txt)" = {number} ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
"""
SOLUTION = """\
#!/bin/bash
echo {number} >/app/answer.txt
"""


def write(folder: Path) -> None:
    """Write the folders number-0 to number-9 into `folder`."""
    for number in range(10):
        files = {
            "task.toml": SETTINGS,
            "instruction.md": f"write {number}\n",
            "environment/Dockerfile": DOCKERFILE,
            "tests/test.sh": TEST.format(number=number),
            "solution/solve.sh": SOLUTION.format(number=number),
        }
        for name, text in files.items():
            path = folder / f"number-{number}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))

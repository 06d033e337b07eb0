"""docs/sft-then-rl.md: its commands as they stand, with few steps, and its examples."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from job_runs import environment, read_lines

from asyncrl.messages.records import Prompt
from asyncrl.tasks.toy import Letters, is_held_out

pytestmark = pytest.mark.extension("sft")

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples/sft_then_rl"
PAGE = (ROOT / "docs/sft-then-rl.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)


def test_examples_are_right_answers_to_training_prompts() -> None:
    rows = [*map(json.loads, (EXAMPLE / "letters.jsonl").read_text().splitlines())]
    assert len({row["prompt"] for row in rows}) == len(rows) == 200
    config = yaml.safe_load((EXAMPLE / "rl.yaml").read_text())
    task = Letters(size=1, seed=0, **config["task"]["args"])
    for row in rows:
        letter, count = row["prompt"].split()
        assert letter in task.letters
        assert int(count) <= task.max_count
        assert not is_held_out(row["prompt"])
        prompt = Prompt("0/0", ({"role": "user", "content": row["prompt"]},))
        assert task.score(prompt, row["completion"]) == 1.0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_commands_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for command in "".join(BLOCKS).splitlines():
        words = shlex.split(command)
        if words[1] in ("run", "sft"):
            words.append("trainer.num_steps=3")
        done = subprocess.run(
            [sys.executable, "-m", "asyncrl.cli", *words[1:]],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
    first = {
        name: read_lines(tmp_path / f"runs/{name}/metrics.jsonl")
        for name in ("sft", "rl", "alone")
    }
    assert {name: len(lines) for name, lines in first.items()} == dict.fromkeys(
        first, 3
    )

"""Every command of docs/serving.md, run as it stands there, one after the other."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forked_processes import popen
from job_runs import environment

from asyncrl.rollouts.recording import read_recording

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_command_of_the_page_does_what_the_page_says(tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)
    said = [run(command, tmp_path) for block in blocks for command in block.splitlines()]
    by_hand, by_config, check, trained, engine = said
    (shown,) = re.findall(r"```text\n(.*?)```", PAGE, flags=re.DOTALL)
    for line in shown.splitlines():  # what stands before the first thing that is another one each time
        assert re.split(r"runs/|=|\.\.\.", line)[0] in by_hand, line
    assert "mean reward" in by_config
    assert "lowest" in by_config
    assert len(read_recording(tmp_path / "first.jsonl").rollouts) == 64
    assert read_recording(tmp_path / "tried.jsonl").rollouts == ()
    assert "first.jsonl: 64 recorded rollouts of 4 prompts; left out: none" in " ".join(check.split())
    assert "64 recorded rollouts were taken in place of sampled ones" in " ".join(trained.split())
    assert "engine-0 ready" in engine
    assert "/generate" in engine


def run(command: str, folder: Path) -> str:
    """What it says. One that has no end gets Ctrl-C when it is ready; a training run takes two steps."""
    words = shlex.split(command)
    has_end = words[1] != "serve" or "--rollouts" in words
    words += ["trainer.num_steps=2"] if words[1] == "run" else []
    full, lines = [sys.executable, "-m", "asyncrl.cli", *words[1:]], list[str]()
    pipe = subprocess.PIPE
    with popen(full, environment(), cwd=folder, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                if not has_end and ("it speaks" in line or "Ctrl-C ends" in line):
                    process.send_signal(signal.SIGINT)
            assert process.wait(timeout=120) == 0, (command, process.stderr and process.stderr.read())
        finally:
            process.kill()
    return "".join(lines)

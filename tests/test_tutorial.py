"""The tutorial as it stands, from its first command to its last, and the notebook. Runs
take a few steps; the run of the tutorial's own task takes all of its steps.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import nbformat
import pytest
from exact_match import answers_of
from forked_processes import popen
from job_runs import environment
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
NOTEBOOK = nbformat.read(ROOT / "examples/quickstart.ipynb", as_version=4)
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
NUM_STEPS = 3
WHOLE_RUN = "asyncrl run my_task.yaml --run-dir runs/task"


def block(language: str, index: int) -> str:
    return [text for kind, text in BLOCKS if kind == language][index]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tutorial_commands_run_on_the_files_it_shows(tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "my_task.py").write_text(block("python", 0))
    (tmp_path / "my_task.yaml").write_text(block("yaml", 0))
    (tmp_path / "my_agent.py").write_text(block("python", 1))
    (tmp_path / "my_agent.yaml").write_text(block("yaml", 0) + block("yaml", 1))
    commands = [
        line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()
    ]
    said = dict[str, str]()
    for command in commands:
        # section 5: the same command resumes
        is_killed = commands.count(command) > 1 and command not in said
        num_done = num_steps(tmp_path / "runs/agent") if command in said else 0
        num = None if command == WHOLE_RUN else num_done + NUM_STEPS
        said[command] = run(command, tmp_path, num, is_killed=is_killed)
    assert "random sample of step" in said["asyncrl inspect runs/first --samples"]
    assert (tmp_path / "my-model/model.safetensors").exists()
    assert "bound kept" in said["asyncrl inspect runs/first --step 1"]
    assert "mean reward" in said["asyncrl serve gateway my_agent.yaml --rollouts 2"]
    assert num_steps(tmp_path / "runs/agent") > NUM_STEPS
    assert "task/turns" in (tmp_path / "runs/agent/metrics.jsonl").read_text()
    program = [sys.executable, "-W", "ignore", "-c", block("python", 2)]
    done = subprocess.run(
        program,
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "cbf<|im_end|>\n"
    every = ["".join(letters) for letters in itertools.product("abcdef", repeat=3)]
    assert "HELD_OUT = WORDS[::5]" in block("python", 0)
    for words in (every, every[::5]):
        assert exact_match(tmp_path / "runs/task/final", words) >= 0.9


def exact_match(model_path: Path, words: list[str]) -> float:
    """Return the share of `words` that the model answers exactly, special tokens
    included.
    """
    right = ["".join(chr(ord(letter) + 1) for letter in word) for word in words]
    found, end = answers_of(model_path, words, max_tokens=5)
    return fmean(
        answer == text + end for answer, text in zip(found, right, strict=True)
    )


def num_steps(run_dir: Path) -> int:
    return len((run_dir / "metrics.jsonl").read_text().splitlines())


def run(command: str, folder: Path, num_steps: int | None, *, is_killed: bool) -> str:
    """Return the command's output. A run takes `num_steps` (None: the number in its
    config); a run that is to be killed never ends.
    """
    words = shlex.split(command)
    if words[1] == "run" and num_steps is not None:
        words += [f"trainer.num_steps={1_000_000 if is_killed else num_steps}"]
        # a learning rate that falls to 0 depends on it
        words += ["--allow-change", "trainer.num_steps"]
    full, pipe = [sys.executable, "-m", "asyncrl.cli", *words[1:]], subprocess.PIPE
    with popen(
        full,
        environment(),
        cwd=folder,
        stdout=pipe,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            lines = list[str]()
            for line in process.stdout:
                lines.append(line)
                if is_killed and line.startswith("step "):
                    process.kill()
            code = process.wait(timeout=500)
        finally:
            process.kill()
    assert code == (-9 if is_killed else 0), (command, lines)
    return "".join(lines)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    """In a kernel, as Jupyter would; nothing is written into the checkout."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    notebook = nbformat.from_dict(json.loads(json.dumps(NOTEBOOK)))
    setting = next(cell for cell in notebook.cells if "STEPS = " in cell.source)
    setting.source = re.sub(r"STEPS = \d+", f"STEPS = {NUM_STEPS}", setting.source)
    given = {
        "timeout": 300,
        "startup_timeout": 300,
        "resources": {"metadata": {"path": str(tmp_path)}},
    }
    NotebookClient(notebook, **given).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    said = "".join(output.get("text", "") for output in outputs)
    assert f"step {NUM_STEPS}/{NUM_STEPS}" in said
    assert "b 7 ->" in said

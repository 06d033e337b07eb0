"""A run from Python, as docs/python.md shows it, and its directory as tables."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from job_runs import environment, write_config

import asyncrl
from asyncrl.base.errors import ConfigError

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
SCRIPT, READING = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)

IN_A_LOOP = """
import asyncio, json, os, signal, sys
import asyncrl
from asyncrl.base.errors import CallbackError

def on_weights(version, digest):
    if version == 2:
        raise KeyError("no room")

def on_step(step, metrics):
    if step == 3:
        os.kill(os.getpid(), signal.SIGINT)

async def main():
    config, quiet, run_dir = json.loads(sys.argv[1]), ["observe.console=none"], sys.argv[2]
    try:
        asyncrl.run(config, quiet, run_dir=run_dir, on_weights=on_weights)
    except CallbackError as error:
        raised = [str(error), repr(error.error)]
    before = signal.getsignal(signal.SIGINT)
    stopped = asyncrl.run(config, quiet, run_dir=run_dir, on_step=on_step)
    is_handler_back = signal.getsignal(signal.SIGINT) == before
    num_steps = len(stopped.steps["step"])
    more, seen = [*quiet, f"trainer.num_steps={num_steps + 1}"], []
    note = lambda step, _: seen.append(step)
    resumed = await asyncio.to_thread(asyncrl.run, config, more, run_dir=run_dir, on_step=note)
    ends = [[stopped.state, num_steps], [resumed.state, resumed.steps["step"]]]
    print(json.dumps([raised, *ends, seen, is_handler_back]))

if __name__ == "__main__":
    asyncio.run(main())
"""


def ran(arguments: list[str], folder: Path) -> str:
    """What a script printed."""
    done = subprocess.run(
        arguments, cwd=folder, env=environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_python_page_runs_and_reads(tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "script.py").write_text(SCRIPT)
    said = ran([sys.executable, "script.py"], tmp_path).splitlines()
    assert [line.split()[0] for line in said if line[0].isdigit()][:5] == list("12345")
    assert "engines serve 1" in said
    samples = [line for line in said if line.startswith("sample ")]
    assert len(samples) == 15, "three of each of five steps"
    assert said[-1].startswith("done runs/from-python/final")
    reading = READING.replace("runs/from-python", str(tmp_path / "runs" / "from-python"))
    page: dict[str, Any] = {"asyncrl": asyncrl}
    exec(compile(reading, "docs/python.md", "exec"), page)
    record = page["record"]
    assert len(record.steps["reward/mean"]) == 5
    assert len({len(column) for column in record.trained.values()}) == 1
    assert max(record.trained["staleness"]) <= record.config.buffer.max_staleness
    assert len(record.samples) == 15
    assert record.problems == []
    assert repr(record).endswith("done, 5 steps>")


@pytest.mark.slow
def test_run_in_an_event_loop_resumes_after_a_raise_and_an_interrupt(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(IN_A_LOOP)
    config = yaml.safe_load(write_config(tmp_path, trainer={"num_steps": 100_000}).read_text())
    arguments = [sys.executable, "script.py", json.dumps(config), str(tmp_path / "run")]
    raised, stopped, resumed, seen, is_handler_back = json.loads(ran(arguments, tmp_path).splitlines()[-1])
    assert raised[0].startswith("on_weights of asyncrl.run raised KeyError: 'no room'")
    assert raised[1] == "KeyError('no room')"
    state, num_steps = stopped
    assert state == "interrupted"
    assert num_steps >= 3
    assert resumed == ["done", [*range(1, num_steps + 2)]]
    assert seen == resumed[1][-len(seen) :], "it resumes where the last one ended"
    assert is_handler_back


async def _async(step: int, metrics: object) -> None: ...


@pytest.mark.parametrize(
    ("name", "function", "says"),
    [
        ("on_step", 5, "on_step of asyncrl.run is 5, which cannot be called"),
        ("on_step", lambda step: None, r"cannot be called as on_step\(step, metrics\): too many positional"),
        (
            "on_sample",
            lambda step, sample: None,
            r"on_sample\(sample\): missing a required argument: 'sample'",
        ),
        ("on_weights", _async, "is a coroutine function"),
    ],
)
def test_invalid_callback_is_refused_before_the_start(
    name: str, function: Any, says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says):
        asyncrl.run(ROOT / "configs/quickstart.yaml", run_dir=tmp_path / "run", **{name: function})
    assert not (tmp_path / "run").exists()

"""A run from Python, as docs/python.md shows it, and its directory as tables."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from job_runs import environment, read_lines, write_config

import asyncrl
from asyncrl.base.errors import CallbackError, ConfigError
from asyncrl.job.lifecycle import SentSignals
from asyncrl.journal import journal
from asyncrl.messages.records import Batch

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
SCRIPT, READING = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def ran(arguments: list[str], folder: Path) -> str:
    """The output of a script."""
    done = subprocess.run(
        arguments,
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
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
    reading = READING.replace(
        "runs/from-python", str(tmp_path / "runs" / "from-python")
    )
    page: dict[str, Any] = {"asyncrl": asyncrl}
    exec(compile(reading, "docs/python.md", "exec"), page)
    record = page["record"]
    assert len(record.steps["reward/mean"]) == 5
    assert len({len(column) for column in record.trained.values()}) == 1
    assert max(record.trained["staleness"]) <= record.config.buffer.max_staleness
    assert (len(record.samples), record.problems) == (15, [])


@pytest.mark.slow
def test_run_in_an_event_loop_ends_by_interrupt_or_callback(tmp_path: Path) -> None:
    config = yaml.safe_load(
        write_config(tmp_path, trainer={"num_steps": 100_000}).read_text()
    )
    run = partial(
        asyncrl.run, config, ["observe.console=none"], run_dir=tmp_path / "run"
    )

    def interrupt(step: int, metrics: object) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    def fail(step: int, metrics: object) -> None:
        raise KeyError("no room")

    async def main() -> None:
        stopped = run(on_step=interrupt)
        assert (stopped.state, stopped.steps["step"][:2]) == ("interrupted", [1, 2])
        with pytest.raises(
            CallbackError, match="^on_step of asyncrl.run raised KeyError"
        ) as caught:
            await asyncio.to_thread(run, on_step=fail)
        assert repr(caught.value.error) == "KeyError('no room')"
        resumed = run(on_step=lambda *_: signal.raise_signal(signal.SIGINT))
        steps = resumed.steps["step"]
        assert (steps, resumed.problems) == ([*range(1, len(steps) + 1)], [])

    asyncio.run(main())


@pytest.mark.slow
def test_no_step_is_recorded_before_its_batch_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = yaml.safe_load(
        write_config(tmp_path, trainer={"num_steps": 3}).read_text()
    )
    add_batch = journal._add_batch
    recorded: list[tuple[int, int]] = []

    def slowly(connection: sqlite3.Connection, batch: Batch) -> None:
        add_batch(connection, batch)
        time.sleep(1.0)  # a slow disk: a step of this model takes 0.1 s
        lines = read_lines(tmp_path / "run/trained.jsonl")
        recorded.append((batch.version, len(lines)))

    monkeypatch.setattr(journal, "_add_batch", slowly)
    asyncrl.run(config, ["observe.console=none"], run_dir=tmp_path / "run")
    assert recorded == [(0, 0), (1, 1), (2, 2)]


async def _async(step: int, metrics: object) -> None: ...


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (5, "on_step of asyncrl.run is 5, which cannot be called"),
        (
            lambda step: None,
            r"cannot be called as on_step\(step, metrics\): too many positional",
        ),
        (_async, "is a coroutine function"),
    ],
)
def test_invalid_callback_is_refused_before_the_start(
    function: Any, says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says):
        asyncrl.run(
            ROOT / "configs/quickstart.yaml", run_dir=tmp_path / "run", on_step=function
        )
    assert not (tmp_path / "run").exists()


def test_an_interrupt_after_the_run_s_loop_has_closed_is_ignored() -> None:
    signals = SentSignals()

    async def run() -> None:
        signals.follow(lambda _: None)

    asyncio.run(run())
    signals.send(signal.SIGINT)

"""`asyncrl sweep`: its combinations, and real runs of a tiny model."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from job_runs import environment, read_lines, write_config

from asyncrl.base.errors import ConfigError
from asyncrl.job import sweep as module
from asyncrl.job.sweep import sweep, values_of
from asyncrl.observe.run_dir import read_settings

PASSES_ON = """
import sys
from asyncrl.job.sweep import _run
sys.executable = sys.argv[1]
sys.exit(_run("run"))
"""
CHILD = f"""#!{sys.executable}
import signal
signal.signal(signal.SIGTERM, lambda *_: exit(143))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize(
    ("choice", "overrides"),
    [
        ("seed=1,2", ["seed=1", "seed=2"]),
        ("seed=1", ["seed=1"]),
        ("a.b=1e-5, 3e-5", ["a.b=1e-5", "a.b=3e-5"]),
        ("a=[1, 2],[3]", ["a=[1, 2]", "a=[3]"]),
        ("a={b: 1, c: 2},none", ["a={b: 1, c: 2}", "a=none"]),
        ("a='x,y',z", ["a='x,y'", "a=z"]),
        ("task.reward=m:f,m:g", ["task.reward=m:f", "task.reward=m:g"]),
        ("a=[1,2", ["a=[1,2"]),
        ("a=", ["a="]),
        ("nothing", ["nothing"]),
    ],
)
def test_values_are_split_at_outer_commas(choice: str, overrides: list[str]) -> None:
    assert values_of(choice) == overrides


def test_an_invalid_combination_starts_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_run", lambda *_: pytest.fail("a run was started"))
    for choices in (["seed=1,-1"], ["seed=1,2", "sed=1"], ["runs/mine"]):
        with pytest.raises(ConfigError):
            sweep(write_config(tmp_path), choices, folder=tmp_path / "runs")


def test_a_failed_run_does_not_end_the_sweep_and_a_signal_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = [1, 0, 130]
    started = list[str]()

    def run(*arguments: str) -> int:
        started.append(arguments[-1])
        return codes.pop(0)

    monkeypatch.setattr(module, "_run", run)
    config = write_config(tmp_path)
    assert sweep(config, ["seed=1,2"], folder=tmp_path / "a") == 1
    assert sweep(config, ["seed=1,2"], folder=tmp_path / "b") == 130
    names = ["a/seed=1", "a/seed=2", "b/seed=1"]
    assert started == [str(tmp_path / name) for name in names]


def test_a_signal_reaches_the_run(tmp_path: Path) -> None:
    child = tmp_path / "python"
    child.write_text(CHILD)
    child.chmod(0o700)
    command = [sys.executable, "-c", PASSES_ON, str(child)]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 143


@pytest.mark.slow
def test_a_sweep_trains_each_combination_once_and_compares(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    choices = ["trainer.num_steps=2", "seed=1,2"]
    folder = tmp_path / "runs"
    told = list[str]()
    assert sweep(config, choices, folder=folder, tell=told.append) == 0
    run_dirs = [folder / "seed=1", folder / "seed=2"]
    assert [read_settings(run_dir).seed for run_dir in run_dirs] == [1, 2]
    page = (folder / "report.html").read_text()
    assert all(run_dir.name in page for run_dir in run_dirs)
    lines = [read_lines(run_dir / "metrics.jsonl") for run_dir in run_dirs]
    assert [len(each) for each in lines] == [2, 2]
    assert sweep(config, choices, folder=folder, tell=told.append) == 0
    assert [read_lines(run_dir / "metrics.jsonl") for run_dir in run_dirs] == lines

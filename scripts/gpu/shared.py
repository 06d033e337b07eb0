"""An engine that works at the same time as the trainer on its device is killed."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import psutil
import yaml

from gpu.jobs import (
    CASES,
    GRACE_S,
    REPO,
    command_of,
    job_config,
    steps_of,
    tell_sharing,
)
from gpu.models import make_folder
from gpu.rows import Bench

STEPS = 3
"""Before the kill, and again after it."""
LOOK_S = 0.2
LOST_S = 120.0
"""Longest wait for a step."""


def survives_a_kill(bench: Bench) -> None:
    """Kill the engine during generation, and print what restarts and how long no step
    ends.
    """
    sections = dict(CASES["one-device"]["async"])
    if bench.device == "cpu":
        sections["placement"] = {"trainer": "cpu", "rollout": "cpu"}
        sections["weight_sync"] = {"transport": "ipc"}
        sections["model"] = {"dtype": "float32"}
        sections["rollout"] = {
            "engine": "embedded",
            "max_tokens": 8,
            "group_size": 2,
            "slots": 8,
        }
    run = job_config(bench, make_folder(bench, "0.6B"), sections)
    run["trainer"]["num_steps"] = 1000  # on a CPU, job_config sets few
    config = bench.folder / "kill.yaml"
    config.write_text(yaml.safe_dump(run), "utf-8")
    run_dir = bench.folder / "kill"
    command = command_of(config, run_dir)
    with (bench.folder / "kill.log").open("w+", encoding="utf-8") as log:
        job = subprocess.Popen(command, cwd=REPO, stdout=log, stderr=log)
        try:
            _wait_steps(job, run_dir, STEPS)
            before = len(steps_of(run_dir))
            (engine,) = _children(job, "specs/engine-0.json")
            engine.kill()
            killed_s = time.monotonic()
            _wait_steps(job, run_dir, before + STEPS)
        finally:
            if job.poll() is None:
                job.send_signal(signal.SIGINT)
                job.wait(GRACE_S)
            log.seek(0)
            print(log.read()[-3000:])
    last = steps_of(run_dir)[-1]
    again = f"{time.monotonic() - killed_s:.1f} s to {STEPS} more steps"
    bench.tell("engine killed", again, ok=last["engine/restarts"] == 1)
    bench.tell("restarts of the trainer with it", f"{last['trainer/restarts']:g}")
    tell_sharing(bench, "kill", run_dir)


def _wait_steps(job: subprocess.Popen[bytes], run_dir: Path, num: int) -> None:
    """Raise RuntimeError if the run ends, or has not so many steps after LOST_S."""
    end_s = time.monotonic() + LOST_S
    while len(steps_of(run_dir)) < num:
        if job.poll() is not None or time.monotonic() > end_s:
            raise RuntimeError(
                f"{len(steps_of(run_dir))} of {num} steps; the run's exit code is {job.poll()}"
            )
        time.sleep(LOOK_S)


def _children(job: subprocess.Popen[bytes], words: str) -> list[psutil.Process]:
    children = psutil.Process(job.pid).children(recursive=True)
    return [child for child in children if words in " ".join(child.cmdline())]

"""Settings that change during a run: RUN_DIR/wanted.json has their values by key, so far only `engines`."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from asyncrl.base.errors import ConfigError
from asyncrl.base.files import write_whole
from asyncrl.config.rollout_buffer import EngineRange
from asyncrl.job.lifecycle import run_again
from asyncrl.observe.run_dir import read_config

WANTED_FILE = "wanted.json"
KEY = "engines"


def read_wanted(run_dir: Path, limits: EngineRange) -> int | None:
    """Return the number in RUN_DIR/wanted.json, if there is one in range."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        num = int(json.loads((run_dir / WANTED_FILE).read_text(encoding="utf-8"))[KEY])
        if limits.min <= num <= limits.max:
            return num
    return None


def write_wanted(run_dir: Path, num: int) -> None:
    write_whole(run_dir / WANTED_FILE, json.dumps({KEY: num}) + "\n")


def scale_run(run_dir: Path, asked: str) -> str:
    """Ask a run for `engines=N`; return an answer for the user. Raises ConfigError."""
    name, _, text = asked.partition("=")
    num = int(text) if name == KEY and text.isdecimal() else 0
    limits = read_config(run_dir).rollout.engine_range
    if not limits.min <= num <= limits.max:
        wide = f"rollout.num_engines={{min: 1, max: {max(num, limits.max)}}}"
        again = run_again(run_dir, wide, "--allow-change", "rollout.num_engines")
        raise ConfigError(
            f"{asked!r} is not {KEY}=N within rollout.num_engines={{min: {limits.min}, max: {limits.max}}}",
            rule="memory is planned for this range",
            way_out=f"choose a number in it; or stop the run, and resume it with another range: `{again}`.",
        )
    write_wanted(run_dir, num)
    return f"asked for {num} engines; `asyncrl status {run_dir}` shows their progress"

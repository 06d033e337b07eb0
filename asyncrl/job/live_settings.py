"""The number of engines, which changes during a run. It is in RUN_DIR/wanted.json: a file
needs no port or key, and the number survives the process, so that a resumed run starts
with it.
"""

from __future__ import annotations

import json
from pathlib import Path

from asyncrl.base.errors import ConfigError
from asyncrl.base.files import write_whole
from asyncrl.job.lifecycle import run_again
from asyncrl.observe.run_dir import read_config

WANTED_FILE = "wanted.json"
ENGINES = "engines"
KEY = "rollout.num_engines"


def read_wanted(run_dir: Path, allowed: range) -> int | None:
    """Return the number in RUN_DIR/wanted.json, if there is one in range."""
    try:
        num = json.loads((run_dir / WANTED_FILE).read_text(encoding="utf-8"))[ENGINES]
    # A broken file, or a number from a wider range before a resume, changes nothing.
    except (OSError, ValueError, TypeError, LookupError):
        return None
    return num if isinstance(num, int) and num in allowed else None


def write_wanted(run_dir: Path, num: int) -> None:
    write_whole(run_dir / WANTED_FILE, json.dumps({ENGINES: num}) + "\n")


def scale_run(run_dir: Path, asked: str) -> str:
    """Ask a run for engines=N; return an answer for the user. Raises ConfigError."""
    name, _, text = asked.partition("=")
    allowed = read_config(run_dir).rollout.engine_range.numbers
    num = int(text) if text.isdecimal() else 0
    if name != ENGINES or num not in allowed:
        wider = f"{KEY}={{min: 1, max: {max(num, allowed[-1])}}}"
        again = run_again(run_dir, wider, "--allow-change", KEY)
        raise ConfigError(
            f"{asked!r} is not {ENGINES}=N with N from {allowed[0]} to {allowed[-1]} ({KEY})",
            rule="memory is planned for this range",
            way_out=f"write {ENGINES}={allowed[0]}, or stop the run and resume it with another {KEY}: "
            f"`{again}`.",
        )
    write_wanted(run_dir, num)
    return f"asked for {num} {ENGINES}; `asyncrl status {run_dir}` shows their progress"

"""Settings that change during a run: RUN_DIR/wanted.json has their values by name."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from asyncrl.base.errors import ConfigError
from asyncrl.base.files import write_whole
from asyncrl.config import RunConfig
from asyncrl.job.lifecycle import run_again
from asyncrl.observe.run_dir import read_config

if TYPE_CHECKING:
    from asyncrl.job.build import Components

LOOK_PERIOD_S = 1.0
WANTED_FILE = "wanted.json"
ENGINES = "engines"


class LiveSetting(NamedTuple):
    """`range_of`: values that the config key `key` allows the run; `rule` is the reason. `apply` brings a
    value to the part that follows it. `wider` writes the key so that it allows a value.
    """

    key: str
    range_of: Callable[[RunConfig], range]
    rule: str
    apply: Callable[[Components, int], None]
    wider: Callable[[int], str] = str


LIVE = {
    ENGINES: LiveSetting(
        "rollout.num_engines",
        lambda config: config.rollout.engine_range.numbers,
        "memory is planned for this range",
        lambda run, num: run.scale.want_nowait(num),
        lambda num: f"{{min: 1, max: {num}}}",
    )
}


async def follow_live(run_dir: Path, config: RunConfig, run: Components) -> None:
    """Apply the values in RUN_DIR/wanted.json, each second."""
    while True:
        await asyncio.sleep(LOOK_PERIOD_S)
        for name, setting in LIVE.items():
            if (num := read_wanted(run_dir, name, setting.range_of(config))) is not None:
                setting.apply(run, num)


def read_wanted(run_dir: Path, name: str, allowed: range) -> int | None:
    """Return the number in RUN_DIR/wanted.json, if there is one in range."""
    num = _read_all(run_dir).get(name)
    return num if isinstance(num, int) and num in allowed else None


def write_wanted(run_dir: Path, name: str, num: int) -> None:
    write_whole(run_dir / WANTED_FILE, json.dumps(_read_all(run_dir) | {name: num}) + "\n")


def _read_all(run_dir: Path) -> dict[str, object]:
    with contextlib.suppress(OSError, ValueError, TypeError):
        return dict(json.loads((run_dir / WANTED_FILE).read_text(encoding="utf-8")))
    return {}


def scale_run(run_dir: Path, asked: str) -> str:
    """Ask a run for NAME=N; return an answer for the user. Raises ConfigError."""
    name, _, text = asked.partition("=")
    if name not in LIVE:
        known = ", ".join(f"{known}=N" for known in LIVE)
        raise ConfigError(f"{asked!r} is not {known}", way_out="correct the name.")
    setting = LIVE[name]
    allowed = setting.range_of(read_config(run_dir))
    num = int(text) if text.isdecimal() else 0
    if num not in allowed:
        wider = setting.wider(max(num, allowed[-1]))
        again = run_again(run_dir, f"{setting.key}={wider}", "--allow-change", setting.key)
        raise ConfigError(
            f"{asked!r} is not {name}=N with N from {allowed[0]} to {allowed[-1]} ({setting.key})",
            rule=setting.rule,
            way_out=f"stop the run, and resume it with another {setting.key}: `{again}`.",
        )
    write_wanted(run_dir, name, num)
    return f"asked for {num} {name}; `asyncrl status {run_dir}` shows their progress"

"""`asyncrl sweep`: runs of a config with several values, one after another."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import quote

import yaml

from asyncrl.base.signals import blocked, handled, heard_stops
from asyncrl.config import load_any
from asyncrl.config.load import name_of_config
from asyncrl.observe.report_page import write_report

SAFE = "=,[] "
"""Characters of overrides that stay in the names of run directories."""


def sweep(
    config: str | Path,
    choices: Sequence[str],
    *,
    folder: str | Path | None = None,
    tell: Callable[[str], None] = print,
) -> int:
    """Run every combination of `choices`, such as "trainer.learning_rate=1e-5,3e-5", each
    in a directory in `folder`, and write a report that compares the runs. Return
    the exit code of the first run that failed.

    Runs that are done are not repeated, others are resumed. Raises ConfigError before the
    first run if a combination is invalid.
    """
    config = Path(config)
    folder = Path(folder or f"runs/sweep-{name_of_config(config)}")
    values = [values_of(choice) for choice in choices]
    fixed = [several[0] for several in values if len(several) == 1]
    varied = itertools.product(*(several for several in values if len(several) > 1))
    runs = {folder / quote(",".join(chosen), safe=SAFE): chosen for chosen in varied}
    for chosen in runs.values():
        loaded = load_any(config, [*fixed, *chosen])
    code = 0
    for number, (run_dir, chosen) in enumerate(runs.items(), start=1):
        tell(f"run {number} of {len(runs)}: {run_dir}")
        settings = [str(config), *fixed, *chosen]
        ended = _run(loaded.command, *settings, "--run-dir", str(run_dir))
        if ended > 128:
            tell("interrupted: the same command continues the sweep")
            return ended
        code = code or ended
    made = [run_dir for run_dir in runs if run_dir.is_dir()]
    for line in write_report(made, folder / "report.html") if made else ():
        tell(line)
    return code


def values_of(choice: str) -> list[str]:
    """Return an override for each value; commas within brackets and quotes stay.

    >>> values_of("trainer.betas=[0.9, 0.95],[0.9, 0.99]")
    ['trainer.betas=[0.9, 0.95]', 'trainer.betas=[0.9, 0.99]']
    """
    key, _, text = choice.partition("=")
    listed = f"[{text}]"
    try:
        nodes = getattr(yaml.compose(listed), "value", ())
    except yaml.YAMLError:
        nodes = ()  # the check of the config explains it
    places = [slice(node.start_mark.index, node.end_mark.index) for node in nodes]
    return [f"{key}={listed[place]}" for place in places] or [choice]


def _run(*arguments: str) -> int:
    """Run `asyncrl` with these arguments to its end, and pass signals on. Its session is
    its own: Ctrl-C in the terminal must reach it once, or it would not save.
    """
    command = [sys.executable, "-m", "asyncrl.cli", *arguments]
    numbers = heard_stops()

    def forward(number: int, frame: object) -> None:
        process.send_signal(number)

    with contextlib.ExitStack() as stack:
        # A signal must not come between the start and the handlers. The child unblocks
        # them itself (usual_signals).
        with blocked(numbers):
            process = subprocess.Popen(command, start_new_session=True)
            stack.enter_context(handled(numbers, forward))
        return abs(process.wait())

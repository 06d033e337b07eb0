"""The commands as Python functions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from asyncrl.base.signals import (
    handled,
    heard_stops,
    is_in_main_thread,
    usual_signals,
)
from asyncrl.config import RunConfig, load_config
from asyncrl.config.load import checked, name_of_config
from asyncrl.job.evaluate import evaluate as evaluate
from asyncrl.job.lifecycle import SentSignals, new_run_dir
from asyncrl.job.run_control import delete_run as delete_run
from asyncrl.job.run_control import stop_run as stop_run
from asyncrl.job.sweep import sweep as sweep
from asyncrl.launch.fork_server import serving
from asyncrl.observe.read_run import RunRecord, read_run
from asyncrl.observe.samples import ShownRollout
from asyncrl.observe.trackers import Callbacks


def run(
    config: str | Path | Mapping[str, Any] | RunConfig,
    overrides: Sequence[str] = (),
    *,
    run_dir: str | Path | None = None,
    resume: str = "auto",
    allow_change: Sequence[str] = (),
    on_step: Callable[[int, Mapping[str, float]], None] | None = None,
    on_evaluation: Callable[[int, Mapping[str, float]], None] | None = None,
    on_sample: Callable[[ShownRollout], None] | None = None,
    on_weights: Callable[[int, str], None] | None = None,
) -> RunRecord:
    """Train as `config` says, to the end or to Ctrl-C, and return the run's record.

    `config`: YAML file, mapping or RunConfig; `overrides`: settings such as
    "buffer.max_staleness=4". `run_dir`, `resume` and `allow_change` are the options of
    `asyncrl run`.

    Callbacks run in the run's loop and must return soon: on_step(step, metrics),
    on_evaluation(policy_version, metrics), on_sample(sample) per rollout of
    samples.jsonl, and on_weights(policy_version, digest) once every engine serves new
    weights. Their exceptions end the run with CallbackError; it can be resumed.
    `signal.raise_signal(signal.SIGINT)` ends it after the step, with a checkpoint.

    In a notebook or a running event loop, the run works in a thread; only the main
    thread receives signals. In a script, call it below `if __name__ == "__main__":`.
    Raises ConfigError before the start, or the AsyncrlError that ended the run, with
    all processes ended.
    """
    callbacks = Callbacks(
        {
            "on_step": on_step,
            "on_evaluation": on_evaluation,
            "on_sample": on_sample,
            "on_weights": on_weights,
        }
    )
    from asyncrl.job.loop import run_job

    if isinstance(config, str | Path):
        name, loaded = name_of_config(Path(config)), load_config(config, overrides)
    else:
        values = config.model_dump() if isinstance(config, RunConfig) else config
        name, loaded = "run", checked(RunConfig, values, overrides)
    folder = Path(run_dir or new_run_dir(name))
    signals = SentSignals()

    def train() -> None:
        with usual_signals(), serving():
            run_job(
                loaded,
                folder,
                name=name,
                resume=resume,
                allow_change=allow_change,
                callbacks=callbacks,
                signals=signals,
            )

    # A notebook's own loop is running, and a thread can run only one loop.
    if _is_in_loop():
        _run_in_thread(train, signals)
    else:
        train()
    return read_run(folder)


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _run_in_thread(train: Callable[[], None], signals: SentSignals) -> None:
    """Call `train` in a thread, and forward the main thread's signals."""

    # The run's thread gets no signals. So this handler passes them on.
    def forward(number: int, frame: object) -> None:
        signals.send(number)

    numbers = heard_stops() if is_in_main_thread() else ()
    pool = ThreadPoolExecutor(1, "asyncrl run")
    with handled(numbers, forward), pool:
        training = pool.submit(train)
        while not training.done():
            # a signal to another thread does not end a wait
            wait([training], timeout=1.0)
        training.result()

"""A run from Python: what `asyncrl run` does, as a function."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.config import RunConfig, load_config
from asyncrl.config.load import config_from, name_of_config
from asyncrl.errors import ConfigError
from asyncrl.job.life import new_run_dir
from asyncrl.job.resume import as_resume_mode
from asyncrl.observe.run_record import RunRecord, read_run
from asyncrl.observe.samples import ShownRollout
from asyncrl.observe.trackers.callbacks import Callbacks
from asyncrl.placement.fork_server import serving


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
    """Train as `config` says, to the end or to a Ctrl-C, and return what the run directory tells then.

    `config`: a YAML file, a mapping of the same form, or a RunConfig; `overrides`: settings that replace some
    of it, as on the command line: ["buffer.max_staleness=4"]. `run_dir`, `resume` and `allow_change` are the
    options of `asyncrl run`: the run in `run_dir` goes on where it stood, if there is one.

    Callbacks are called in the run's own loop, so return soon: on_step(step, metrics) after each step,
    on_evaluation(policy_version, metrics), on_sample(sample) for each rollout of samples.jsonl, and
    on_weights(policy_version, digest) when every engine serves new weights. One that raises ends the run,
    which can be resumed, with CallbackError; one that has not returned for 30 s is named on stderr. To end
    a run early, `signal.raise_signal(signal.SIGINT)`: it takes the step to its end and makes a checkpoint.

    Call it in the main thread, without a running event loop (a notebook has one: there, run the command),
    and in a script below `if __name__ == "__main__":`. Raises ConfigError for what is wrong before anything
    is started, and the AsyncrlError that ended the run; nothing that it started is left.
    """
    _refuse_place()
    callbacks = Callbacks(on_step, on_evaluation, on_sample, on_weights)
    from asyncrl.job.loop import run_job

    if isinstance(config, str | Path):
        name, loaded = name_of_config(Path(config)), load_config(config, overrides)
    else:
        values = config.model_dump() if isinstance(config, RunConfig) else config
        name, loaded = "run", config_from(values, overrides)
    folder = Path(run_dir or new_run_dir(name))
    mode = as_resume_mode(resume)
    with serving():
        run_job(loaded, folder, name=name, resume=mode, allow_change=allow_change, trackers=[callbacks])
    return read_run(folder)


def _refuse_place() -> None:
    """Signals and a loop of its own are what a run needs of its process."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        if threading.current_thread() is threading.main_thread():
            return
        where = "in a thread that is not the main one"
    else:
        where = "inside a running event loop, as a notebook has one"
    raise ConfigError(
        f"asyncrl.run was called {where}",
        rule="a run handles the signals of its process and has an event loop of its own",
        way_out="run the command there, `!asyncrl run CONFIG --run-dir DIR`, and read_run(DIR) beside it.",
    )

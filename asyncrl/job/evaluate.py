"""`asyncrl eval`: score a model on the held-out prompts of a config, without training."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.base.errors import ComponentError, ConfigError
from asyncrl.base.host import hide_memory
from asyncrl.base.progress import told_if_long
from asyncrl.base.user_code import run_loop
from asyncrl.config import RunConfig, load_config
from asyncrl.config.load import name_of_config
from asyncrl.engines.pool import EnginePool
from asyncrl.job.build import make_held_out
from asyncrl.job.check.config_check import check_everything
from asyncrl.job.lifecycle import Lifecycle, new_run_dir
from asyncrl.job.run_export import export_run
from asyncrl.job.serve import open_agents, opened_lifecycle, start_engines
from asyncrl.job.servers import make_scorers
from asyncrl.launch.fork_server import serving
from asyncrl.observe.run_dir import CONFIG_FILE, read_config

Scores = dict[str, Any]
"""An evaluation: its name, policy_version, num_prompts, interval_95, and the metrics of
eval/, such as reward_mean.
"""
NORMAL_95 = 1.96
"""Standard errors on each side of a mean that hold 95% of a normal distribution."""
OF_A_RUN = ("version", "seconds", "skipped", "abandoned")


def evaluate(
    target: str | Path, overrides: Sequence[str] = (), *, step: str | None = None
) -> list[Scores]:
    """Evaluate the model of a config file, or the weights of a run directory at a `step`
    (N, best or last), and return the scores of each evaluation.

    Prompts, seeds and sampling are those of the evaluations of a run. Raises ConfigError,
    the AsyncrlError that ended the evaluation, or KeyboardInterrupt after a signal.
    """
    target = Path(target)
    if target.is_dir():
        read_config(target)  # refuses a folder without a run
        config = load_config(target / CONFIG_FILE, overrides)
        if config.trainer.roles is not None:
            raise ConfigError(
                f"{target} has a policy for each role, and an evaluation loads one model",
                way_out="evaluate in the run, by its section eval; or export a role, and set model.path.",
            )
        # On the disk of the runs: the weights may be larger than /tmp.
        parent = target.resolve().parent
        with tempfile.TemporaryDirectory(prefix=".eval-", dir=parent) as folder:
            weights = Path(folder) / "weights"
            exported = export_run(target, weights, step=step or "last")
            own = {"path": str(weights), "scratch": None}
            model = config.model.model_copy(update=own)
            # The exported weights have the adapters.
            trainer = config.trainer.model_copy(update={"lora": None})
            config = config.model_copy(update={"model": model, "trainer": trainer})
            return _evaluate(config, target.resolve().name, exported["policy_version"])
    if step is not None:
        raise ConfigError(
            f"--step {step}, and {target} is a config",
            way_out="name a run directory, or omit --step and set model.path.",
        )
    return _evaluate(load_config(target, overrides), name_of_config(target), 0)


def _evaluate(config: RunConfig, name: str, version: object) -> list[Scores]:
    if not config.evals:
        raise ConfigError(
            "the config has no section eval",
            way_out="add it, such as 'eval={task: {files: [held_out.jsonl], reward: math}}'.",
        )
    hide_memory()
    scores = list[Scores]()
    folder = new_run_dir(f"eval-{name}")
    with serving(), opened_lifecycle(config, folder, name) as lifecycle:
        if run_loop(lifecycle.run(partial(_live, lifecycle, scores))) != 0:
            raise KeyboardInterrupt
    return [{"policy_version": version, **one} for one in scores]


async def _live(lifecycle: Lifecycle, scores: list[Scores]) -> int:
    """Add the scores of each evaluation."""
    config = lifecycle.config
    found = await check_everything(lifecycle)
    _, clients, tokenizer = await start_engines(lifecycle)
    pool = EnginePool(clients, slots=config.rollout.num_slots)
    agents = await open_agents(lifecycle, pool, tokenizer)
    make = partial(make_scorers, lifecycle, tokenizer)
    for held_out in make_held_out(config, pool, tokenizer, agents, found.evals, make):
        num_prompts = len(held_out.prompts)
        lifecycle.log.activity(f"sampling {num_prompts} prompts {held_out.name}")
        # The lines below have the number of samples, so the stage is not repeated.
        lifecycle.log.current_activity = ""
        num_samples = num_prompts * held_out.config.samples
        with told_if_long("sampled", num_samples) as work:
            # The engines have loaded the weights at their start, as version 0.
            result = await held_out.evaluate(0, work.count)
        if not result.samples:
            raise ComponentError("eval", f"no sample was scored: {result.last_failure}")
        scores.append(
            {"name": held_out.name, "num_prompts": num_prompts}
            | _shown(result.metrics())
        )
    return 0


def _shown(metrics: Mapping[str, float]) -> Scores:
    """Return the metrics of an evaluation outside a run, with the 95% interval of the
    reward.
    """
    shown: Scores = {name.removeprefix("eval/"): metrics[name] for name in metrics}
    for name in OF_A_RUN:
        del shown[name]
    mean = shown["reward_mean"]
    interval = None  # of one prompt
    if (error := shown.get("standard_error")) is not None:
        interval = [mean - NORMAL_95 * error, mean + NORMAL_95 * error]
    return {"reward_mean": mean, "interval_95": interval, **shown}

"""`asyncrl eval`: score a model on the held-out prompts of a config, without training."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.base.errors import ConfigError
from asyncrl.base.host import hide_memory
from asyncrl.base.user_code import run_loop
from asyncrl.config import RunConfig, TaskConfig, load_config
from asyncrl.config.load import name_of_config
from asyncrl.engines.pool import EnginePool
from asyncrl.job.build import make_held_out
from asyncrl.job.check import check_everything
from asyncrl.job.lifecycle import Lifecycle, new_run_dir
from asyncrl.job.run_export import export_run
from asyncrl.job.serve import open_agents, opened_lifecycle, start_engines
from asyncrl.launch.fork_server import serving
from asyncrl.observe.run_dir import CONFIG_FILE
from asyncrl.tasks.scorer import Scorers
from asyncrl.tasks.task import PromptTask

Scores = dict[str, Any]
"""An evaluation: name, policy_version, num_prompts, interval, and metrics eval/*."""
NORMAL_95 = 1.96
"""Standard errors on each side of a mean that hold 95% of a normal distribution."""


def evaluate(
    target: str | Path, overrides: Sequence[str] = (), *, step: str | None = None
) -> list[Scores]:
    """Evaluate the model of a config file, or the weights of a run directory at a `step`
    (N, best or last), and return the scores of each evaluation.

    Prompts, seeds and sampling are those of the evaluations of a run. Raises ConfigError,
    or the AsyncrlError that ended the evaluation.
    """
    target = Path(target)
    if not target.is_dir():
        if step is not None:
            raise ConfigError(
                f"--step {step}, and {target} is a config",
                rule="a step names weights of a run",
                way_out="name the run directory, or omit --step and set model.path.",
            )
        return _evaluate(load_config(target, overrides), name_of_config(target), 0)
    config = load_config(target / CONFIG_FILE, overrides)
    # On the disk of the runs: the weights may be larger than /tmp.
    parent = target.resolve().parent
    with tempfile.TemporaryDirectory(prefix=".eval-", dir=parent) as folder:
        weights = Path(folder) / target.resolve().name
        exported = export_run(target, weights, step=step or "last")
        own = {"path": str(weights), "scratch": None, "revision": None}
        model = config.model.model_copy(update=own)
        config = config.model_copy(update={"model": model})
        return _evaluate(config, weights.name, int(str(exported["policy_version"])))


def _evaluate(config: RunConfig, name: str, version: int) -> list[Scores]:
    if not config.evals:
        raise ConfigError(
            "the config has no evaluation",
            way_out="add a section `eval`, such as 'eval={task: {files: [held_out.jsonl], reward: math}}'.",
        )
    for task in (each.task for each in config.evals.values()):
        if task.reward_model or (task.judge and task.judge.is_served):
            raise ConfigError(
                f"{task.reward_name} of eval.task is served by a run",
                rule="`asyncrl eval` starts the trained model and no other",
                way_out="give the judge a base_url, or let the run evaluate.",
            )
    hide_memory()
    scores = list[Scores]()
    folder = new_run_dir(f"eval-{name}")
    with serving(), opened_lifecycle(config, folder, name) as lifecycle:
        if run_loop(lifecycle.run(partial(_live, lifecycle, version, scores))) != 0:
            raise KeyboardInterrupt
    return scores


async def _live(lifecycle: Lifecycle, version: int, scores: list[Scores]) -> int:
    """Add the scores of each evaluation."""
    config = lifecycle.config
    found = await check_everything(lifecycle)
    _, clients, tokenizer = await start_engines(lifecycle)
    pool = EnginePool(clients, slots=config.rollout.slots)
    agents = await open_agents(lifecycle, pool, tokenizer)

    def make_scorers(
        tasks: Mapping[str, PromptTask], settings: Mapping[str, TaskConfig], seed: int
    ) -> Scorers:
        warn = lifecycle.log.warn
        scorers = Scorers(tasks, settings, tokenizer, seed=seed, warn=warn)
        lifecycle.closes("rewards", scorers.aclose)
        return scorers

    for held_out in make_held_out(
        config, pool, tokenizer, agents, found.evals, make_scorers
    ):
        num_prompts = len(held_out.prompts)
        lifecycle.log.activity(f"evaluating {held_out.name} {num_prompts} prompts")
        # The engines have loaded the weights at their start, and call them version 0.
        metrics = (await held_out.evaluate(0)).metrics() | {"eval/version": version}
        interval = None
        if (error := metrics.get("eval/standard_error")) is not None:
            mean = metrics["eval/reward_mean"]
            interval = [mean - NORMAL_95 * error, mean + NORMAL_95 * error]
        facts = {
            "name": held_out.name,
            "policy_version": version,
            "num_prompts": num_prompts,
            "interval": interval,
        }
        scores.append(facts | metrics)
    return 0

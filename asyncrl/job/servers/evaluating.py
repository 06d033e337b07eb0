"""Evaluations of a run, on an eval engine or the rollout engines."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from asyncrl.base.errors import RoomError
from asyncrl.config import EvalConfig
from asyncrl.config.generation import EVAL_SEED
from asyncrl.engines.pool import EnginePool
from asyncrl.job.agent_runtime import make_generator
from asyncrl.job.life import Life
from asyncrl.observe.run_dir import read_evaluations
from asyncrl.observe.run_numbers import by_evaluation
from asyncrl.rollouts.evaluation import EvalResult, Evaluation, Evaluator, HeldOut
from asyncrl.rollouts.generators import HarnessGenerator
from asyncrl.rollouts.rollout import Generator, derive_seed
from asyncrl.tasks.from_config import EvalTask
from asyncrl.tasks.scorer import TaskScorer

if TYPE_CHECKING:
    from asyncrl.job.build import Parts


def make_evaluation(
    parts: Parts, job: Life, held_out: Mapping[str, EvalTask], on_result: Callable[[EvalResult], None]
) -> Evaluation:
    """Evaluate single completions or the run's own agent. A resumed run does not repeat evaluations;
    checkpoints also get the results that rank them.
    """
    config, scorers, made = job.config, list[TaskScorer](), list[HeldOut]()
    target = parts.eval_target
    engine = (
        parts.engines.counted_apart() if target is None else EnginePool([target], slots=config.eval_slots)
    )
    before = by_evaluation(read_evaluations(job.run_dir, []))
    for line in before.get(config.best_eval or "", []):
        parts.checkpoints.evaluated(line["policy_version"], line.get("eval/reward_mean", -math.inf))
    for name, settings in config.evals.items():
        (task, prompts), broken = held_out[name], list[RoomError]()
        scorers.append(TaskScorer(task, settings.task, seed=EVAL_SEED, warn=job.warn))
        job.closes("eval rewards", scorers[-1].aclose)
        versions = (line["policy_version"] for line in before.get(name, []))
        evaluator = Evaluator(
            _generator(parts, job, settings, engine, scorers[-1], broken),
            prompts,
            samples=settings.samples,
            slots=settings.slots,
            timeout_s=config.rollout.timeout_s,
            broken=broken,
        )
        made.append(
            HeldOut(
                name,
                evaluator,
                every=settings.every,
                last=config.trainer.num_steps,
                at_start=settings.at_start,
                timeout_s=settings.timeout_s,
                evaluated=max(versions, default=None),
            )
        )

    def evaluated(result: EvalResult) -> None:
        if result.name == config.best_eval:
            reward = result.metrics().get("eval/reward_mean", -math.inf)
            parts.checkpoints.evaluated(result.version, reward)
        num_abandoned = sum(scorer.num_abandoned for scorer in scorers)
        on_result(replace(result, num_abandoned_calls=num_abandoned))

    return Evaluation(
        made,
        target,
        parts.staging_dir,
        on_result=evaluated,
        on_trouble=job.warn,
        is_fetched=parts.files is not None,
    )


def _generator(
    parts: Parts,
    job: Life,
    settings: EvalConfig,
    engine: EnginePool,
    scorer: TaskScorer,
    broken: list[RoomError],
) -> Generator:
    config = job.config
    if parts.harnessing is None or not config.evaluates_agent:
        rollout = config.rollout.model_copy(update={"temperature": settings.temperature})
        sampling = config.model_copy(update={"seed": EVAL_SEED, "rollout": rollout})
        return make_generator(sampling, engine, parts.tokenizer, scorer, None)
    # the run's own harness and workers, with calls routed to the evaluating engine
    host = parts.harnessing.gateway.add_route(
        engine,
        temperature=settings.temperature,
        seed_of=_seed_of,
        on_broken=broken.append,
    )
    overflow = config.generator.on_overflow
    return HarnessGenerator(host, parts.harnessing.queue, scorer, on_overflow=overflow)


def _seed_of(prompt: str, sample: int, attempt: int, call: int) -> int:
    return derive_seed(EVAL_SEED, prompt, sample, call, attempt)

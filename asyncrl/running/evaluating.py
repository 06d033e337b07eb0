"""Builds the evaluation of a run over its eval engine: single completions, or rollouts of the run's own agent. Starts nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from asyncrl.checkpoint.checkpoints import Checkpoints
from asyncrl.config import EvalConfig, RunConfig
from asyncrl.engines import EngineClient, EnginePool
from asyncrl.errors import RoomError
from asyncrl.evaluation import EvalResult, Evaluation, Evaluator, FileHold, RunAgent, Schedule
from asyncrl.observe.run_files import read_evaluations
from asyncrl.producers.apart import AttemptsApart
from asyncrl.producers.harness import HarnessGenerator
from asyncrl.producers.seeds import derive_seed
from asyncrl.producers.tokenizer import HFChatTokenizer
from asyncrl.running.harnessing import Harnessing
from asyncrl.tasks.scorer import TaskScorer
from asyncrl.types import Prompt


def wire_evaluation(
    config: RunConfig,
    settings: EvalConfig,
    target: EngineClient,
    prompts: tuple[Prompt, ...],
    scorer: TaskScorer,
    tokenizer: HFChatTokenizer,
    staging_dir: Path,
    run_dir: Path,
    checkpoints: Checkpoints,
    *,
    harnessing: Harnessing | None,
    on_result: Callable[[EvalResult], None],
    warn: Callable[[str], None],
) -> Evaluation:
    """The evaluation, told of what was evaluated before the run was gone on with. `checkpoints` hear of each result, too."""
    rollout = config.rollout
    engine = EnginePool([target], slots=settings.slots)
    evaluator = Evaluator(
        engine, tokenizer, scorer, prompts, samples=settings.samples, slots=settings.slots,
        temperature=settings.temperature, max_tokens=rollout.max_tokens, max_prompt_tokens=rollout.max_prompt_tokens,
        stop=tuple(config.generator.stop), sample_timeout_s=rollout.timeout_s,
        seed_of=lambda prompt_id, sample: derive_seed(settings.seed, prompt_id, sample, turn=0),
        run_agent=None if harnessing is None or not config.evaluates_agent else _eval_agent(config, settings, harnessing, engine, scorer),
    )  # fmt: skip
    before = read_evaluations(run_dir, [])
    for line in before:
        checkpoints.evaluated(line["policy_version"], line.get("eval/reward_mean", -math.inf))
    newest = max((line["policy_version"] for line in before), default=None)

    def evaluated(result: EvalResult) -> None:
        checkpoints.evaluated(result.version, result.metrics().get("eval/reward_mean", -math.inf))
        on_result(replace(result, num_abandoned_calls=scorer.num_abandoned))

    schedule = Schedule(every=settings.every, last=config.trainer.num_steps, at_start=settings.at_start, evaluated=newest)
    return Evaluation(
        evaluator, target, schedule, FileHold(staging_dir), timeout_s=settings.timeout_s, on_result=evaluated, on_trouble=warn
    )


def _eval_agent(config: RunConfig, settings: EvalConfig, harnessing: Harnessing, engine: EnginePool, scorer: TaskScorer) -> RunAgent:
    """The run's own harness, in its own workers, with calls that go to the eval engine. It hands a rollout to who asks: none is trained."""

    def seed_of(prompt_id: str, sample_index: int, attempt: int, call_key: int) -> int:
        return derive_seed(settings.seed, prompt_id, sample_index, call_key, attempt)

    def on_broken(error: RoomError) -> None:
        attempts.on_broken(error)

    host = harnessing.gateway.lane("eval", engine, temperature=settings.temperature, seed_of=seed_of, on_broken=on_broken)
    generator = HarnessGenerator(host, harnessing.leases, scorer)
    attempts = AttemptsApart(generator, timeout_s=config.rollout.timeout_s)
    return attempts.run

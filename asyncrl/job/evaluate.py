"""Evaluations of a run, on an eval engine or the rollout engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from asyncrl.base.errors import RoomError
from asyncrl.config import RunConfig
from asyncrl.config.generation import EVAL_SEED
from asyncrl.engines.pool import EnginePool
from asyncrl.job.agent_runtime import AgentRuntime, make_generator
from asyncrl.job.lifecycle import Lifecycle
from asyncrl.rollouts.evaluation import HeldOut
from asyncrl.rollouts.generators import HarnessGenerator
from asyncrl.rollouts.rollout import Generator, derive_seed
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.tasks.from_config import EvalTask
from asyncrl.tasks.scorer import TaskScorer


def make_eval_sets(
    life: Lifecycle,
    held_out: Mapping[str, EvalTask],
    generator_of: Callable[[float, TaskScorer, list[RoomError]], Generator],
    earlier: Mapping[str, Sequence[Mapping[str, float]]],
) -> list[HeldOut]:
    """Return the evaluations of the config; those in `earlier` are not repeated. `generator_of` appends
    errors that end the evaluation to its list.
    """
    config = life.config
    sets = list[HeldOut]()
    for name, settings in config.evals.items():
        task, prompts = held_out[name]
        broken = list[RoomError]()
        scorer = TaskScorer(task, settings.task, seed=EVAL_SEED, warn=life.log.warn)
        life.closes("eval rewards", scorer.aclose)
        sets.append(
            HeldOut(
                generator=generator_of(settings.temperature, scorer, broken),
                prompts=prompts,
                samples=settings.samples,
                slots=settings.slots,
                name=name,
                every=settings.every,
                last=config.trainer.num_steps,
                at_start=settings.at_start,
                timeout_s=settings.timeout_s,
                rollout_timeout_s=config.rollout.timeout_s,
                broken=broken,
                evaluated=max((int(line["policy_version"]) for line in earlier.get(name, [])), default=None),
            )
        )
    return sets


def make_eval_generator(
    config: RunConfig,
    engine: EnginePool,
    tokenizer: HFChatTokenizer,
    harnessing: AgentRuntime | None,
    temperature: float,
    scorer: TaskScorer,
    broken: list[RoomError],
) -> Generator:
    """Return a generator of single completions, or of the run's agent."""
    if harnessing is None or not config.evaluates_agent:
        rollout = config.rollout.model_copy(update={"temperature": temperature})
        sampling = config.model_copy(update={"seed": EVAL_SEED, "rollout": rollout})
        return make_generator(sampling, engine, tokenizer, scorer, None)
    host = harnessing.gateway.add_route(
        engine, temperature=temperature, seed_of=_seed_of, on_broken=broken.append
    )
    return HarnessGenerator(host, harnessing.queue, scorer, on_overflow=config.generator.on_overflow)


def _seed_of(prompt: str, sample: int, attempt: int, call: int) -> int:
    return derive_seed(EVAL_SEED, prompt, sample, call, attempt)

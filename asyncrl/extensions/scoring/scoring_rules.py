"""The models that score in a run, and the settings that do not go with them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from asyncrl.config import RunConfig, TaskConfig
from asyncrl.config.run_config import key_of
from asyncrl.extensions.scoring.judge_config import JudgeConfig, JudgedReward
from asyncrl.extensions.scoring.reward_model_config import (
    ModelledReward,
    RewardModelConfig,
)
from asyncrl.extensions.scoring.settings import (
    JUDGE_DEVICE,
    REWARD_DEVICE,
    TEACHER,
    TEACHER_DEVICE,
)
from asyncrl.extensions.scoring.teacher_config import MOST_SERVED_TOP_K, TeacherConfig
from asyncrl.messages import tokens


def teachers(config: RunConfig) -> list[TeacherConfig]:
    given = TEACHER.of(config) or []
    return given if isinstance(given, list) else [given]


def judge_of(task: TaskConfig) -> JudgeConfig | None:
    return task.reward.judge if isinstance(task.reward, JudgedReward) else None


def model_of(task: TaskConfig) -> RewardModelConfig | None:
    return task.reward.model if isinstance(task.reward, ModelledReward) else None


def reward_models(config: RunConfig) -> list[RewardModelConfig]:
    """Return the distinct reward models of all tasks."""
    models = filter(None, map(model_of, config.all_tasks))
    return list(dict.fromkeys(models))


def served_judges(config: RunConfig) -> list[JudgeConfig]:
    """Return the distinct judges that the run serves."""
    judges = map(judge_of, config.all_tasks)
    return list(dict.fromkeys(judge for judge in judges if judge and judge.is_served))


def columns(config: RunConfig) -> Iterator[str]:
    if teachers(config):
        yield tokens.TEACHER


def refusals(config: RunConfig) -> Iterator[str]:
    """Yield the settings of several sections that do not go together."""
    yield from _teacher_conflicts(config)
    yield from _reward_conflicts(config)


def _teacher_conflicts(config: RunConfig) -> Iterator[str]:
    found = teachers(config)
    is_served = any(teacher.is_served for teacher in found)
    if not is_served and TEACHER_DEVICE.of(config.placement) != "auto":
        yield (
            "placement.teacher is for a teacher in a server of its own, without base_url and policy; set "
            "placement.teacher=auto"
        )
    # A single task is '' here, and may have a name.
    known = [name or task.called for name, task in config.tasks.items()]
    for name in chain.from_iterable(teacher.tasks or () for teacher in found):
        if name not in known:
            some = ", ".join(known)
            yield f"teacher.tasks has {name}, which is not a task; remove it, or name some of: {some}"
    for name in config.tasks if found else ():
        num = sum(teacher.scores(name) for teacher in found)
        if num != 1:
            key = key_of("task", name)
            yield f"{key} has {num} teachers; name each task in the teacher.tasks of one teacher"
    if any(teacher.policy for teacher in found) and config.rollout.engine != "embedded":
        yield (
            f"teacher.policy lets rollout engines score texts, which rollout.engine={config.rollout.engine} "
            "does not do; set rollout.engine=embedded, or set teacher.path in place of teacher.policy"
        )
    if any(teacher.policy for teacher in found) and config.trainer.roles is not None:
        yield (
            "teacher.policy is one policy, and trainer.roles has several; set teacher.path in place of "
            "teacher.policy, or trainer.lora in place of trainer.roles"
        )
    for name, generator in config.generators.items():
        has_prompt = any(one.prompt and one.scores(name) for one in found)
        if has_prompt and generator.is_harness:
            yield (
                f"teacher.prompt is for rollouts of one answer, and {key_of('task', name)} is of "
                f"{generator.called}, which writes its own prompts; remove teacher.prompt or that"
            )
    # vLLM computes prompt_logprobs before the temperature.
    is_embedded = all(teacher.is_embedded for teacher in found)
    if not is_embedded and config.rollout.temperature != 1:
        yield (
            f"vLLM reports a teacher's logprobs of temperature 1 only, not "
            f"rollout.temperature={config.rollout.temperature}; set rollout.temperature=1, or "
            "teacher.engine=embedded and no teacher.base_url"
        )
    if not is_embedded and config.algorithm.num_distill_ids > MOST_SERVED_TOP_K:
        yield (
            f"algorithm.distill_top_k={config.algorithm.distill_top_k} is above {MOST_SERVED_TOP_K}, the "
            "most that vLLM reports of a teacher; lower it, or set teacher.engine=embedded and no "
            "teacher.base_url"
        )


def _reward_conflicts(config: RunConfig) -> Iterator[str]:
    models = reward_models(config)
    judges = served_judges(config)
    served_keys = ("model", "engine", "max_length")
    for kind, found, keys in (
        ("model", models, (*RewardModelConfig.model_fields,)),
        ("judge", judges, served_keys),
    ):
        for key in keys:
            values = sorted({str(getattr(one, key)) for one in found})
            if len(values) > 1:
                yield (
                    f"task.reward.{kind}.{key} is {' and '.join(values)}; a run serves one {kind}: give "
                    "all tasks and evaluations that it serves the same"
                )
    if not judges and JUDGE_DEVICE.of(config.placement) != "auto":
        yield "placement.judge is for a judge without base_url; remove it"
    if not models and REWARD_DEVICE.of(config.placement) != "auto":
        yield "placement.reward is for a reward model; set task.reward.model, or placement.reward=auto"

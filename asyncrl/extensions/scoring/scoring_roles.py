"""Servers of teachers, judges and reward models."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from asyncrl.base.errors import EngineLost
from asyncrl.base.http import Caller
from asyncrl.config import ModelConfig, RunConfig
from asyncrl.engines.engine import EngineClient
from asyncrl.engines.kinds import (
    Body,
    OwnModel,
    Role,
    ServerMaker,
    ServerOrder,
    maker_of,
)
from asyncrl.engines.pool import EnginePool
from asyncrl.engines.role_client import Annotation, least_busy
from asyncrl.extensions.scoring.judge_config import JudgeConfig
from asyncrl.extensions.scoring.policy_teacher import ask_policy
from asyncrl.extensions.scoring.reward_client import RewardModelClient, find_label
from asyncrl.extensions.scoring.reward_model_config import (
    REWARD_BATCH_TOKENS,
    RewardModelConfig,
)
from asyncrl.extensions.scoring.scoring_rules import (
    judge_of,
    model_of,
    reward_models,
    served_judges,
    teachers,
)
from asyncrl.extensions.scoring.served_judge import ServedJudge
from asyncrl.extensions.scoring.settings import (
    JUDGE_DEVICE,
    REWARD_DEVICE,
    TEACHER_DEVICE,
)
from asyncrl.extensions.scoring.teacher import Scoring, ServedTeacher, Teacher
from asyncrl.extensions.scoring.teacher_config import (
    POLICY_SLOTS,
    TEACHER_SLOTS,
    TeacherConfig,
)
from asyncrl.extensions.scoring.teacher_prompt import TeacherPrompts
from asyncrl.launch.model_sizes import read_architecture
from asyncrl.messages.engine_api import ScoreRequest, ScoreResponse
from asyncrl.messages.worker_api import ChatTokenizer
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.tasks.scorer import ClientsOf

JUDGE = "judge"
REWARD = "reward"
TEACHER = "teacher"


def roles(config: RunConfig) -> Iterator[Role]:
    """Yield the roles in the order in which they choose devices."""
    found = teachers(config)
    for number, teacher in enumerate(found):
        name = f"{TEACHER}-{number}" if len(found) > 1 else TEACHER
        if not teacher.policy:
            yield _teacher_role(config, teacher, name)
    if judges := served_judges(config):
        yield _judge_role(config, judges)
    for model in reward_models(config):
        yield _reward_role(config, model)


# ---- teachers


def engine_role(config: RunConfig, role: Role) -> Role:
    """Let the rollout engines score texts, if one of the teachers is the policy."""
    if not any(teacher.policy for teacher in teachers(config)):
        return role
    return replace(role, score_slots=POLICY_SLOTS)


def teachings(
    config: RunConfig,
    engines: EnginePool,
    clients_of: ClientsOf,
    tokenizer: ChatTokenizer,
) -> Iterator[Annotation]:
    """Yield what each teacher adds to rollouts."""
    num_ids = 1 + max(tokenizer.vocabulary.values())
    for teacher in teachers(config):
        prompts = None
        if teacher.prompt is not None:
            prompts = TeacherPrompts(teacher.prompt, config, tokenizer)
        scoring = Scoring(
            temperature=config.rollout.temperature,
            top_k=config.algorithm.num_distill_ids,
            num_ids=num_ids,
            scores=teacher.scores,
            prompts=prompts,
            notes_version=teacher.policy,
        )
        copies = [one for one in clients_of(Teacher) if one.config == teacher]
        ask = ask_policy(engines) if teacher.policy else partial(_ask_server, copies)
        annotate = partial(scoring.annotate, ask)
        yield Annotation(annotate, by_group=scoring.reads_groups, gauges=scoring.gauges)


async def _ask_server(
    copies: Sequence[Teacher], request: ScoreRequest
) -> ScoreResponse:
    return await least_busy(copies).score(request)


def _teacher_role(config: RunConfig, teacher: TeacherConfig, name: str) -> Role:
    assert teacher.path is not None
    own = OwnModel(
        ModelConfig(path=teacher.path),
        "teacher.path",
        is_remote=teacher.base_url is not None,
        # vLLM samples one token behind each text.
        num_sampled=0 if teacher.is_embedded else 1,
    )

    def client(order: ServerOrder, caller: Caller) -> Teacher:
        return teacher_client(teacher, order.config, caller, order.on_lost)

    remote = remote_caller(teacher)
    return Role(
        name=name,
        maker=replace(maker_of(teacher.engine), client=client),
        engine=teacher.engine,
        model=own,
        slots=1 if teacher.is_embedded else TEACHER_SLOTS,
        score_slots=TEACHER_SLOTS if teacher.is_embedded else 0,
        max_length=config.rollout.max_length + own.num_sampled,
        key=TEACHER,
        device=TEACHER_DEVICE.of(config.placement),
        may_leave=True,
        url=remote.url,
        secret=remote.secret,
    )


def remote_caller(teacher: TeacherConfig) -> Caller:
    """Return the caller of base_url; of no address if the run serves the teacher."""
    url = (teacher.base_url or "").rstrip("/").removesuffix("/v1")
    return Caller(TEACHER, url, os.environ.get(teacher.key_variable or "", ""))


def teacher_client(
    teacher: TeacherConfig,
    config: RunConfig,
    caller: Caller,
    on_lost: Callable[[EngineLost], None] | None = None,
) -> Teacher:
    make = Teacher if teacher.is_embedded else ServedTeacher
    return make(
        caller,
        teacher,
        max_length=config.rollout.max_length,
        top_k=config.algorithm.num_distill_ids,
        on_lost=on_lost,
    )


# ---- a judge


def _judge_role(config: RunConfig, judges: Sequence[JudgeConfig]) -> Role:
    judge = judges[0]
    maker = maker_of(judge.engine)
    return Role(
        name=JUDGE,
        maker=replace(
            maker,
            spec=lambda order: maker.spec(_with_own_tokenizer(order)),
            client=partial(_judge_client, maker),
        ),
        engine=judge.engine,
        model=OwnModel(
            ModelConfig(path=judge.model),
            "task.reward.judge.model",
            reads_token_ids=False,
        ),
        slots=max(judge.max_concurrent for judge in judges),
        max_length=judge.max_length,
        key=JUDGE,
        device=JUDGE_DEVICE.of(config.placement),
        may_leave=True,
        serves_evals=any(judge_of(one.task) in judges for one in config.evals.values()),
    )


def _with_own_tokenizer(order: ServerOrder) -> ServerOrder:
    # The name of a special token in a completion stays text: it ends no turn.
    tokenizer = HFChatTokenizer(order.model_path, parse_special_tokens=False)
    return replace(order, tokenizer=tokenizer)


def _judge_client(
    maker: ServerMaker, order: ServerOrder, caller: Caller
) -> ServedJudge:
    order = _with_own_tokenizer(order)
    engine = maker.client(order, caller)
    assert isinstance(engine, EngineClient)
    return ServedJudge(
        engine,
        caller,
        order.tokenizer,
        places=order.role.slots,
        on_lost=order.on_lost,
    )


# ---- the reward model


def _reward_role(config: RunConfig, model: RewardModelConfig) -> Role:
    return Role(
        name=REWARD,
        maker=ServerMaker(
            "asyncrl_servers.scoring.reward_model",
            partial(_reward_spec, model),
            lambda order, caller: RewardModelClient(
                caller, model, on_lost=order.on_lost
            ),
        ),
        model=OwnModel(
            ModelConfig(path=model.path),
            "task.reward.model.path",
            reads_token_ids=False,
        ),
        batch_tokens=REWARD_BATCH_TOKENS,
        key=REWARD,
        device=REWARD_DEVICE.of(config.placement),
        may_leave=True,
        serves_evals=any(model_of(one.task) for one in config.evals.values()),
    )


def _reward_spec(model: RewardModelConfig, order: ServerOrder) -> Body:
    architecture = read_architecture(ModelConfig(path=str(order.model_path)))
    return {
        "name": order.name,
        "model_path": str(order.model_path),
        "dtype": order.config.model.dtype,
        "device": order.device.partition(":")[0],
        "threads": order.threads,
        "reads": model.reads,
        "label": find_label(model, architecture),
        "batch_tokens": REWARD_BATCH_TOKENS,
        "aside_dir": str(order.run_dir),
    }

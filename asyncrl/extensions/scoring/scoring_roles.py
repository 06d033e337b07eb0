"""Servers of teachers, judges and reward models."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from asyncrl.base.errors import EngineLost
from asyncrl.base.http import Caller
from asyncrl.config import RunConfig
from asyncrl.engines.kinds import ServerOrder, embedded_spec, maker_of
from asyncrl.extensions.scoring.reward_client import RewardModelClient, find_label
from asyncrl.extensions.scoring.reward_model_config import REWARD_BATCH_TOKENS
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
from asyncrl.extensions.scoring.teacher import ServedTeacher, Teacher
from asyncrl.extensions.scoring.teacher_config import TEACHER_SLOTS, TeacherConfig
from asyncrl.job.roles import Launch, Role, launch_of, own_model
from asyncrl.launch.placement import ExtraServer
from asyncrl.rollouts.tokenizer import HFChatTokenizer

JUDGE = "judge"
REWARD = "reward"
TEACHER = "teacher"


def roles(config: RunConfig) -> Iterator[Role]:
    """Yield the roles in the order in which they choose devices."""
    yield from _teacher_roles(config)
    yield Role(
        name=JUDGE,
        launch=_judge_launch,
        client=_judge_client,
        placement=_judge_placement,
        order=_judge_order,
    )
    yield Role(
        name=REWARD,
        launch=_reward_launch,
        client=_reward_client,
        placement=_reward_placement,
        order=lambda order: replace(order, is_rollout=False, group=None),
    )


# ---- teachers


def _teacher_roles(config: RunConfig) -> Iterator[Role]:
    found = teachers(config)
    for number, teacher in enumerate(found):
        yield Role(
            name=f"{TEACHER}-{number}" if len(found) > 1 else TEACHER,
            launch=partial(_teacher_launch, teacher),
            client=partial(_order_teacher, teacher),
            placement=partial(_teacher_placement, teacher),
            order=partial(_teacher_order, teacher),
        )


def _teacher_placement(teacher: TeacherConfig, config: RunConfig) -> ExtraServer:
    own = own_model(teacher.path, "teacher.path")
    return ExtraServer(
        key=TEACHER,
        written=TEACHER_DEVICE.of(config.placement),
        engine=teacher.engine,
        slots=TEACHER_SLOTS + 1,
        may_leave=True,
        model=replace(
            own,
            is_remote=teacher.base_url is not None,
            num_sampled=0 if teacher.is_embedded else 1,
        ),
    )


def _teacher_order(teacher: TeacherConfig, order: ServerOrder) -> ServerOrder:
    order = replace(order, is_rollout=False, serves_policy=False, slots=1, group=None)
    if teacher.is_embedded:
        return order
    # vLLM samples one token behind each text.
    return replace(order, slots=TEACHER_SLOTS, max_length=order.max_length + 1)


def remote_caller(teacher: TeacherConfig) -> Caller:
    assert teacher.base_url is not None
    url = teacher.base_url.rstrip("/").removesuffix("/v1")
    return Caller(TEACHER, url, os.environ.get(teacher.key_variable or "", ""))


def _teacher_launch(teacher: TeacherConfig, order: ServerOrder) -> Launch:
    if teacher.base_url is not None:
        remote = remote_caller(teacher)
        return Launch("", {}, url=remote.url, secret=remote.secret)
    if not teacher.is_embedded:
        return launch_of(order, teacher.engine)
    spec = embedded_spec(order) | {"score_slots": TEACHER_SLOTS}
    return Launch("asyncrl_servers.scoring.teacher_server", spec)


def _order_teacher(
    teacher: TeacherConfig, order: ServerOrder, caller: Caller
) -> Teacher:
    num_ids = 1 + max(order.tokenizer.vocabulary.values())
    return teacher_client(teacher, order.config, caller, order.on_lost, num_ids)


def teacher_client(
    teacher: TeacherConfig,
    config: RunConfig,
    caller: Caller,
    on_lost: Callable[[EngineLost], None] | None = None,
    num_ids: int = 2**31,
) -> Teacher:
    make = Teacher if teacher.is_embedded else ServedTeacher
    return make(
        caller,
        temperature=config.rollout.temperature,
        max_length=config.rollout.max_length,
        top_k=config.algorithm.num_distill_ids,
        num_ids=num_ids,
        scores=teacher.scores,
        on_lost=on_lost,
    )


# ---- a judge


def _judge_placement(config: RunConfig) -> ExtraServer | None:
    if not served_judges(config):
        return None
    judge = served_judges(config)[0]
    return ExtraServer(
        key="judge",
        written=JUDGE_DEVICE.of(config.placement),
        engine=judge.engine,
        slots=_judge_slots(config),
        max_length=judge.max_length,
        may_leave=True,
        serves_evals=any(
            judge_of(one.task) in served_judges(config) for one in config.evals.values()
        ),
        model=own_model(
            judge.model,
            "task.reward.judge.model",
            reads_token_ids=False,
        ),
    )


def _judge_slots(config: RunConfig) -> int:
    return max(judge.max_concurrent for judge in served_judges(config))


def _judge_order(order: ServerOrder) -> ServerOrder:
    return replace(
        order,
        is_rollout=False,
        serves_policy=False,
        slots=_judge_slots(order.config),
        max_length=served_judges(order.config)[0].max_length,
        # The name of a special token in a completion stays text: it ends no turn.
        tokenizer=HFChatTokenizer(order.model_path, parse_special_tokens=False),
        group=None,
    )


def _judge_launch(order: ServerOrder) -> Launch:
    return launch_of(order, served_judges(order.config)[0].engine)


def _judge_client(order: ServerOrder, caller: Caller) -> ServedJudge:
    tokenizer = order.tokenizer
    return ServedJudge(
        maker_of(served_judges(order.config)[0].engine).client(order, caller),
        caller,
        lambda text: tokenizer.encode(
            tokenizer.render([{"role": "user", "content": text}])
        ),
        tokenizer.decode,
        places=order.slots,
        on_lost=order.on_lost,
    )


# ---- the reward model


def _reward_placement(config: RunConfig) -> ExtraServer | None:
    if not reward_models(config):
        return None
    (model,) = reward_models(config)
    return ExtraServer(
        key="reward",
        written=REWARD_DEVICE.of(config.placement),
        model=own_model(model.path, "task.reward.model.path", reads_token_ids=False),
        batch_tokens=REWARD_BATCH_TOKENS,
        may_leave=True,
        serves_evals=any(model_of(one.task) for one in config.evals.values()),
    )


def _reward_launch(order: ServerOrder) -> Launch:
    (model,) = reward_models(order.config)
    text = (order.model_path / "config.json").read_text(encoding="utf-8")
    architecture = json.loads(text)
    spec = {
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
    return Launch("asyncrl_servers.scoring.reward_model", spec)


def _reward_client(order: ServerOrder, caller: Caller) -> RewardModelClient:
    (model,) = reward_models(order.config)
    return RewardModelClient(caller, model, on_lost=order.on_lost)

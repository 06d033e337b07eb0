"""The servers of a run, except its trainer: one row per role.

A server is always in one of these states:

    starting --serves--> up --loss--> ill --process ended--> restarting --serves--> up
        |                 |            |                         |
        +---- refused ----+------------+------ no restart -------+----> gone

    starting    FirstStart waits for the first answer, and the run waits for FirstStart.
    up          Rollouts, pushes and evaluations call it. Its supervisor waits for a loss: the process ends,
                is silent for observe.heartbeat_s, or breaks a call. A server on a device of the trainer is
                asleep in the trainer's time slice (job/colocate.py): its calls wait until the slice ends.
    ill         Calls end with EngineLost. Rollouts wait for another engine, or until this server is up.
    restarting  Its supervisor waits for the backoff, for free devices, for the start, and for the state of
                the old process, such as the served weights.
    gone        Nothing waits for it: it is parked, or the run continues without it, or the run ends.

A new role is a row here, its server, and a subclass of RoleClient; a run may have
several teachers, so each one is a row of its own (roles_of). Placement, `asyncrl
check`, supervision, status and metrics follow from the row.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from asyncrl.base.errors import ConfigError, EngineLost
from asyncrl.base.http import Caller, CallLost
from asyncrl.config import ModelConfig, RunConfig
from asyncrl.config.engine_kinds import ENGINES, EngineKind
from asyncrl.config.placement_config import ServerDevices, server_devices
from asyncrl.config.reward_model_config import REWARD_BATCH_TOKENS
from asyncrl.config.teacher_config import TEACHER_SLOTS, TeacherConfig
from asyncrl.engines.engine import EngineClient, ServerClient
from asyncrl.engines.kinds import Body, ServerOrder, embedded_spec, maker_of
from asyncrl.engines.reward_client import RewardModelClient, find_label
from asyncrl.engines.served_judge import ServedJudge
from asyncrl.engines.teacher import ServedTeacher, Teacher
from asyncrl.launch.machine import find_python
from asyncrl.launch.placement import ExtraServer, OwnModel
from asyncrl.rollouts.tokenizer import HFChatTokenizer

ENGINE = "engine"
EVAL_ENGINE = "engine-eval"
JUDGE = "judge"
REWARD = "reward"
TEACHER = "teacher"
REACH_S = 10.0
"""Limit for the answers of a server that others have started."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How a process starts. `start_factor`: multiple of supervision.start_timeout_s
    until it serves. `url`: others have started it, and its key is `secret`.
    """

    module: str
    spec: Body
    python: Callable[[], Path] | None = None
    start_factor: int = 1
    url: str = ""
    secret: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A role of servers. `name`: of its process; rollout engines add their number.

    `placement` returns what the role asks of the placement; None: the run has no such
    server. `order` turns a rollout engine's order into an order of this role. `launch`
    and `client` make the process and the client, which also asks its health. If that is
    a RoleClient, its judge() gets every rollout.
    """

    name: str
    launch: Callable[[ServerOrder], Launch]
    client: Callable[[ServerOrder, Caller], ServerClient]
    placement: Callable[[RunConfig], ExtraServer | None] = lambda _: None
    order: Callable[[ServerOrder], ServerOrder] = lambda order: order
    copy_of: str = ""
    """Role that has several servers, all with this value; they share its calls."""
    is_dispensable: bool = False
    """The run continues without a lost server; else it restarts, within
    supervision.max_restarts.
    """

    @property
    def shared_name(self) -> str:
        """Return the name that copies have in common."""
        return self.copy_of or self.name


def _own_model(
    path: str, revision: str | None, key: str, *, reads_token_ids: bool = True
) -> OwnModel:
    return OwnModel(ModelConfig(path=path, revision=revision), key, reads_token_ids)


# ---- rollout engines


def _engine_launch(order: ServerOrder) -> Launch:
    return _launch_of(order, order.config.rollout.engine)


def _launch_of(order: ServerOrder, kind: EngineKind) -> Launch:
    python = None
    if ENGINES[kind].package is not None:
        python = partial(find_python, order.config.rollout, kind)
    maker = maker_of(kind)
    return Launch(maker.module, maker.spec(order), python, maker.start_factor)


def _engine_client(order: ServerOrder, caller: Caller) -> EngineClient:
    return maker_of(order.config.rollout.engine).client(order, caller)


# ---- the eval engine


def _eval_placement(config: RunConfig) -> ExtraServer | None:
    if config.eval_engine == "rollout":
        return None
    # An agent's next turn finds the cache of its last one: a kept cache for each slot
    # (num_kept in engines/kinds.py).
    caches = 2 if config.keeps_turns else 1
    return ExtraServer(
        key="eval",
        written=config.placement.eval,
        is_optional=config.eval_engine == "auto",
        engine=config.rollout.engine,
        slots=caches * config.eval_slots,
        takes_weights=True,
        way_out="eval.engine=rollout",
    )


def _eval_order(order: ServerOrder) -> ServerOrder:
    # It reads weights from a file at its own times, so it joins no broadcast.
    return replace(order, is_rollout=False, slots=order.config.eval_slots, group=None)


# ---- teachers


def _teacher_roles(config: RunConfig) -> Iterator[Role]:
    teachers = config.teachers
    for number, teacher in enumerate(teachers):
        yield Role(
            name=f"{TEACHER}-{number}" if len(teachers) > 1 else TEACHER,
            launch=partial(_teacher_launch, teacher),
            client=partial(_order_teacher, teacher),
            placement=partial(_teacher_placement, teacher),
            order=partial(_teacher_order, teacher),
        )


def _teacher_placement(teacher: TeacherConfig, config: RunConfig) -> ExtraServer:
    own = _own_model(teacher.path, teacher.revision, "teacher.path")
    return ExtraServer(
        key=TEACHER,
        written=config.placement.teacher,
        engine=teacher.engine,
        slots=TEACHER_SLOTS + 1,
        offload=teacher.offload,
        offload_key="teacher.offload",
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
    # /v1/completions samples one token behind each text.
    return replace(order, slots=TEACHER_SLOTS, max_length=order.max_length + 1)


def _remote_caller(teacher: TeacherConfig) -> Caller:
    assert teacher.base_url is not None
    url = teacher.base_url.rstrip("/").removesuffix("/v1")
    return Caller(TEACHER, url, os.environ.get(teacher.key_variable or "", ""))


def _teacher_launch(teacher: TeacherConfig, order: ServerOrder) -> Launch:
    if teacher.base_url is not None:
        remote = _remote_caller(teacher)
        return Launch("", {}, url=remote.url, secret=remote.secret)
    if not teacher.is_embedded:
        return _launch_of(order, teacher.engine)
    spec = embedded_spec(order) | {"score_slots": TEACHER_SLOTS}
    return Launch("asyncrl_servers.embedded", spec)


def _order_teacher(
    teacher: TeacherConfig, order: ServerOrder, caller: Caller
) -> Teacher:
    num_ids = 1 + max(order.tokenizer.vocabulary.values())
    return _teacher_client(teacher, order.config, caller, order.on_lost, num_ids)


def _teacher_client(
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


def reach_servers(config: RunConfig) -> list[str]:
    """Try the servers that others have started; return what `asyncrl check` prints.
    Blocks. Raises ConfigError.
    """
    lines = list[str]()
    for teacher in config.teachers:
        if teacher.base_url is not None:
            asyncio.run(_reach(teacher, config))
            lines.append(f"{TEACHER}: {teacher.path} at {teacher.base_url} answers")
    return lines


async def _reach(teacher: TeacherConfig, config: RunConfig) -> None:
    caller = _remote_caller(teacher)
    try:
        await _teacher_client(teacher, config, caller).ready(REACH_S)
    except CallLost as lost:
        raise ConfigError(
            f"teacher.base_url={teacher.base_url} cannot be reached: {lost}",
            way_out="start the server, or correct teacher.base_url.",
        ) from lost
    finally:
        await caller.aclose()


# ---- a judge


def _judge_placement(config: RunConfig) -> ExtraServer | None:
    if not config.served_judges:
        return None
    judge = config.served_judges[0]
    return ExtraServer(
        key="judge",
        written=config.placement.judge,
        engine=judge.engine,
        slots=_judge_slots(config),
        max_length=judge.max_length,
        offload=judge.offload,
        offload_key="task.reward.judge.offload",
        serves_evals=any(
            one.task.judge in config.served_judges for one in config.evals.values()
        ),
        model=_own_model(
            judge.model,
            judge.revision,
            "task.reward.judge.model",
            reads_token_ids=False,
        ),
    )


def _judge_slots(config: RunConfig) -> int:
    return max(judge.max_concurrent for judge in config.served_judges)


def _judge_order(order: ServerOrder) -> ServerOrder:
    return replace(
        order,
        is_rollout=False,
        serves_policy=False,
        slots=_judge_slots(order.config),
        max_length=order.config.served_judges[0].max_length,
        # The name of a special token in a completion stays text: it ends no turn.
        tokenizer=HFChatTokenizer(order.model_path, parse_special_tokens=False),
        group=None,
    )


def _judge_launch(order: ServerOrder) -> Launch:
    return _launch_of(order, order.config.served_judges[0].engine)


def _judge_client(order: ServerOrder, caller: Caller) -> ServedJudge:
    tokenizer = order.tokenizer
    return ServedJudge(
        maker_of(order.config.served_judges[0].engine).client(order, caller),
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
    if not config.reward_models:
        return None
    (model,) = config.reward_models
    return ExtraServer(
        key="reward",
        written=config.placement.reward,
        model=_own_model(
            model.path, model.revision, "task.reward.model.path", reads_token_ids=False
        ),
        batch_tokens=REWARD_BATCH_TOKENS,
        offload=model.offload,
        offload_key="task.reward.model.offload",
        serves_evals=any(one.task.reward_model for one in config.evals.values()),
    )


def _reward_launch(order: ServerOrder) -> Launch:
    (model,) = order.config.reward_models
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
    return Launch("asyncrl_servers.reward_model", spec)


def _reward_client(order: ServerOrder, caller: Caller) -> RewardModelClient:
    (model,) = order.config.reward_models
    return RewardModelClient(caller, model, on_lost=order.on_lost)


_ROWS = (
    Role(name=ENGINE, launch=_engine_launch, client=_engine_client),
    Role(
        name=EVAL_ENGINE,
        launch=_engine_launch,
        client=_engine_client,
        placement=_eval_placement,
        order=_eval_order,
        is_dispensable=True,
    ),
    Role(
        name=JUDGE,
        launch=_judge_launch,
        client=_judge_client,
        placement=_judge_placement,
        order=_judge_order,
    ),
    Role(
        name=REWARD,
        launch=_reward_launch,
        client=_reward_client,
        placement=_reward_placement,
        order=lambda order: replace(order, is_rollout=False, group=None),
    ),
)
ROLES = {role.name: role for role in _ROWS}
"""Roles that a run has once, or not at all."""


def roles_of(config: RunConfig) -> dict[str, Role]:
    """Return the roles of a run by name, in the order in which they choose devices."""
    rows = [*ROLES.values()]
    rows[2:2] = _teacher_roles(config)
    return {copy.name: copy for role in rows for copy in _copies(role, config)}


def _copies(role: Role, config: RunConfig) -> list[Role]:
    """Return a row for each device of a role, whose copies share its calls."""
    server = role.placement(config)
    devices = None if server is None else server_devices(server.written)
    if server is None or server.is_remote or devices is None:
        return [role]

    def on(device: ServerDevices) -> Callable[[RunConfig], ExtraServer]:
        return lambda _: replace(server, written=device)

    if len(devices) == 1:
        return [replace(role, placement=on(devices[0]))]
    return [
        replace(
            role,
            name=f"{role.name}-{number}",
            copy_of=role.name,
            placement=on(device),
        )
        for number, device in enumerate(devices)
    ]


def extra_servers(config: RunConfig) -> dict[str, ExtraServer]:
    """Return what the placement must find a device for, besides trainer and rollout
    engines.
    """
    wanted = {name: role.placement(config) for name, role in roles_of(config).items()}
    return {name: server for name, server in wanted.items() if server is not None}


def extra_models(config: RunConfig) -> dict[str, OwnModel]:
    """Return the models of roles that do not serve the trained one, and the critic's."""
    roles = roles_of(config)
    found = {
        roles[name].shared_name: server.model
        for name, server in extra_servers(config).items()
        if server.model is not None
    }
    critic = config.critic
    if critic is not None and critic.path is not None:
        found["critic"] = _own_model(critic.path, critic.revision, "critic.path")
    return found

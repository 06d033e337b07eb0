"""The servers of a run, except its trainer: one row per role.

A server is always in one of these states:

    starting --serves--> up --loss--> ill --process ended--> restarting --serves--> up
        |                 |            |                         |
        +---- refused ----+------------+------ no restart -------+----> gone

    starting    FirstStart waits for the first answer, and the run waits for FirstStart.
    up          Rollouts, pushes and evaluations call it. Its supervisor waits for a loss: the process ends,
                is silent for observe.heartbeat_s, or breaks a call.
    ill         Calls end with EngineLost. Rollouts wait for another engine, or until this server is up.
    restarting  Its supervisor waits for the backoff, for free devices, for the start, and for the state of
                the old process, such as the served weights.
    gone        Nothing waits for it: it is parked, or the run continues without it, or the run ends.

A new role is a row here, its server, and a subclass of RoleClient. Placement, `asyncrl
check`, supervision, status and metrics follow from the row.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from asyncrl.base.http import Caller
from asyncrl.config import ModelConfig, RunConfig
from asyncrl.config.engine_kinds import ENGINES, EngineKind
from asyncrl.config.reward_model_config import REWARD_BATCH_TOKENS
from asyncrl.config.teacher_config import TEACHER_SLOTS
from asyncrl.engines.engine import EngineClient, ServerClient
from asyncrl.engines.kinds import KINDS, Body, ServerOrder, embedded_spec
from asyncrl.engines.reward_client import RewardModelClient, find_label
from asyncrl.engines.served_judge import ServedJudge
from asyncrl.engines.teacher import Teacher
from asyncrl.launch.machine import find_python
from asyncrl.launch.placement import ExtraServer, OwnModel
from asyncrl.rollouts.tokenizer import HFChatTokenizer

ENGINE = "engine"
EVAL_ENGINE = "engine-eval"
JUDGE = "judge"
REWARD = "reward"


@dataclass(frozen=True, slots=True)
class Launch:
    """How a process starts. `start_factor`: multiple of supervision.start_timeout_s
    until it serves.
    """

    module: str
    spec: Body
    python: Callable[[], Path] | None = None
    start_factor: int = 1


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
    is_dispensable: bool = False
    """The run continues without a lost server; else it restarts, within
    supervision.max_restarts.
    """


def _own_model(
    path: str, revision: str | None, key: str, *, reads_token_ids: bool = True
) -> OwnModel:
    return OwnModel(ModelConfig(path=path, revision=revision), key, reads_token_ids)


# ---- rollout engines


def _engine_launch(order: ServerOrder) -> Launch:
    return _launch_of(order, order.config.rollout.engine)


def _launch_of(order: ServerOrder, kind: EngineKind) -> Launch:
    package = ENGINES[kind].package
    python = None
    if package is not None:
        python = partial(find_python, order.config.rollout, package)
    maker = KINDS[kind]
    return Launch(
        f"asyncrl_servers.{kind}", maker.spec(order), python, maker.start_factor
    )


def _engine_client(order: ServerOrder, caller: Caller) -> EngineClient:
    return KINDS[order.config.rollout.engine].client(order, caller)


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


# ---- the teacher


def _teacher_placement(config: RunConfig) -> ExtraServer | None:
    if config.teacher is None:
        return None
    return ExtraServer(
        key="teacher",
        written=config.placement.teacher,
        engine="embedded",
        slots=TEACHER_SLOTS + 1,
        model=_own_model(config.teacher.path, config.teacher.revision, "teacher.path"),
    )


def _teacher_launch(order: ServerOrder) -> Launch:
    spec = embedded_spec(order) | {"num_kept": 0, "score_slots": TEACHER_SLOTS}
    return Launch("asyncrl_servers.embedded", spec)


def _teacher_client(order: ServerOrder, caller: Caller) -> Teacher:
    return Teacher(
        caller, temperature=order.config.rollout.temperature, on_lost=order.on_lost
    )


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
        KINDS[order.config.served_judges[0].engine].client(order, caller),
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
        name="teacher",
        launch=_teacher_launch,
        client=_teacher_client,
        placement=_teacher_placement,
        order=lambda order: replace(order, is_rollout=False, slots=1, group=None),
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
"""In the order in which they choose devices."""


def extra_servers(config: RunConfig) -> dict[str, ExtraServer]:
    """Return what the placement must find a device for, besides trainer and rollout
    engines.
    """
    wanted = {name: role.placement(config) for name, role in ROLES.items()}
    return {name: server for name, server in wanted.items() if server is not None}


def extra_models(config: RunConfig) -> dict[str, OwnModel]:
    """Return the models of roles that do not serve the trained one, and the critic's."""
    found = {
        name: server.model
        for name, server in extra_servers(config).items()
        if server.model is not None
    }
    critic = config.critic
    if critic is not None and critic.path is not None:
        found["critic"] = _own_model(critic.path, critic.revision, "critic.path")
    return found

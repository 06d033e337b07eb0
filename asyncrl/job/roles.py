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

A new role is a row here or in an extension, its server, and a subclass of RoleClient.
Placement, `asyncrl check`, supervision, status and metrics follow from the row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from asyncrl.base.extensions import all_of
from asyncrl.base.http import Caller
from asyncrl.config import ModelConfig, RunConfig
from asyncrl.config.device_forms import ServerDevices, server_devices
from asyncrl.config.engine_kinds import ENGINES, EngineKind
from asyncrl.engines.engine import EngineClient, ServerClient
from asyncrl.engines.kinds import Body, ServerOrder, maker_of
from asyncrl.launch.machine import find_python
from asyncrl.launch.placement import ExtraServer, OwnModel

ENGINE = "engine"
EVAL_ENGINE = "engine-eval"


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
    a RoleClient, its annotate() gets every rollout.
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


def own_model(path: str, key: str, *, reads_token_ids: bool = True) -> OwnModel:
    return OwnModel(ModelConfig(path=path), key, reads_token_ids)


# ---- rollout engines


def _engine_launch(order: ServerOrder) -> Launch:
    return launch_of(order, order.config.rollout.engine)


def launch_of(order: ServerOrder, kind: EngineKind) -> Launch:
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
)
ROLES = {role.name: role for role in _ROWS}
"""The core's roles: a run has each one once, or not at all."""


def roles_of(config: RunConfig) -> dict[str, Role]:
    """Return the roles of a run by name, in the order in which they choose devices."""
    rows = [*ROLES.values(), *all_of("roles", config)]
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
        found["critic"] = own_model(critic.path, "critic.path")
    return found

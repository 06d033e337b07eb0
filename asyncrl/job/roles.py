"""The servers of a run besides its trainer and rollout engines: one row per role.

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

A new role is a row of an extension, its server, and a subclass of RoleClient. Placement,
`asyncrl check`, supervision, status and metrics follow from the row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from asyncrl.base.extensions import all_of
from asyncrl.config import ModelConfig, RunConfig
from asyncrl.config.device_forms import server_devices
from asyncrl.engines.kinds import OwnModel, Role, sampling_role

EVAL_ENGINE = "engine-eval"


def _eval_role(config: RunConfig) -> Iterator[Role]:
    if config.eval_engine != "rollout":
        yield replace(
            sampling_role(config),
            name=EVAL_ENGINE,
            slots=config.eval_slots,
            is_rollout=False,
            key="eval",
            device=config.placement.eval,
            is_optional=config.eval_engine == "auto",
            way_out="eval.engine=rollout",
        )


def extra_servers(config: RunConfig) -> dict[str, Role]:
    """Return the servers besides trainer and rollout engines, in the order in which they
    choose devices.
    """
    roles = [*_eval_role(config), *all_of("roles", config)]
    return {copy.name: copy for role in roles for copy in _copies(role)}


def _copies(role: Role) -> list[Role]:
    """Return the servers of a role: a server for each device. They share its calls."""
    devices = server_devices(role.device)
    assert devices is not None, "its setting has been checked"
    if role.url:
        return [role]
    if len(devices) == 1:
        return [replace(role, device=devices[0])]
    return [
        replace(role, name=f"{role.name}-{number}", copy_of=role.name, device=device)
        for number, device in enumerate(devices)
    ]


def extra_models(config: RunConfig) -> dict[str, OwnModel]:
    """Return the models of roles that do not serve the trained one, and the critic's."""
    found = {
        role.shared_name: role.model
        for role in extra_servers(config).values()
        if role.model is not None
    }
    critic = config.critic
    if critic is not None and critic.path is not None:
        model = ModelConfig(path=critic.path)
        found["critic"] = OwnModel(model, "critic.path")
    return found

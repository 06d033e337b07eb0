"""Engines that hold the adapters of many samplers, and score prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asyncrl.config import RunConfig
from asyncrl.engines.kinds import Role, ServerOrder
from asyncrl.extensions.tinker.tinker_config import ServedRun

READ_SLOTS = 8
"""Prompts that an engine scores at once."""


def engine_role(config: RunConfig, role: Role) -> Role:
    if not isinstance(config, ServedRun):
        return role
    plain = role.maker.spec

    def spec(order: ServerOrder) -> dict[str, Any]:
        more = {"max_adapters": config.max_sampled, "score_slots": READ_SLOTS}
        return {**plain(order), **more}

    return replace(role, maker=role.maker._replace(spec=spec), read_slots=READ_SLOTS)

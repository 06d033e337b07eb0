"""Engines that hold the adapters of many samplers, and score prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asyncrl.config import RunConfig
from asyncrl.engines.kinds import Role, ServerOrder
from asyncrl.extensions.tinker.tinker_config import ServedRun

SCORE_SLOTS = 8
"""Prompts that an engine scores at once."""


def engine_role(config: RunConfig, role: Role) -> Role:
    if not isinstance(config, ServedRun):
        return role
    plain = role.maker

    def spec(order: ServerOrder) -> dict[str, Any]:
        return {**plain.spec(order), "max_adapters": config.max_sampled}

    maker = replace(plain, spec=spec)
    return replace(role, maker=maker, score_slots=SCORE_SLOTS)

"""Follow the engines' KV caches with the number of running rollouts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.config import RolloutConfig
from asyncrl.engines.pool import EnginePool
from asyncrl.launch.supervise import Server
from asyncrl.messages.engine_api import EngineHealth
from asyncrl.rollouts.pressure import SlotsRule
from asyncrl.rollouts.rollout import Slots

logger = logging.getLogger(__name__)
LOOK_PERIOD_S = 1.0
"""The heartbeat's period: there is no newer health."""


def kv_wanted(health: EngineHealth) -> float:
    """Return the part of the KV cache that running and queued sequences want.

    Example: 30 sequences run in 0.9 of the cache, and 10 wait for room: 1.2.
    """
    num_wanted = health.num_running + health.num_queued
    return health.kv_fraction * num_wanted / max(1, health.num_running)


@dataclass(eq=False)
class SlotsByPressure:
    """Resize the slots after each look at the engines' last heartbeats.

    Waits: follow sleeps between two looks. It ends with the run.
    """

    servers: Sequence[Server]
    pool: EnginePool
    slots: Slots
    rule: SlotsRule

    def gauges(self) -> dict[str, float]:
        return {"rollout/slots": self.slots.capacity}

    def resize_nowait(self, num_engines: int) -> None:
        self.slots.resize_nowait(self.rule.current * num_engines)

    async def follow(self) -> None:
        while True:
            await asyncio.sleep(LOOK_PERIOD_S)
            self.look_nowait()

    def look_nowait(self) -> None:
        healths = healths_of(self.servers, self.pool)
        # Asleep engines have empty caches. Nothing is learned from them.
        if not healths or any(health.asleep for health in healths):
            return
        wanted = max(map(kv_wanted, healths))
        slots = self.slots
        old = slots.capacity
        self.rule.look(len(healths), wanted, slots.num_held, slots.num_ended)
        self.resize_nowait(len(healths))
        if old != slots.capacity:
            logger.info(
                "%d instead of %d rollouts may sample (%.0f%% of the KV cache wanted)",
                slots.capacity,
                old,
                100 * wanted,
            )


def healths_of(servers: Sequence[Server], pool: EnginePool) -> list[EngineHealth]:
    """Return the last heartbeats of the engines that get work."""
    down = pool.down
    return [
        server.health
        for server in servers
        if server.name not in down and isinstance(server.health, EngineHealth)
    ]


def make_pressure(
    rollout: RolloutConfig, servers: Sequence[Server], pool: EnginePool, slots: Slots
) -> SlotsByPressure | None:
    """Return None if rollout.slots is a number. Begin with the rollouts that fit at full
    length into the smallest KV cache.
    """
    if rollout.slots != "auto":
        return None
    most = rollout.num_slots
    length = rollout.facts.kv_length(rollout.max_length)
    healths = healths_of(servers, pool)
    fitting = [health.kv_tokens // length for health in healths if health.kv_tokens]
    rule = SlotsRule(max(1, min(fitting, default=most)), most)
    pressure = SlotsByPressure(servers, pool, slots, rule)
    pressure.resize_nowait(len(healths))
    return pressure

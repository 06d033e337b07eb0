"""Builds every room of a run and hands each the others' Protocols; closes them in the opposite order."""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from asyncrl import startup
from asyncrl.buffer.buffer import Buffer
from asyncrl.config import RunConfig
from asyncrl.engines.pool import EnginePool
from asyncrl.engines.server import EngineServer
from asyncrl.placement.staging import clear_stale_staging, new_staging_dir
from asyncrl.producers.producers import Producers, Spawn
from asyncrl.producers.rollout import RolloutRunner
from asyncrl.producers.single_turn import SingleTurn
from asyncrl.producers.tokenizer import HFChatTokenizer
from asyncrl.publisher.publisher import Publisher
from asyncrl.tasks.build import build_task
from asyncrl.tasks.feed import Feed
from asyncrl.tasks.scorer import TaskScorer
from asyncrl.trainer.client import TrainerClient
from asyncrl.types import Group, GroupId

logger = logging.getLogger("asyncrl.wiring")

CLOSE_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class Rooms:
    """Everything that lives as long as the run."""

    servers: tuple[startup.Server, ...]
    buffer: Buffer
    producers: Producers
    engines: EnginePool
    trainer: TrainerClient
    publisher: Publisher


async def close_within(timeout_s: float, name: str, close: Callable[[], Awaitable[None]]) -> None:
    """Close one thing, shielded from our own cancellation and bounded in time. Late or failed is logged, never raised.

    A cancellation that comes meanwhile (the first Ctrl-C, while a run that is done closes) passes once it is closed.
    """
    closing = asyncio.ensure_future(close())
    try:
        await asyncio.wait({closing}, timeout=timeout_s)
    except asyncio.CancelledError:
        await asyncio.wait({closing}, timeout=timeout_s)
        raise
    finally:
        if not closing.done():
            closing.cancel()
            logger.warning("closing %s took longer than %s s and was given up", name, timeout_s)
        elif not closing.cancelled() and (error := closing.exception()) is not None:
            logger.warning("closing %s failed: %s", name, error)


async def open_rooms(config: RunConfig, run_dir: Path, stack: AsyncExitStack, *, spawn: Spawn, tell: Callable[[str], None]) -> Rooms:
    """Start the processes and build the rooms; `stack` closes them. `tell` is told in words what is being waited for.

    Raises AsyncrlError with nothing left behind once `stack` is closed.
    """

    def closes(name: str, close: Callable[[], Awaitable[None]]) -> None:
        stack.push_async_callback(close_within, CLOSE_TIMEOUT_S, name, close)

    for folder in clear_stale_staging():
        logger.info("removed %s, which a run that was killed had left", folder)
    tell("reading the task")
    task = await startup.in_daemon_thread(lambda: build_task(config.task, config.seed))
    feed = Feed(task, seed=config.seed, shuffle=config.task.shuffle, system_prompt=config.task.system_prompt)
    scorer = TaskScorer(task, config.task, seed=config.seed)
    closes("rewards", scorer.aclose)
    tell("making the model" if config.model.scratch else "finding the model")
    model_path = await startup.make_model_folder(config, run_dir)
    staging_dir = new_staging_dir()
    stack.callback(shutil.rmtree, staging_dir, ignore_errors=True)
    trainer_server, engine_servers = startup.make_servers(config, model_path, run_dir, staging_dir, secrets.token_urlsafe(32))
    servers = (trainer_server, *engine_servers)
    for server in servers:
        closes(server.child.name, server.aclose)
        await startup.start(server)
    tokenizer = await startup.in_daemon_thread(lambda: HFChatTokenizer(model_path, chat_template=config.model.chat_template))
    for server in servers:
        tell(f"loading the model in {server.child.name}")
        await startup.wait_ready(server)
    return _wire(config, servers, feed, scorer, tokenizer, spawn)


def _wire(
    config: RunConfig, servers: tuple[startup.Server, ...], feed: Feed, scorer: TaskScorer, tokenizer: HFChatTokenizer, spawn: Spawn
) -> Rooms:
    rollout, trainer_config = config.rollout, config.trainer
    trainer = TrainerClient(servers[0].caller, timeout_s=trainer_config.timeout_s)
    targets = [EngineServer(server.caller) for server in servers[1:]]
    engines = EnginePool(targets, slots=rollout.slots)

    def handed_back(group_id: GroupId, group: Group | None, reason: str) -> None:
        producers.handed_back(group_id, group, reason)

    buffer = Buffer(config.buffer, num_groups=trainer_config.num_groups, num_batches=trainer_config.num_steps, on_handed_back=handed_back)
    generator = SingleTurn(
        engines, tokenizer, scorer, run_seed=config.seed, max_tokens=rollout.max_tokens,
        max_prompt_tokens=rollout.max_prompt_tokens, temperature=rollout.temperature, stop=tuple(config.generator.stop),
    )  # fmt: skip
    producers = Producers(
        buffer, feed, RolloutRunner(generator, timeout_s=rollout.timeout_s, retries=rollout.retries), spawn=spawn,
        group_size=rollout.group_size, capacity=rollout.slots * rollout.num_engines, max_failed_groups=rollout.max_failed_groups,
    )  # fmt: skip
    publisher = Publisher(
        trainer, targets, interrupt=config.publisher.interrupt, timeout_s=config.publisher.timeout_s,
        on_served=buffer.set_served_nowait,
    )  # fmt: skip
    return Rooms(servers, buffer, producers, engines, trainer, publisher)

"""Builds every room of a run and hands each the others' Protocols; closes them in the opposite order."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from asyncrl.agents.verifiers import taskset_loader
from asyncrl.buffer.buffer import Buffer
from asyncrl.checkpoints.folder import Checkpoints
from asyncrl.config import RunConfig
from asyncrl.engines.engine import EngineClient
from asyncrl.engines.pool import EnginePool
from asyncrl.engines.vllm.vllm_server import VllmServer
from asyncrl.errors import EngineLost, RoomError
from asyncrl.files import RunLock, write_whole
from asyncrl.journal.journal import Journal
from asyncrl.messages.records import Group, GroupId, WeightManifest
from asyncrl.messages.work import WORKER_KEY_ENV
from asyncrl.placement.lease import ROUTINE
from asyncrl.placement.staging import clear_stale_staging, disk_root, new_staging_dir, remove_staging_dir
from asyncrl.rollouts.evaluation import Evaluation
from asyncrl.rollouts.evaluator import EvalResult
from asyncrl.rollouts.generators import HarnessGenerator, Replay, SingleTurn
from asyncrl.rollouts.producers import Producers, Spawn
from asyncrl.rollouts.rollout import Generator, RolloutRunner
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.run import start as startup
from asyncrl.run.agents import Harnessing, make_harnessing, num_rollouts, wire_evaluation
from asyncrl.run.check import look
from asyncrl.run.colocate import SideBySide, TakingTurns, Turns
from asyncrl.run.model_folder import ModelPin, in_daemon_thread, make_model_folder
from asyncrl.run.replay import Replayed, open_replay, refuse_other_policy, told
from asyncrl.run.restore import Checkpointer, recover_trainer
from asyncrl.run.start import connect
from asyncrl.run.supervise import EngineSupervisor
from asyncrl.run.supervise_trainer import LivingTrainer
from asyncrl.sync.broadcast import Broadcasts
from asyncrl.sync.publisher import Publisher
from asyncrl.tasks.feed import Feed
from asyncrl.tasks.from_config import build_task, read_eval_task, task_name
from asyncrl.tasks.scorer import TaskScorer
from asyncrl.trainer.trainer_client import TrainerClient

logger = logging.getLogger("asyncrl.run.build")

CLOSE_TIMEOUT_S = 15.0
KEPT_TURNS = 100
"""Events of each kind that the journal keeps of handovers."""
RENDEZVOUS = "rendezvous"
"""In the staging folder: where the ranks of a trainer find each other. New ranks need a new one."""


@dataclass(frozen=True, slots=True)
class Rooms:
    """Everything that lives as long as the run."""

    servers: tuple[startup.Server, ...]
    buffer: Buffer
    producers: Producers
    engines: EnginePool
    trainer: LivingTrainer
    publisher: Publisher
    scorer: TaskScorer
    turns: Turns
    journal: Journal
    feed: Feed
    checkpointer: Checkpointer
    evaluation: Evaluation | None = None
    eval_server: startup.Server | None = None
    """Not one of `servers`: the run goes on without it."""
    supervisors: tuple[EngineSupervisor, ...] = ()
    """Of the engine servers, in their order."""
    harnessing: Harnessing | None = None
    """Where rollouts are run by harnesses."""
    replay: Replay | None = None
    """Where rollouts are recorded ones at first."""
    pin: ModelPin | None = None
    """Of the model, to be written once the run begins or goes on."""
    broken: asyncio.Future[RoomError] | None = None
    """Of a room that no task of ours waits for (the gateway answers its clients): why the run must end."""


async def close_within(timeout_s: float, name: str, close: Callable[[], Awaitable[None]]) -> None:
    """Close one thing, shielded from our own cancellation and bounded in time. Late or failed is logged,
    never raised.

    A cancellation that comes meanwhile (the first Ctrl-C, while a run that is done closes) passes once it is
    closed.
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


class Listener(Protocol):
    """Who is told what happens at the start and beside the steps; Reporter is it."""

    def tell(self, text: str) -> None:
        """What is being waited for, in words."""
        ...

    def evaluated(self, result: EvalResult) -> None:
        """An evaluation is done."""
        ...

    def say(self, text: str) -> None:
        """Something that whoever started the run has to know."""
        ...

    def say_secret(self, text: str) -> None:
        """The same, with a key in it: it is printed and never logged."""
        ...

    def warn(self, text: str) -> None:
        """Something went wrong that does not end the run."""
        ...


async def open_rooms(
    config: RunConfig,
    run_dir: Path,
    stack: AsyncExitStack,
    *,
    spawn: Spawn,
    listener: Listener,
    lock: RunLock | None = None,
    may_change_model: bool = False,
) -> Rooms:
    """Start the processes and build the rooms; `stack` closes them. `lock` is the run directory's, held by
    the caller.

    `may_change_model`: the model need not be the one that the run began with.

    Raises AsyncrlError with nothing left behind once `stack` is closed.
    """

    def closes(name: str, close: Callable[[], Awaitable[None]]) -> None:
        stack.push_async_callback(close_within, CLOSE_TIMEOUT_S, name, close)

    tell = listener.tell
    disk_dir = await asyncio.to_thread(disk_root, config.publisher)
    for folder in await asyncio.to_thread(
        lambda: [*clear_stale_staging(), *(clear_stale_staging(disk_dir) if disk_dir else ())]
    ):
        logger.info("removed %s, which a run that was killed had left", folder)
    journal = await asyncio.to_thread(
        Journal.open, run_dir / "journal.sqlite", run_id=run_id(run_dir), lock=lock
    )
    closes("journal", journal.aclose)
    tell("looking at what the config names")
    found = await in_daemon_thread(lambda: look(config))
    for note in found.notes:
        listener.say(note)
    task = found.task
    if task is None:
        tell("reading the task")
        task = await in_daemon_thread(
            lambda: build_task(config.task, config.seed, load_taskset=taskset_loader(config.generator))
        )
    replayed = await in_daemon_thread(lambda: open_replay(config, run_dir))
    feed = Feed(
        task,
        seed=config.seed,
        shuffle=config.task.shuffle,
        system_prompt=config.task.system_prompt,
        first=() if replayed is None else replayed.prompts,
        name=task_name(config.task),
    )
    scorer = TaskScorer(task, config.task, seed=config.seed, warn=listener.warn)
    closes("rewards", scorer.aclose)
    if config.eval is not None:
        eval_config, held_out = config.eval, found.eval_task
        if held_out is None:
            tell("reading the eval task")
            held_out = await in_daemon_thread(lambda: read_eval_task(eval_config))
        eval_task, eval_prompts = held_out
        eval_scorer = TaskScorer(eval_task, eval_config.task, seed=eval_config.seed, warn=listener.warn)
        closes("eval rewards", eval_scorer.aclose)
    tell("making the model" if config.model.scratch else "finding the model")
    pin = await asyncio.to_thread(ModelPin, run_dir, config.model.path, is_free=may_change_model)
    model_path = await make_model_folder(config, run_dir, revision=pin.revision)
    await in_daemon_thread(lambda: pin.check(model_path))
    if replayed is not None:
        known = replayed
        await in_daemon_thread(lambda: refuse_other_policy(known, config, model_path))
        listener.say(f"task.replay: {told(replayed, config)}")
    staging_dir = new_staging_dir(disk_dir)
    stack.callback(remove_staging_dir, staging_dir)
    secret = secrets.token_urlsafe(32)
    trainer_servers, engine_servers = startup.make_servers(config, model_path, run_dir, staging_dir, secret)
    servers = (*trainer_servers, *engine_servers)
    eval_server = (
        startup.make_eval_server(config, config.eval.slots, model_path, run_dir, secret)
        if config.eval is not None
        else None
    )
    started = (*servers, eval_server) if eval_server is not None else servers
    for server in started:
        closes(server.child.name, partial(startup.end_server, server, listener.warn))
    tell(f"loading the model in {', '.join(server.child.name for server in started)}")
    clients: dict[str, EngineClient] = {}

    async def read_tokenizer() -> HFChatTokenizer:
        read = await in_daemon_thread(
            lambda: HFChatTokenizer(model_path, chat_template=config.model.chat_template)
        )
        clients.update(
            {
                server.name: connect(config, server, model_path, read, warn=listener.warn)
                for server in started
                if server.is_engine
            }
        )
        return read

    async def read_model() -> None:
        await in_daemon_thread(lambda: pin.read(model_path))  # beside those who load the same files

    async def bring_up() -> None:
        beside = started[len(servers) :]
        await startup.bring_up(trainer_servers, engine_servers, beside, is_shared=startup.is_shared(config))

    if (
        config.rollout.engine == "vllm"
    ):  # whether it is ready is asked through its client, which needs the tokenizer
        tokenizer = await read_tokenizer()
        await asyncio.gather(bring_up(), read_model())
    else:
        tokenizer, *_ = await asyncio.gather(read_tokenizer(), bring_up(), read_model())
    checkpoints = Checkpoints(run_dir, config.checkpoint)

    def make_evaluation(harnessing: Harnessing | None) -> Evaluation | None:
        if config.eval is None or eval_server is None:
            return None
        return wire_evaluation(
            config,
            config.eval,
            clients[eval_server.name],
            eval_prompts,
            eval_scorer,
            tokenizer,
            staging_dir,
            run_dir,
            checkpoints,
            harnessing=harnessing,
            on_result=listener.evaluated,
            warn=listener.warn,
        )

    rooms = _wire(
        config,
        checkpoints,
        staging_dir,
        servers,
        clients,
        feed,
        scorer,
        tokenizer,
        spawn,
        journal,
        make_evaluation,
        listener,
        run_dir,
        replayed,
    )
    if rooms.replay is not None:
        replay = rooms.replay
        stack.callback(
            lambda: listener.say(
                f"task.replay: {replay.num_taken} recorded rollouts were taken in place of sampled ones"
            )
        )
    if rooms.harnessing is not None:
        tell("starting the gateway and its workers")
        closes("gateway", rooms.harnessing.aclose)
        await rooms.harnessing.start()
        tell_where(config, rooms.harnessing, listener.say_secret)
    return replace(rooms, eval_server=eval_server, pin=pin)


def tell_where(config: RunConfig, harnessing: Harnessing, say_secret: Callable[[str], None]) -> None:
    """Workers elsewhere must be started by somebody, who needs to know how."""
    if config.generator.remote:
        say_secret(
            f"gateway at {harnessing.url}; start workers with: {WORKER_KEY_ENV}={harnessing.worker_key} "
            f"asyncrl work {harnessing.url} "
            "--python my_agent:run"
        )


def run_id(run_dir: Path) -> str:
    """The name of the run that lies in this directory, made with it; it stays when the directory is moved or
    copied.
    """
    path = run_dir / "run.id"
    if not path.exists():
        write_whole(path, secrets.token_hex(8) + "\n")
    return path.read_text(encoding="utf-8").strip()


def _wire(
    config: RunConfig,
    checkpoints: Checkpoints,
    staging_dir: Path,
    servers: tuple[startup.Server, ...],
    clients: Mapping[str, EngineClient],
    feed: Feed,
    scorer: TaskScorer,
    tokenizer: HFChatTokenizer,
    spawn: Spawn,
    journal: Journal,
    make_evaluation: Callable[[Harnessing | None], Evaluation | None],
    listener: Listener,
    run_dir: Path,
    replayed: Replayed | None,
) -> Rooms:
    rollout, trainer_config = config.rollout, config.trainer
    client = TrainerClient(servers[0].caller, timeout_s=trainer_config.timeout_s)
    meeting: Broadcasts | None = None

    def before_trainer() -> None:
        (staging_dir / RENDEZVOUS).unlink(missing_ok=True)
        if meeting is not None:
            meeting.sender_gone_nowait()

    trainer = LivingTrainer(
        client,
        servers[: trainer_config.world_size],
        config.supervision,
        heartbeat_s=config.observe.heartbeat_s,
        before_start=before_trainer,
        wait_room=lambda: turns.wait_room_for_trainer(),
        recover=lambda version: recover_trainer(
            client, journal, checkpoints, version, trainer_config.num_steps
        ),
        warn=listener.warn,
        on_event=journal.event_nowait,
    )
    engine_servers = servers[trainer_config.world_size :]
    targets = [clients[server.name] for server in engine_servers]
    if config.publisher.way.is_one_kept:
        meeting = Broadcasts(trainer, staging_dir, timeout_s=config.publisher.timeout_s)
        for target in targets:
            assert isinstance(target, VllmServer), "the config has it so"
            target.meeting = meeting

    def lost(error: EngineLost) -> None:
        supervisors[error.room].lost_nowait(error)

    on_lost = lost if config.supervision.max_restarts else None
    engines = EnginePool(targets, slots=rollout.slots, on_lost=on_lost)

    def handed_back(group_id: GroupId, group: Group | None, reason: str) -> None:
        producers.handed_back(group_id, group, reason)

    buffer = Buffer(
        config.buffer,
        num_groups=trainer_config.num_groups,
        num_batches=trainer_config.num_steps,
        on_handed_back=handed_back,
    )
    broken: asyncio.Future[RoomError] = asyncio.get_running_loop().create_future()

    def on_broken(error: RoomError) -> None:
        if not broken.done():
            broken.set_result(error)

    harnessing = None
    generator: Generator = SingleTurn(
        engines,
        tokenizer,
        scorer,
        run_seed=config.seed,
        max_tokens=rollout.max_tokens,
        max_prompt_tokens=rollout.max_prompt_tokens,
        temperature=rollout.temperature,
        stop=tuple(config.generator.stop),
    )
    if config.generator.is_harness:
        harnessing = make_harnessing(
            config,
            engines,
            tokenizer,
            run_dir,
            on_broken=on_broken,
            warn=listener.warn,
            on_event=journal.event_nowait,
        )
        generator = HarnessGenerator(harnessing.gateway, harnessing.leases, scorer)
    replay = None
    if replayed is not None:
        replay = Replay(
            generator, replayed.rollouts, start_version=lambda group_id: producers.start_version(group_id)
        )
    producers = Producers(
        buffer,
        feed,
        RolloutRunner(replay or generator, timeout_s=rollout.timeout_s, retries=rollout.retries),
        spawn=spawn,
        group_size=rollout.group_size,
        capacity=num_rollouts(config),
        max_failed_groups=rollout.max_failed_groups,
        max_hand_backs=rollout.max_hand_backs,
        journal=journal,
    )

    evaluation = make_evaluation(harnessing)

    publisher, turns = _wire_publishing(config, trainer, targets, buffer, journal, evaluation, spawn, on_lost)
    supervisors = {
        server.name: EngineSupervisor(
            server,
            target,
            engines,
            turns,
            config.supervision,
            heartbeat_s=config.observe.heartbeat_s,
            warn=listener.warn,
            on_event=journal.event_nowait,
        )
        for server, target in zip(engine_servers, targets, strict=True)
    }

    def controller_state() -> Mapping[str, Any]:
        out = {
            prompt.prompt_id: prompt.num_handed_back
            for prompt in (*producers.prompts_out(), *buffer.prompts_ready())
        }
        return {"feed": feed.state(), "out": out, "next_group_id": buffer.next_group_id}

    checkpointer = Checkpointer(
        checkpoints,
        trainer,
        journal,
        controller_state=controller_state,
        spawn=spawn,
        warn=listener.warn,
        keep=config.journal.keep,
    )
    return Rooms(
        servers,
        buffer,
        producers,
        engines,
        trainer,
        publisher,
        scorer,
        turns,
        journal,
        feed,
        checkpointer,
        evaluation,
        supervisors=tuple(supervisors.values()),
        harnessing=harnessing,
        replay=replay,
        broken=broken,
    )


def _wire_publishing(
    config: RunConfig,
    trainer: LivingTrainer,
    targets: Sequence[EngineClient],
    buffer: Buffer,
    journal: Journal,
    evaluation: Evaluation | None,
    spawn: Spawn,
    on_lost: Callable[[EngineLost], None] | None,
) -> tuple[Publisher, Turns]:
    """How weights reach the engines: beside generation, or in turns on shared devices."""
    num_steps, timeout_s = config.trainer.num_steps, config.publisher.timeout_s

    def published(manifest: WeightManifest) -> None:
        journal.published_nowait(manifest.version, manifest.digest)
        if evaluation is not None and manifest.path:  # in turns the file is handed out by itself
            evaluation.published_nowait(manifest)

    publisher = Publisher(
        trainer,
        targets,
        interrupt=config.publisher.interrupt,
        timeout_s=timeout_s,
        on_served=buffer.set_served_nowait,
        on_published=published,
        on_lost=on_lost,
        is_rolling=config.publisher.rolling,
        is_one_kept=config.publisher.way.is_one_kept,
        is_file_wanted=lambda version: evaluation is not None and evaluation.wants(version),
        on_file=lambda manifest: evaluation.published_nowait(manifest) if evaluation is not None else None,
    )
    if not startup.is_shared(config):
        return publisher, SideBySide(
            publisher, num_steps=num_steps, spawn=spawn, are_engines_ours=config.rollout.urls is None
        )

    def tell(what: str, detail: Mapping[str, Any]) -> None:
        journal.event_nowait(what, detail, keep=KEPT_TURNS if what in ROUTINE else None)

    return publisher, TakingTurns(
        targets,
        trainer,
        publisher,
        num_steps=num_steps,
        timeout_s=timeout_s,
        on_event=tell,
        on_lost=on_lost,
    )

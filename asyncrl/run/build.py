"""Makes the parts of a run in their order, and closes them in the opposite one."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.agents.verifiers import taskset_loader
from asyncrl.buffer.buffer import Buffer
from asyncrl.checkpoints.folder import Checkpoints
from asyncrl.config import RunConfig
from asyncrl.engines.engine import EngineClient
from asyncrl.engines.pool import EnginePool
from asyncrl.engines.vllm.vllm_server import VllmServer
from asyncrl.errors import EngineLost
from asyncrl.files import write_whole
from asyncrl.journal.journal import Journal
from asyncrl.messages.records import Group, GroupId, Prompt
from asyncrl.messages.trainer_calls import ExportResponse
from asyncrl.messages.work import WORKER_KEY_ENV
from asyncrl.placement.devices import Placement
from asyncrl.placement.lease import ROUTINE
from asyncrl.placement.staging import clear_stale_staging, disk_root, new_staging_dir, remove_staging_dir
from asyncrl.rollouts.evaluation import Evaluation
from asyncrl.rollouts.evaluator import EvalResult
from asyncrl.rollouts.generators import HarnessGenerator, Replay, SingleTurn
from asyncrl.rollouts.producers import Producers
from asyncrl.rollouts.rollout import Generator, RolloutRunner
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.run import start as startup
from asyncrl.run.agents import Harnessing, make_harnessing, num_rollouts, wire_evaluation
from asyncrl.run.check import look
from asyncrl.run.colocate import SideBySide, TakingTurns, Turns
from asyncrl.run.life import Life
from asyncrl.run.model_folder import ModelPin, in_daemon_thread, make_model_folder
from asyncrl.run.replay import Replayed, open_replay, refuse_other_policy, told
from asyncrl.run.supervise import EngineSupervisor, Supervision
from asyncrl.run.supervise_trainer import Checkpointer, SupervisedTrainer, recover_trainer
from asyncrl.sync.broadcast import Broadcasts
from asyncrl.sync.publisher import Publisher
from asyncrl.tasks.feed import Feed
from asyncrl.tasks.from_config import build_task, read_eval_task, task_name
from asyncrl.tasks.scorer import TaskScorer
from asyncrl.tasks.task import Task
from asyncrl.trainer.trainer_client import TrainerClient

logger = logging.getLogger("asyncrl.run.build")

KEPT_TURNS = 100
"""Events of each kind that the journal keeps of handovers."""
RENDEZVOUS = "rendezvous"
"""In the staging folder: where the ranks of a trainer find each other. New ranks need a new one."""


class Rooms:
    """Everything that lives as long as the run, made in the order of these lines. Where an early part has to
    tell a later one something, it is given a method of this class.
    """

    checkpoints: Checkpoints
    journal: Journal
    feed: Feed
    scorer: TaskScorer
    replayed: Replayed | None = None
    pin: ModelPin
    """Of the model, to be written once the run begins or goes on."""
    staging_dir: Path
    servers: tuple[startup.Server, ...]
    """The ranks of the trainer, then the engine servers."""
    eval_server: startup.Server | None = None
    """Not one of `servers`: the run goes on without it."""
    tokenizer: HFChatTokenizer
    clients: dict[str, EngineClient]
    targets: list[EngineClient]
    """The clients that sample for training: all but that of the eval engine."""
    trainer: SupervisedTrainer
    meeting: Broadcasts | None = None
    """Where engines and trainer form a group, with weight_sync.transport=nccl."""
    engines: EnginePool
    buffer: Buffer
    harnessing: Harnessing | None = None
    """Where rollouts are run by harnesses."""
    replay: Replay | None = None
    """Where rollouts are recorded ones at first."""
    producers: Producers
    evaluation: Evaluation | None = None
    publisher: Publisher
    turns: Turns
    supervision: Supervision
    supervisors: tuple[EngineSupervisor, ...] = ()
    """Of the engine servers, in their order."""
    checkpointer: Checkpointer

    def engine_lost(self, error: EngineLost) -> None:
        """Pool or publisher got no answer of this engine."""
        next(one for one in self.supervisors if one.name == error.room).lost_nowait(error)

    def before_trainer_starts(self) -> None:
        """New ranks find each other anew."""
        (self.staging_dir / RENDEZVOUS).unlink(missing_ok=True)
        if self.meeting is not None:
            self.meeting.sender_gone_nowait()

    async def wait_room_for_trainer(self) -> None:
        """Until the devices of the trainer are free."""
        await self.turns.wait_room_for_trainer()

    def handed_back(self, group_id: GroupId, group: Group | None, reason: str) -> None:
        """The buffer takes a group back."""
        self.producers.handed_back(group_id, group, reason)

    def start_version(self, group_id: GroupId) -> int | None:
        """Of a group that runs."""
        return self.producers.start_version(group_id)

    def published(self, manifest: ExportResponse) -> None:
        """A version is announced."""
        self.journal.published_nowait(manifest.version, manifest.digest)
        if manifest.path:  # in turns there is a file of evaluated versions alone
            self.whole(manifest)

    def whole(self, manifest: ExportResponse) -> None:
        """All weights of a version lie in one file, until this returns."""
        if self.evaluation is not None:
            self.evaluation.published_nowait(manifest)

    def is_whole_wanted(self, version: int) -> bool:
        """Whether this version is evaluated."""
        return self.evaluation is not None and self.evaluation.wants(version)

    def handed_over(self, what: str, detail: Mapping[str, Any]) -> None:
        """The journal notes what a handover did."""
        self.journal.event_nowait(what, detail, keep=KEPT_TURNS if what in ROUTINE else None)

    def controller_state(self) -> Mapping[str, Any]:
        """What a checkpoint says of the run beside the trainer's state."""
        prompts = (*self.producers.prompts_out(), *self.buffer.prompts_ready())
        out = {prompt.prompt_id: prompt.num_handed_back for prompt in prompts}
        return {"feed": self.feed.state(), "out": out, "next_group_id": self.buffer.next_group_id}


async def open_rooms(
    job: Life,
    placement: Placement,
    *,
    evaluated: Callable[[EvalResult], None],
    may_change_model: bool,
) -> Rooms:
    """Start the processes and make the parts; `job` closes them.

    `evaluated` is told of each evaluation. `may_change_model`: the model need not be the one that the run
    began with. Raises AsyncrlError with nothing left behind once `job` is closed.
    """
    rooms, config = Rooms(), job.config
    rooms.checkpoints = Checkpoints(job.run_dir, config.checkpoint)
    disk_dir = await _open_journal(rooms, job)
    held_out = await _read_tasks(rooms, job)
    model_path = await _find_model(rooms, job, placement, may_change_model)
    rooms.staging_dir = new_staging_dir(disk_dir)
    job.stack.callback(remove_staging_dir, rooms.staging_dir)
    await _start_processes(rooms, job, placement, model_path)
    on_lost = rooms.engine_lost if config.supervision.max_restarts else None
    _make_trainer_and_engines(rooms, job, on_lost)
    _make_producers(rooms, job)
    if config.eval is not None and held_out is not None and rooms.eval_server is not None:
        rooms.evaluation = wire_evaluation(
            config,
            config.eval,
            rooms.clients[rooms.eval_server.name],
            *held_out,
            rooms.tokenizer,
            rooms.staging_dir,
            job.run_dir,
            rooms.checkpoints,
            harnessing=rooms.harnessing,
            on_result=evaluated,
            warn=job.warn,
        )
    _make_publisher(rooms, job, placement, on_lost)
    rooms.checkpointer = Checkpointer(rooms, job)
    if rooms.harnessing is not None:
        job.tell("starting the gateway and its workers")
        job.closes("gateway", rooms.harnessing.aclose)
        await rooms.harnessing.start()
        say_where(config, rooms.harnessing, job.say_secret)
    return rooms


async def _open_journal(rooms: Rooms, job: Life) -> Path | None:
    """Returns where weights are staged on disk, if they are."""
    disk_dir = await asyncio.to_thread(disk_root, job.config.weight_sync)
    for root in dict.fromkeys((None, disk_dir)):
        for folder in await asyncio.to_thread(clear_stale_staging, root):
            logger.info("removed %s, which a run that was killed had left", folder)
    path = job.run_dir / "journal.sqlite"
    rooms.journal = await asyncio.to_thread(Journal.open, path, run_id=run_id(job.run_dir))
    job.closes("journal", rooms.journal.aclose)
    return disk_dir


async def _read_tasks(rooms: Rooms, job: Life) -> tuple[tuple[Prompt, ...], TaskScorer] | None:
    """Returns what an evaluation samples, and what scores it."""
    config = job.config
    job.tell("looking at what the config names")
    found = await in_daemon_thread(lambda: look(config))
    for note in found.notes:
        job.say(note)
    task = found.task
    if task is None:
        job.tell("reading the task")
        task = await in_daemon_thread(lambda: read_task(config))
    rooms.replayed = await in_daemon_thread(lambda: open_replay(config, job.run_dir))
    first = () if rooms.replayed is None else rooms.replayed.prompts
    rooms.feed = make_feed(config, task, shuffle=config.task.shuffle, first=first)
    rooms.scorer = TaskScorer(task, config.task, seed=config.seed, warn=job.warn)
    job.closes("rewards", rooms.scorer.aclose)
    if (settings := config.eval) is None:
        return None
    if (held_out := found.eval_task) is None:
        job.tell("reading the eval task")
        held_out = await in_daemon_thread(lambda: read_eval_task(settings))
    scorer = TaskScorer(held_out[0], settings.task, seed=settings.seed, warn=job.warn)
    job.closes("eval rewards", scorer.aclose)
    return held_out[1], scorer


async def _find_model(rooms: Rooms, job: Life, placement: Placement, may_change_model: bool) -> Path:
    config, replayed = job.config, rooms.replayed
    job.tell("making the model" if config.model.scratch else "finding the model")
    path = config.model.path
    rooms.pin = pin = await asyncio.to_thread(ModelPin, job.run_dir, path, is_free=may_change_model)
    model_path = await make_model_folder(config, job.run_dir, revision=pin.revision)
    await in_daemon_thread(lambda: pin.check(model_path))
    if replayed is not None:
        await in_daemon_thread(lambda: refuse_other_policy(replayed, config, model_path, placement))
        job.say(f"task.replay: {told(replayed, config)}")
    return model_path


async def _start_processes(rooms: Rooms, job: Life, placement: Placement, model_path: Path) -> None:
    """Start trainer and engines; returns when they answer. The model is read once more meanwhile, for its
    pin.
    """
    config, secret = job.config, secrets.token_urlsafe(32)
    trainers, engines = startup.make_servers(config, model_path, job.run_dir, rooms.staging_dir, secret)
    rooms.servers = (*trainers, *engines)
    beside: list[startup.Server] = []
    if config.eval is not None:
        slots = config.eval.slots
        rooms.eval_server = startup.make_eval_server(config, slots, model_path, job.run_dir, secret)
        beside = [rooms.eval_server]
    started = [*rooms.servers, *beside]
    for server in started:
        job.closes(server.child.name, partial(startup.end_server, server, job.warn))
    job.tell(f"loading the model in {', '.join(server.child.name for server in started)}")
    is_shared, pin = placement.mode == "colocated", rooms.pin

    async def read_tokenizer() -> None:
        rooms.tokenizer = await in_daemon_thread(
            lambda: HFChatTokenizer(model_path, chat_template=config.model.chat_template)
        )
        rooms.clients = {
            server.name: startup.connect(config, server, model_path, rooms.tokenizer, warn=job.warn)
            for server in started
            if server.is_engine
        }

    reading = [] if config.rollout.engine == "vllm" else [read_tokenizer()]
    if not reading:  # a vLLM is asked through its client whether it is ready, and that needs the tokenizer
        await read_tokenizer()
    await asyncio.gather(
        *reading,
        startup.bring_up(trainers, engines, beside, is_shared=is_shared),
        in_daemon_thread(lambda: pin.read(model_path)),
    )


def _make_trainer_and_engines(rooms: Rooms, job: Life, on_lost: Callable[[EngineLost], None] | None) -> None:
    config, num_ranks = job.config, job.config.trainer.world_size
    rooms.supervision = Supervision(
        config.supervision, config.observe.heartbeat_s, job.warn, rooms.journal.event_nowait
    )
    client = TrainerClient(rooms.servers[0].caller, timeout_s=config.trainer.timeout_s)
    rooms.trainer = SupervisedTrainer(
        client,
        rooms.servers[:num_ranks],
        rooms.supervision,
        before_start=rooms.before_trainer_starts,
        wait_room=rooms.wait_room_for_trainer,
        recover=partial(
            recover_trainer, client, rooms.journal, rooms.checkpoints, num_batches=config.trainer.num_steps
        ),
    )
    rooms.targets = [rooms.clients[server.name] for server in rooms.servers[num_ranks:]]
    if config.weight_sync.way.is_one_kept:
        timeout_s = config.weight_sync.timeout_s
        rooms.meeting = Broadcasts(rooms.trainer, rooms.staging_dir, timeout_s=timeout_s)
        for target in rooms.targets:
            assert isinstance(target, VllmServer), "the config has it so"
            target.meeting = rooms.meeting
    rooms.engines = EnginePool(rooms.targets, slots=config.rollout.slots, on_lost=on_lost)


def _make_producers(rooms: Rooms, job: Life) -> None:
    config, rollout = job.config, job.config.rollout
    rooms.buffer = Buffer(
        config.buffer,
        num_groups=config.trainer.num_groups,
        num_batches=config.trainer.num_steps,
        on_handed_back=rooms.handed_back,
    )
    if config.generator.is_harness:
        rooms.harnessing = make_harnessing(
            config,
            rooms.engines,
            rooms.tokenizer,
            job.run_dir,
            on_broken=job.on_broken,
            supervision=rooms.supervision,
        )
    generator = make_generator(config, rooms.engines, rooms.tokenizer, rooms.scorer, rooms.harnessing)
    if rooms.replayed is not None:
        generator = rooms.replay = Replay(
            generator, rooms.replayed.rollouts, start_version=rooms.start_version
        )
        job.stack.callback(_say_taken, job, rooms.replay)
    rooms.producers = Producers(
        rooms.buffer,
        rooms.feed,
        RolloutRunner(generator, timeout_s=rollout.timeout_s, retries=rollout.retries),
        spawn=job.spawn,
        group_size=rollout.group_size,
        capacity=num_rollouts(config),
        max_failed_groups=rollout.max_failed_groups,
        max_hand_backs=rollout.max_hand_backs,
        journal=rooms.journal,
    )


def _make_publisher(
    rooms: Rooms, job: Life, placement: Placement, on_lost: Callable[[EngineLost], None] | None
) -> None:
    """How weights reach the engines: beside generation, or in turns on shared devices; then what supervises
    them.
    """
    config, targets = job.config, rooms.targets
    num_steps, timeout_s = config.trainer.num_steps, config.weight_sync.timeout_s
    publisher = rooms.publisher = Publisher(
        rooms.trainer,
        targets,
        interrupt=config.weight_sync.interrupt,
        timeout_s=timeout_s,
        on_served=rooms.buffer.set_served_nowait,
        on_published=rooms.published,
        on_lost=on_lost,
        is_rolling=config.weight_sync.rolling,
        is_one_kept=config.weight_sync.way.is_one_kept,
        is_file_wanted=rooms.is_whole_wanted,
        on_file=rooms.whole,
    )
    if placement.mode == "colocated":
        rooms.turns = TakingTurns(
            targets,
            rooms.trainer,
            publisher,
            num_steps=num_steps,
            timeout_s=timeout_s,
            on_event=rooms.handed_over,
            on_lost=on_lost,
        )
    else:
        rooms.turns = SideBySide(
            publisher, num_steps=num_steps, spawn=job.spawn, are_engines_ours=config.rollout.urls is None
        )
    rooms.supervisors = tuple(
        EngineSupervisor(server, target, rooms.engines, rooms.turns, rooms.supervision)
        for server, target in zip(rooms.servers[config.trainer.world_size :], targets, strict=True)
    )


def read_task(config: RunConfig) -> Task:
    """Read what `task` names, from start to end. Blocks."""
    return build_task(config.task, config.seed, load_taskset=taskset_loader(config.generator))


def make_feed(config: RunConfig, task: Task, *, shuffle: bool, first: Sequence[Prompt] = ()) -> Feed:
    """The prompts in the order of the run, those of `first` before all others."""
    return Feed(
        task,
        seed=config.seed,
        shuffle=shuffle,
        system_prompt=config.task.system_prompt,
        first=first,
        name=task_name(config.task),
    )


def make_generator(
    config: RunConfig,
    engines: EnginePool,
    tokenizer: HFChatTokenizer,
    scorer: TaskScorer,
    harnessing: Harnessing | None,
) -> Generator:
    """What runs one rollout: a harness, or a single turn of our own."""
    if harnessing is not None:
        return HarnessGenerator(harnessing.gateway, harnessing.queue, scorer)
    rollout = config.rollout
    return SingleTurn(
        engines,
        tokenizer,
        scorer,
        run_seed=config.seed,
        max_tokens=rollout.max_tokens,
        max_prompt_tokens=rollout.max_prompt_tokens,
        temperature=rollout.temperature,
        stop=tuple(config.generator.stop),
    )


def say_where(config: RunConfig, harnessing: Harnessing, say_secret: Callable[[str], None]) -> None:
    """Workers elsewhere are started by hand: say how."""
    if config.generator.remote:
        say_secret(
            f"gateway at {harnessing.url}; start workers with: {WORKER_KEY_ENV}={harnessing.worker_key} "
            f"asyncrl work {harnessing.url} --python my_agent:run"
        )


def run_id(run_dir: Path) -> str:
    """The name of the run that lies in this directory, made with it; it stays when the directory is moved or
    copied.
    """
    path = run_dir / "run.id"
    if not path.exists():
        write_whole(path, secrets.token_hex(8) + "\n")
    return path.read_text(encoding="utf-8").strip()


def _say_taken(job: Life, replay: Replay) -> None:
    job.say(f"task.replay: {replay.num_taken} recorded rollouts were taken in place of sampled ones")

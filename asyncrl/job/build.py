"""Build the parts of a run in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.base.errors import EngineLost
from asyncrl.base.staging import clear_stale_staging, disk_root, new_staging_dir, remove_staging_dir
from asyncrl.buffer.buffer import Buffer
from asyncrl.config.weight_sync import fetches_files
from asyncrl.engines.broadcast import BroadcastGroup
from asyncrl.engines.engine import EngineClient
from asyncrl.engines.pool import EnginePool
from asyncrl.job.agent_runtime import AgentRuntime, make_generator, num_rollouts, special_tokens
from asyncrl.job.check import Found, look, read_tasks
from asyncrl.job.colocate import SideBySide, TakingTurns, Turns
from asyncrl.job.life import Life, run_id
from asyncrl.job.scale import EngineScale
from asyncrl.job.servers.evaluating import make_evaluation
from asyncrl.job.servers.server_maker import ServerMaker
from asyncrl.job.servers.teaching import Teaching, make_teaching
from asyncrl.job.start import Server, bring_up, end_all, end_server, start_again
from asyncrl.job.supervision.supervise import Supervision, Supervisor
from asyncrl.job.supervision.supervise_trainer import Checkpointer, SupervisedTrainer, recover_trainer
from asyncrl.journal.checkpoints import Checkpoints, ControllerState
from asyncrl.journal.journal import Journal
from asyncrl.launch.devices import Placement
from asyncrl.launch.lease import ROUTINE
from asyncrl.launch.plan import EVAL_ENGINE
from asyncrl.messages.records import Prompt
from asyncrl.messages.trainer_api import ExportResponse
from asyncrl.rollouts.evaluation import EvalResult, Evaluation
from asyncrl.rollouts.generators import DistillingGenerator
from asyncrl.rollouts.producers import Producers
from asyncrl.rollouts.rollout import RolloutRunner
from asyncrl.sync.node_files import NodeFiles
from asyncrl.sync.publisher import Publisher, at_once
from asyncrl.tasks.from_config import EvalTask, make_prompt_source, read_eval_task
from asyncrl.tasks.pinned_data import DataPin
from asyncrl.tasks.scorer import Scorers
from asyncrl.tasks.task import PromptTask, RowTask
from asyncrl.trainer.model_folder import ModelPin, make_model_folder
from asyncrl.trainer.trainer_client import RENDEZVOUS

if TYPE_CHECKING:
    from asyncrl.job.resume import ResumePoint

logger = logging.getLogger("asyncrl.job.build")

KEPT_TURNS = 100
"""Handover events of each kind that the journal keeps."""


class Parts:
    """All parts of a run. An early part that calls a later one gets a method of this class as its
    callback.
    """

    def __init__(self, job: Life, placement: Placement, num_first: int) -> None:
        self._job, self._config, self._placement = job, job.config, placement
        self._num_first = num_first
        self.checkpoints = Checkpoints(job.run_dir, job.config.checkpoint)
        self.eval_server: Server | None = None
        """Kept out of `servers`: the run survives its loss. None: the rollout engines evaluate."""
        self.eval_target: EngineClient | None = None
        self.teaching: Teaching | None = None
        self.broadcast_group: BroadcastGroup | None = None
        self.files: NodeFiles | None = None
        self.harnessing: AgentRuntime | None = None
        self.evaluation: Evaluation | None = None
        # with scaling, cut calls of a leaving engine must not end the run
        is_heard = job.config.supervision.max_restarts or job.config.rollout.is_scaled
        self._on_lost = self._engine_lost if is_heard else None

    @property
    def servers(self) -> tuple[Server, ...]:
        return (*self._ranks, *self._engine_servers)

    @property
    def beside(self) -> list[Server]:
        """Return the eval engine and the teacher, if configured. Nothing sampled there is trained on."""
        found = (self.eval_server, None if self.teaching is None else self.teaching.server)
        return [server for server in found if server is not None]

    @property
    def supervisors_beside(self) -> list[Supervisor]:
        """Return the teacher's supervisor; the eval engine is unsupervised."""
        return [] if self.teaching is None else [self.teaching.supervisor]

    async def open_journal(self) -> None:
        job, config = self._job, self._config
        disk_dir = await asyncio.to_thread(disk_root, config.weight_sync.disk_dir)
        for root in dict.fromkeys((None, disk_dir)):
            for folder in await asyncio.to_thread(clear_stale_staging, root):
                logger.info("removed %s, which a run that was killed had left", folder)
        path = job.run_dir / "journal.sqlite"
        self.journal = await asyncio.to_thread(Journal.open, path, run_id=run_id(job.run_dir))
        job.closes("journal", self.journal.aclose)
        heartbeat_s, note = config.observe.heartbeat_s, self.journal.event_nowait
        self.supervision = Supervision(config.supervision, heartbeat_s, job.warn, note)
        self.staging_dir = new_staging_dir(disk_dir)
        job.stack.callback(remove_staging_dir, self.staging_dir)

    async def read_tasks(self, *, may_change: bool) -> Mapping[str, EvalTask]:
        """Read the tasks; return the eval tasks by name. `may_change`: the data may differ from the start
        of the run.
        """
        config, job = self._config, self._job
        found = await find_tasks(job)
        held_out = dict[str, EvalTask]()
        for name, settings in config.evals.items():
            known = found.evals.get(name)
            if known is None:
                job.tell("reading the eval task")
                known = await asyncio.to_thread(read_eval_task, settings, name)
            held_out[name] = known
        pinned: dict[str, PromptTask] = {**found.tasks}
        pinned |= {f"eval/{name}": task for name, (task, _) in held_out.items()}
        digests = {name: task.digests for name, task in pinned.items() if isinstance(task, RowTask)}
        self.data_pin = DataPin(job.run_dir, digests, is_free=may_change)
        self.feed = make_prompt_source(config, found.tasks, on_epoch=self.journal.epoch_nowait)
        self.scorer = Scorers(found.tasks, config.tasks, seed=config.seed, warn=job.warn)
        job.closes("rewards", self.scorer.aclose)
        return held_out

    async def find_model(self, *, may_change: bool) -> Path:
        """Return the model folder. `may_change`: it may differ from the start of the run."""
        config, job = self._config, self._job
        job.tell("making the model" if config.model.scratch else "finding the model")
        self.pin = ModelPin(job.run_dir, config.model.source, is_free=may_change)
        return await make_model_folder(config, job.run_dir, commit=self.pin.revision)

    async def make_processes(self, model_path: Path) -> None:
        config, job, sync = self._config, self._job, self._config.weight_sync
        maker = ServerMaker(config, self._placement, model_path, job.run_dir, job.warn, job.launcher)
        await maker.hold(self.staging_dir, self._num_first)
        self.tokenizer = await asyncio.to_thread(lambda: maker.tokenizer)
        self.special_tokens = special_tokens(config, self.tokenizer)
        store = await maker.find_weights_store()
        self._ranks = maker.trainers(self.staging_dir, await maker.find_store(), store)
        self._engine_servers = maker.engines()
        self.trainer = SupervisedTrainer(
            self._ranks,
            self.supervision,
            timeout_s=config.trainer.timeout_s,
            before_start=self._before_trainer_starts,
            bring_back=partial(
                recover_trainer,
                journal=self.journal,
                checkpoints=self.checkpoints,
                num_batches=config.trainer.num_steps,
            ),
        )
        if sync.facts.is_collective:
            how: Any = {"timeout_s": sync.timeout_s, "wait_up": self.trainer.wait_up}
            how["store"] = lambda: store
            self.broadcast_group = BroadcastGroup(self.trainer.broadcast, self.staging_dir, **how)
        self.targets = [maker.client(server, self.broadcast_group) for server in self._engine_servers]
        """Without the eval engine."""
        self.engines = EnginePool(self.targets, slots=config.rollout.slots, on_lost=self._on_lost)
        how = {"on_change": self._resize, "num_first": self._num_first}
        self.scale = EngineScale(config, job.run_dir, self.engines, job.voice, **how)
        self.files = self._node_files()
        if self._placement.evaluation is not None:
            self.eval_server = maker.eval_engine()
            self.eval_target = maker.client(self.eval_server)
        if config.teacher is not None:
            self.teaching = await make_teaching(maker, self.supervision)

    def _node_files(self) -> NodeFiles | None:
        """Return None if all nodes read the weights where the trainer writes them."""
        placement = self._placement
        has_eval = placement.evaluation is not None
        if placement.num_nodes == 1 or not fetches_files(self._config, has_eval_engine=has_eval):
            return None
        node_of = {f"engine-{at}": placement.engine_node(at) for at in range(len(placement.engines))}
        node_of[EVAL_ENGINE] = placement.beside_node
        return NodeFiles(
            self._job.launcher.fetch,
            self._ranks[0].caller,
            node_of,
            trainer_node=placement.rank_node(0),
            timeout_s=self._config.weight_sync.timeout_s,
        )

    async def start_processes(self, model_path: Path, *, is_new: bool) -> None:
        """Start all processes and wait until they answer. A resumed run first checks its model."""
        job, engines = self._job, self._engine_servers[: self.scale.wanted]
        for server in (*self.servers, *self.beside):
            job.closes(server.name, partial(end_server, server, job.warn))
        beside = [server for server in self.beside if server.name not in self.scale.parked]
        hashing = asyncio.ensure_future(asyncio.to_thread(self.pin.read, model_path))
        try:
            if not is_new:
                await hashing
            names = ", ".join(server.name for server in (*self._ranks, *engines, *beside))
            job.tell(f"loading the model in {names}")
            moves, is_shared = self._placement.moves, self._placement.share is not None
            start = partial(
                bring_up, self._ranks, engines, beside, is_shared=moves or is_shared, stays=not moves
            )
            await start_again(
                start,
                (*self._ranks, *engines, *beside),
                self._config.supervision,
                warn=job.warn,
                before_start=self._forget_rendezvous,
            )
            await hashing
        finally:
            await end_all([hashing])

    def make_producers(self) -> None:
        config, rollout, job = self._config, self._config.rollout, self._job
        self.buffer = Buffer(
            config.buffer,
            num_groups=config.trainer.num_groups,
            num_batches=config.trainer.num_steps,
            on_requeued=lambda *group: self.producers.requeued(*group),
        )
        if config.generator.is_harness:
            self.harnessing = AgentRuntime(job, self.engines, self.tokenizer, self.supervision)
        generator = make_generator(config, self.engines, self.tokenizer, self.scorer, self.harnessing)
        if self.teaching is not None:
            generator = DistillingGenerator(generator, self.teaching.teacher)
        self.producers = Producers(
            self.buffer,
            self.feed,
            RolloutRunner(generator, timeout_s=rollout.timeout_s, retries=rollout.retries),
            spawn=job.spawn,
            group_size=rollout.group_size,
            capacity=num_rollouts(config, self.scale.wanted),
            max_failed_groups=rollout.max_failed_groups,
            max_requeues=rollout.max_requeues,
            journal=self.journal,
            on_failed=partial(job.voice.rollout_failed, self.tokenizer),
        )

    def make_publisher(self) -> None:
        config, job, sync = self._config, self._job, self._config.weight_sync
        num_steps = config.trainer.num_steps
        nodes: dict[str, Any] = {} if self.files is None else {"locate": self.files.locate}
        if self.files is not None and self.eval_server is not None:
            nodes["here"] = partial(self.files.for_evaluation, EVAL_ENGINE)
        self.publisher = Publisher(
            self.trainer,
            self.targets,
            interrupt=config.interrupt,
            timeout_s=sync.timeout_s,
            on_served=self.buffer.set_served_nowait,
            on_published=self._published,
            on_lost=self._on_lost,
            is_rolling=sync.rolling,
            is_collective=sync.facts.is_collective,
            is_file_wanted=lambda version: self.evaluation is not None and self.evaluation.wants(version),
            on_file=self._whole_published,
            wait_released=at_once if self.evaluation is None else self.evaluation.wait_released,
            **nodes,
        )
        if self._placement.mode == "colocated":
            self.turns: Turns = TakingTurns(
                self.targets,
                self.trainer,
                self.publisher,
                num_steps=num_steps,
                timeout_s=sync.timeout_s,
                on_event=self._handed_over,
                on_lost=self._on_lost,
                stays=self._placement.stays,
            )
        else:
            are_ours = config.rollout.urls is None
            self.turns = SideBySide(self.publisher, num_steps=num_steps, spawn=job.spawn, are_ours=are_ours)
        self.supervisors = tuple(
            self.scale.supervisor(server, target, self.turns, self.supervision)
            for server, target in zip(self._engine_servers, self.targets, strict=True)
        )
        self.checkpointer = Checkpointer(self, job)

    def _resize(self, num_engines: int) -> None:
        self.producers.resize_nowait(num_rollouts(self._config, num_engines))

    def _engine_lost(self, error: EngineLost) -> None:
        next(one for one in self.supervisors if one.name == error.room).lost_nowait(error)

    async def _before_trainer_starts(self) -> None:
        """Wait for device memory, then remove the old rendezvous file."""
        await self.turns.wait_room_for_trainer()
        await self._forget_rendezvous()

    async def _forget_rendezvous(self) -> None:
        (self.staging_dir / RENDEZVOUS).unlink(missing_ok=True)
        if self.broadcast_group is not None:
            self.broadcast_group.sender_gone_nowait()

    def _published(self, manifest: ExportResponse) -> None:
        self.journal.published_nowait(manifest.version, manifest.digest)
        self._job.voice.published(manifest.version, manifest.digest)
        if self.evaluation is not None and self.eval_server is None:
            self.evaluation.served_nowait(manifest.version)
        elif manifest.path:  # colocated: only evaluated versions have a file
            self._whole_published(manifest)

    def _whole_published(self, manifest: ExportResponse) -> None:
        """Pass a version in one file to the evaluation. The file may disappear after the return."""
        if self.evaluation is not None:
            self.evaluation.published_nowait(manifest)

    def _handed_over(self, what: str, detail: Mapping[str, Any]) -> None:
        self.journal.event_nowait(what, detail, keep=KEPT_TURNS if what in ROUTINE else None)

    def write_pins(self) -> None:
        """Record model and data. Raises OSError."""
        self.pin.write()
        self.data_pin.write()

    def controller_state(self) -> ControllerState:
        prompts = (*self.producers.prompts_out(), *self.buffer.prompts_ready())
        out = {prompt.prompt_id: prompt.num_requeued for prompt in prompts}
        return ControllerState(feed=self.feed.state(), out=out, next_group_id=self.buffer.next_group_id)

    def put_back(self, state: ControllerState, version: int) -> None:
        """Restore a checkpoint's state; prompts in flight are generated again. Raises ValueError or
        TaskError for prompts that the task cannot make.
        """
        self.feed.load_state(state.feed)
        for prompt_id, num_requeued in state.out.items():
            self.feed.requeue_nowait(Prompt(prompt_id, (), num_requeued=num_requeued))
        self.buffer.restore_nowait(version, state.next_group_id, [], [])


async def open_parts(
    job: Life,
    placement: Placement,
    point: ResumePoint | None,
    evaluated: Callable[[EvalResult], None],
    *,
    num_first: int,
) -> Parts:
    """Build and start all parts; `job` closes them. `evaluated` receives each evaluation. Raises
    AsyncrlError; closing `job` then cleans up.
    """
    parts = Parts(job, placement, num_first)
    await parts.open_journal()
    held_out = await parts.read_tasks(may_change=point is not None and point.may_change_data)
    model_path = await parts.find_model(may_change=point is not None and point.may_change_model)
    await parts.make_processes(model_path)
    await parts.start_processes(model_path, is_new=point is None)
    parts.make_producers()
    if held_out:
        parts.evaluation = make_evaluation(parts, job, held_out, evaluated)
    parts.make_publisher()
    if parts.harnessing is not None:
        await parts.harnessing.open(job)
    return parts


async def find_tasks(job: Life, *, is_needed: bool = True) -> Found:
    """Check everything in the config. `is_needed`: also read tasks that only the start of a run may read."""
    job.tell("looking at what the config names")
    found = await asyncio.to_thread(look, job.config)
    for note in found.notes:
        job.say(note)
    if len(found.tasks) < len(job.config.tasks) and is_needed:
        job.tell("reading the task")
        found = replace(found, tasks=await asyncio.to_thread(read_tasks, job.config, found.tasks))
    return found

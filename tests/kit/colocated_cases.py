"""Trainer and engines that time-share, wired as job/build.py does it, over fake servers
whose memory is counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from fake_engine import FakeEngineServer
from fake_server import FakeProcess, FakeServer, FakeTrainerServer
from pydantic import BaseModel
from token_cases import trajectory_of

from asyncrl.base.errors import ComponentError, EngineLost, ErrorBody
from asyncrl.base.http import CallRefused
from asyncrl.base.waits import TimedSpan, listen_to_spans
from asyncrl.config.rollout_config import EngineRange
from asyncrl.config.supervision_config import SupervisionConfig
from asyncrl.engines.engine import EngineServer
from asyncrl.engines.pool import EnginePool
from asyncrl.engines.role_client import RoleClient
from asyncrl.extensions.scoring.scoring_api import RewardRequest, RewardResponse
from asyncrl.job.colocate import Colocated
from asyncrl.job.scale import EngineScale, EngineSupervisor
from asyncrl.job.trainer_recovery import SupervisedTrainer
from asyncrl.launch.supervise import Supervision, Supervisor
from asyncrl.messages.engine_api import EngineHealth, TransferStats
from asyncrl.messages.records import Batch, Group, GroupId, Prompt, VersionSpan
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.trainer_api import (
    ExportChunkRequest,
    ExportChunkResponse,
    ExportResponse,
    OffloadRequest,
)
from asyncrl.observe.console import RunLog
from asyncrl.sync.push import at_once
from asyncrl.testing.virtual_time import run_virtual
from asyncrl.trainer.trainer_client import TrainerClient

DECODE_S, START_S, TIMEOUT_S, MOVE_S, HEARTBEAT_S = 0.01, 5.0, 60.0, 0.5, 3.0
NUM_CHUNKS = 3
NEEDS = {
    "/train": {"weights", "optimizer"},
    "/export_chunk": {"weights"},
    "/export": {"weights"},
}
"""Path -> the parts that the trainer must have on the device."""


class ColocatedEngine(FakeEngineServer):
    """An engine server whose moves take time."""

    async def post(
        self, path: str, body: Any, answer: Any, *, timeout_s: float | None
    ) -> Any:
        if path in ("/sleep", "/wake", "/load_chunk"):
            await asyncio.sleep(MOVE_S)
        return await super().post(path, body, answer, timeout_s=timeout_s)

    @property
    def held(self) -> set[str]:
        """Parts on the device; a process that has ended holds none."""
        return (
            set()
            if self.has_ended.is_set()
            else {"weights", "kv"} - set(self.engine.weights.asleep)
        )


class ColocatedTrainer(FakeTrainerServer):
    """A trainer that refuses to load more than its memory holds. Its weights are the
    list of its batches; a chunk's digest says so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.away: set[str] = set()
        self.wrong_chunk: Callable[[ExportChunkResponse], ExportChunkResponse] = (
            lambda chunk: chunk
        )

    @property
    def held(self) -> set[str]:
        """Parts on the device; a process that has ended holds none."""
        return (
            set() if self.has_ended.is_set() else {"weights", "optimizer"} - self.away
        )

    def restart(self) -> None:
        super().restart()
        self.away = set()

    async def _work(self, path: str, body: Any) -> BaseModel:
        if path in ("/offload", "/onload", "/export_chunk"):
            await asyncio.sleep(MOVE_S)
        if isinstance(body, OffloadRequest) and path not in self.refuse:
            before = len(self.away)
            self.away = (
                self.away | set(body.parts)
                if path == "/offload"
                else self.away - set(body.parts)
            )
            return TransferStats(num_bytes=abs(len(self.away) - before), seconds=0.0)
        if lacking := NEEDS.get(path, set()) & self.away:
            raise CallRefused(
                self.name, path, 409, ErrorBody(error=f"{lacking} offloaded")
            )
        if isinstance(body, ExportChunkRequest):
            is_last = body.index == NUM_CHUNKS - 1
            chunk = ExportChunkResponse(
                version=self.policy_version,
                index=body.index,
                path="fake",
                digest=f"c{body.index}",
                num_tensors=2,
                num_bytes=10,
                is_last=is_last,
                whole_digest="|".join(["w", *self.weights]) if is_last else "",
            )
            return self.wrong_chunk(chunk)
        return await super()._work(path, body)


class ColocatedServer(FakeServer):
    """A server that scores rollouts on the trainer's device."""

    def __init__(self) -> None:
        super().__init__("reward")
        self.is_asleep = False
        self.num_scored = 0

    @property
    def held(self) -> set[str]:
        is_here = not (self.is_asleep or self.has_ended.is_set())
        return {"model"} if is_here else set()

    def restart(self) -> None:
        super().restart()
        self.is_asleep = False

    def health(self) -> EngineHealth:
        return EngineHealth(
            policy_version=0, num_running=0, num_queued=0, tokens_generated=0
        )

    async def _handle(self, path: str, body: Any) -> BaseModel:
        if path == "/reward":
            assert not self.is_asleep, "a call came to a server that sleeps"
            await asyncio.sleep(DECODE_S)
            assert not self.is_asleep, "it fell asleep over a call"
            self.num_scored += 1
            return RewardResponse(score=1.0, num_tokens=1)
        await asyncio.sleep(MOVE_S)
        self.is_asleep = path == "/sleep"
        return TransferStats(num_bytes=1, seconds=MOVE_S)


class EngineRooms:
    """Pool, publisher and supervisors over fake engine servers, as a run wires them.
    `announced`: versions in their order, each when every engine that is not down serves
    it.
    """

    publisher: Any

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        fakes: Sequence[FakeEngineServer],
        trainer: Any,
        config: SupervisionConfig,
        make_scheduler: Callable[..., Any],
        *,
        run_dir: Path = Path("none"),
        start: int | None = None,
        **publishing: Any,
    ) -> None:
        """`start`: engines that work at first (None: all)."""
        self.tasks, self.fakes, self.trainer = tasks, fakes, trainer
        self.processes = [FakeProcess(fake, start_s=START_S) for fake in fakes]
        self.targets = [EngineServer(fake) for fake in fakes]
        self.events: list[tuple[str, Mapping[str, Any]]] = []
        self.spans = list[TimedSpan]()
        listen_to_spans(self.spans.append)
        self.told: list[str] = []
        self.announced: list[int] = []
        self.pool = EnginePool(self.targets, slots=4, on_lost=self.on_lost)
        publishing = {"timeout_s": TIMEOUT_S, "on_served": self.on_served} | publishing
        self.publisher = make_scheduler(
            trainer, self.targets, on_lost=self.on_lost, **publishing
        )
        supervision = Supervision(config, HEARTBEAT_S, self.told.append, self.tell)
        self.capacities, self.lines = list[int](), list[str]()
        self.running = list[asyncio.Task[None]]()
        engines = [
            EngineSupervisor(process, target, self.pool, self.publisher, supervision)
            for process, target in zip(self.processes, self.targets, strict=True)
        ]
        self.supervisors = {engine.name: engine for engine in engines}
        self.scale = EngineScale(
            engines,
            EngineRange(min=1, max=len(fakes)),
            run_dir,
            RunLog(self.lines.append),
            wanted=start or len(fakes),
            spawn=self.spawn,
            on_change=self.capacities.append,
        )
        self.scale.watch_nowait()

    def spawn(
        self, coro: Coroutine[Any, Any, None], *, name: str
    ) -> asyncio.Task[None]:
        self.running.append(self.tasks.create_task(coro, name=name))
        return self.running[-1]

    def ask(self, request: SamplingRequest) -> asyncio.Task[Any]:
        """A rollout's request."""
        return self.tasks.create_task(
            self.pool.generate(request), name=f"request {request.request_id}"
        )

    def tell(self, what: str, detail: Mapping[str, Any]) -> None:
        self.events.append((what, detail))

    async def begin(self) -> None:
        """As a run starts."""

    def check(self) -> None:
        """Check the invariants between two steps."""

    def on_served(self, version: int) -> None:
        down = self.pool.down
        live = [
            fake
            for fake in self.fakes
            if fake.name not in down and not fake.has_ended.is_set()
        ]
        assert {fake.policy_version for fake in live} <= {version}
        assert all(fake.engine.weights.can_serve for fake in live)
        self.announced.append(version)

    def on_lost(self, error: EngineLost) -> None:
        self.supervisors[error.component].lost_nowait(error)
        assert error.component in self.pool.down, "down when the call returns"


class World(EngineRooms):
    """Stories whose engines time-share devices with a trainer."""

    publisher: Colocated

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        *,
        num_engines: int = 2,
        max_restarts: int = 20,
        stays: bool = False,
        has_server: bool = False,
        num_steps: int = 1000,
        at_start: Callable[[World], None] = lambda _: None,
        wait_released: Callable[[], Awaitable[None]] = at_once,
        **publishing: Any,
    ) -> None:
        """`has_server`: a server that scores rollouts time-shares, too. `at_start` is called
        before the first handover.
        """
        self.scorer = ColocatedServer()
        self.scoring = RoleClient(self.scorer, places=2, on_lost=self._scorer_lost)
        self.worker, self.stays, self._at_start = ColocatedTrainer(), stays, at_start
        self.worker_process = FakeProcess(self.worker, start_s=START_S)
        self.published: list[tuple[int, str]] = []
        self.batches: list[Batch] = []
        config = SupervisionConfig(max_restarts=max_restarts, backoff_s=0.1)
        trainer = SupervisedTrainer(
            [self.worker_process],
            Supervision(config, HEARTBEAT_S, print, self.tell),
            bring_back=self._bring_back,
        )
        super().__init__(
            tasks,
            [
                ColocatedEngine(f"engine-{index}", decode_s=DECODE_S, weights="w")
                for index in range(num_engines)
            ],
            trainer,
            config,
            partial(
                Colocated,
                num_steps=num_steps,
                servers=[self.scoring] if has_server else [],
                resident=stays,
                wait_released=wait_released,
            ),
            **{"on_published": self._published} | publishing,
        )
        trainer.start_within(self.publisher.device_for_trainer)
        self.has_server = has_server
        self._supervise_scorer(Supervision(config, HEARTBEAT_S, print, self.tell))
        self.running.insert(0, tasks.create_task(trainer.run(), name="watch trainer"))
        self.running.append(tasks.create_task(self._watch(), name="watch memory"))

    def _supervise_scorer(self, supervision: Supervision) -> None:
        """As job/servers.py does it."""
        process = FakeProcess(self.scorer, start_s=START_S)
        self.scorer_supervisor = Supervisor(
            [process],
            supervision,
            kind="reward",
            on_down=lambda _: self.scoring.disconnect_nowait(),
            on_start=self.scoring.reset_nowait,
            on_up=self.scoring.up_nowait,
        )
        room = partial(self.publisher.device_for_engine, "reward")
        self.scorer_supervisor.start_within(room)
        if self.has_server:
            watching = self.scorer_supervisor.run()
            self.running.append(self.tasks.create_task(watching, name="watch reward"))

    def _scorer_lost(self, error: EngineLost) -> None:
        self.scorer_supervisor.lost_nowait(error)

    async def score(self) -> None:
        """Ask for a reward, as a rollout does."""
        request = RewardRequest(messages=[], question="", completion="")
        await self.scoring.call("/reward", request, RewardResponse)

    async def _published(self, manifest: ExportResponse) -> None:
        self.published.append((manifest.version, manifest.digest))

    async def begin(self) -> None:
        """As a run starts: the engines are asleep until their first time slice, unless they
        stay.
        """
        for fake in () if self.stays else self.fakes:
            fake.engine.weights.set_asleep()
        if self.has_server:
            await self.scoring.sleep()
        self._at_start(self)
        await self.publisher.start(0)

    async def step(self) -> Any:
        """Train a batch like the train loop."""
        batch = make_batch(len(self.batches))
        self.batches.append(batch)
        await self.publisher.to_trainer()
        self.check()
        report = await self.trainer.train(batch)
        await self.publisher.to_engines(report.policy_version)
        return report

    def check(self) -> None:
        """Between two handovers only one side has memory on the device, in a handover
        both have their weights at most. Where both stay, the trainer never moves.
        """
        if self.stays:
            assert self.worker.away == set()
            return
        engines = set().union(*(fake.held for fake in self.fakes))
        engines |= self.scorer.held if self.has_server else set()
        trainer = self.worker.held
        lease = self.publisher.lease
        if lease.state == "idle" or lease.phase.startswith(
            ("trainer: offload", "engines: wake", "publisher")
        ):
            # a process that dies there recovers in parallel with the others' weights
            return
        if lease.state == "handover":
            engines = engines if trainer - {"weights"} else engines & {"kv", "model"}
            trainer = trainer
        assert not (trainer and engines), (
            f"the trainer has {trainer}, the engines {engines} ({lease!r})"
        )

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            self.check()

    async def _bring_back(self, client: TrainerClient, version: int) -> None:
        async def batches() -> Any:
            for batch in self.batches[:version]:
                yield batch

        await client.catch_up(None, batches(), lambda *_: None)


Rooms = TypeVar("Rooms", bound=EngineRooms)


def play(
    make: Callable[..., Rooms], story: Callable[[Rooms], Any], **knobs: Any
) -> Rooms:
    """Play a story in virtual time, and return its components."""

    async def story_of_a_run() -> Rooms:
        async with asyncio.TaskGroup() as tasks:
            rooms = make(tasks, **knobs)
            await rooms.begin()
            await story(rooms)
            rooms.check()
            for task in rooms.running:
                task.cancel()
        return rooms

    return run_virtual(story_of_a_run())


def play_to_its_error(
    make: Callable[..., Rooms], story: Callable[[Rooms], Any], **knobs: Any
) -> ComponentError:
    """Play a story that ends the run, and return with what."""
    with pytest.raises(ExceptionGroup) as caught:
        play(make, story, **knobs)
    return next(
        error for error in caught.value.exceptions if isinstance(error, ComponentError)
    )


def make_batch(version: int) -> Batch:
    """Return a group of one trajectory of one token."""
    trajectory = trajectory_of(
        0, [1, 2], [False, True], [0.0, -1.0], [VersionSpan(1, 2, version)], 1.0
    )
    return Batch(
        version,
        (Group(GroupId(version), Prompt(f"p{version}", ()), (trajectory,)),),
        version,
    )


def make_request(
    name: str = "r0", *, max_tokens: int = 20, seed: int = 1
) -> SamplingRequest:
    """A request of two prompt tokens."""
    return SamplingRequest(
        name, (ord("p"), ord("q")), max_tokens, temperature=1.0, seed=seed
    )

"""A run's rooms over fake servers that hang on request, with the watchdog over them, on the virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

from buffer_groups import make_buffer
from fake_engine import FakeEngineServer
from fake_server import FakeProcess, FakeTrainerServer
from pydantic import BaseModel
from rollout_cases import make_producers, single_turn

from asyncrl.base.http import Answer
from asyncrl.config import SupervisionConfig, TaskConfig
from asyncrl.engines.engine import EngineServer
from asyncrl.engines.pool import EnginePool
from asyncrl.job.report import reported
from asyncrl.job.trainer_recovery import SupervisedTrainer
from asyncrl.launch.supervise import Supervision
from asyncrl.messages.records import Batch, Prompt
from asyncrl.observe.watchdog import Watchdog
from asyncrl.sync.push import PushLoop
from asyncrl.tasks.scorer import Scorers
from asyncrl.testing.virtual_time import run_virtual
from asyncrl.trainer.trainer_client import TrainerClient

WATCHDOG_S = 60.0


class Engine(FakeEngineServer):
    """An engine server whose calls to the paths in `hung` are never answered; /link gives no tokens."""

    hung: tuple[str, ...] = ()

    async def post(self, path: str, body: Any, answer: type[Answer], *, timeout_s: float | None) -> Answer:
        if path in self.hung:
            await asyncio.Event().wait()
        return await super().post(path, body, answer, timeout_s=timeout_s)

    @property
    def answers_links(self) -> bool:
        return super().answers_links and "/link" not in self.hung


class Worker(FakeTrainerServer):
    """A trainer worker whose step `hangs_at`, and each one after it, is never done; it answers /health all
    the same.
    """

    hangs_at = 10**9

    async def _work(self, path: str, body: Any) -> BaseModel:
        if path == "/train" and self.policy_version >= self.hangs_at:
            await asyncio.Event().wait()
        return await super()._work(path, body)


class House:
    """The rooms of a run, real ones over fake servers, and the watchdog over them. `told` is what it said."""

    def __init__(
        self, tasks: asyncio.TaskGroup, log_path: Path, *, on_stuck: str = "warn", num_steps: int = 1000
    ) -> None:
        self.told: list[tuple[float, str]] = []
        self.notes: list[tuple[str, Mapping[str, Any]]] = []
        self.restarted_s: list[float] = []
        self.reward: Callable[[], float] = lambda: 0.0
        self.num_steps = num_steps
        self.batches: list[Batch] = []
        self.worker, self.servers = Worker(), [Engine(f"engine-{index}", decode_s=0.1) for index in range(2)]
        self.worker.export_s = 0.0
        targets = [EngineServer(server) for server in self.servers]
        pool = EnginePool(targets, slots=4)
        buffer = make_buffer(num_batches=num_steps)
        task = TaskConfig(python="a:B", reward_pool="inline", reward_timeout_s=1e9)
        scorer = Scorers({"": cast("Any", SimpleNamespace(score=self._score))}, {"": task}, seed=0)
        generator = single_turn(pool, scorer, max_tokens=8)
        producers = make_producers(buffer, tasks.create_task, generator, timeout_s=None)
        self.trainer_process = FakeProcess(self.worker)
        trainer = SupervisedTrainer(
            [self.trainer_process],
            Supervision(SupervisionConfig(max_restarts=1), 3.0, print, print),
            before_start=AsyncMock(),
            bring_back=self._bring_back,
        )
        publisher = PushLoop(
            trainer, targets, interrupt="abort", timeout_s=1e9, on_served=buffer.set_served_nowait
        )
        no_gauges = SimpleNamespace(gauges=dict)
        fleet = SimpleNamespace(servers=(), side_servers=(), engine_servers=(), teacher=None, supervisors={})
        scale = SimpleNamespace(gauges=dict, engines=())
        self.rooms: Any = SimpleNamespace(
            fleet=fleet,
            buffer=buffer,
            producers=producers,
            engines=pool,
            trainer=trainer,
            scheduler=publisher,
            scorer=no_gauges,
            checkpointer=no_gauges,
            scale=scale,
            evaluation=None,
            harnessing=None,
        )
        self.watchdog = Watchdog(
            SupervisionConfig.model_validate({"watchdog_s": WATCHDOG_S, "on_stuck": on_stuck}),
            lambda: reported(self.rooms),
            log_path=log_path,
            tell=lambda text: self.told.append((now(), text)),
            way_out="look at it.",
            ask_children=self._ask,
            restart=self._restart,
            note=lambda what, detail: self.notes.append((what, detail)),
        )
        self.children: dict[str, bool] = {}
        running = {
            "producers": producers.run(),
            "publisher": publisher.run(),
            "watch trainer": trainer.run(),
            "train loop": self._train(),
            "status": self._status(),
            "watchdog": self.watchdog.run(),
        }
        self._tasks = [tasks.create_task(coro, name=name) for name, coro in running.items()]

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self.rooms.producers.aclose()

    async def _score(self, prompt: Prompt, completion: str) -> float:
        await asyncio.sleep(self.reward())
        return float(len(completion))

    async def _train(self) -> None:
        while self.rooms.trainer.policy_version < self.num_steps:
            batch = await self.rooms.buffer.wait_batch()
            self.batches.append(batch)
            report = await self.rooms.trainer.train(batch)
            await self.rooms.scheduler.wait_exported_or_busy(report.policy_version)

    async def _bring_back(self, client: TrainerClient, version: int) -> None:
        """A new trainer takes its steps again."""
        await client.catch_up(None, self._taken(version), lambda *_: None)

    async def _taken(self, version: int) -> AsyncIterator[Batch]:
        for batch in self.batches[:version]:
            yield batch

    async def _status(self) -> None:
        while True:
            self.watchdog.look()
            await asyncio.sleep(1.0)

    async def _ask(self) -> dict[str, bool]:
        await asyncio.sleep(0.1)
        return self.children

    async def _restart(self) -> None:
        self.restarted_s.append(now())
        for server in self.servers:
            server.hung = ()


def now() -> float:
    return asyncio.get_running_loop().time()


def play(log_path: Path, seconds: float, prepare: Callable[[House], None], **options: Any) -> House:
    """What came of a run of so many virtual seconds; `prepare` spoils it."""

    async def story() -> House:
        async with asyncio.TaskGroup() as tasks:
            house = House(tasks, log_path, **options)
            prepare(house)
            await asyncio.sleep(seconds)
            await house.end()
        return house

    return run_virtual(story())

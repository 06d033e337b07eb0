"""A controller with 1,000, 10,000 and 100,000 rollouts in flight: memory, CPU, and how
long its loop stalls.

    python benchmarks/in_flight.py [--seconds S] [--sizes N ...] [--write]

The parts of a run in one loop, without a model: Producers, Buffer, RolloutRunner,
SingleTurn, EnginePool over the real link, Journal, PushLoop with interrupt=abort,
TrainerClient, metrics, watchdog and status.json. The trainer is a stub that answers at
once. 4 engine processes simulate latency. N rollouts sample at any moment, in groups of
8, with 32 tokens on average; a batch has N / 4 rollouts, so each rollout is interrupted
about 4 times. Each size runs in its own process, measured from its first weight update
for S seconds and at least two more updates.

memory    RSS with N in flight minus RSS before, over N; controller and engines
CPU       of the controller per finished rollout and per token; of the engines per rollout
stall     CPU milliseconds of the loop's thread during a 5 ms timer beyond those 5 ms. update: from the end of
          a batch's wait until the last interruption by its weights was handled; else: outside of that

Last line, ratio: CPU per rollout at the largest size over that at the smallest; 1 is
linear.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from common import child_server, options, printable_tokenizer, reported
from safetensors.numpy import save_file

from asyncrl.base.waits import run_in_thread
from asyncrl.buffer.buffer import Buffer
from asyncrl.config import BufferConfig, TaskConfig
from asyncrl.config.rollout_config import RolloutConfig
from asyncrl.config.supervision_config import SupervisionConfig
from asyncrl.engines.engine import EngineServer
from asyncrl.engines.link import OnChunk, OnInterrupted
from asyncrl.engines.pool import EnginePool
from asyncrl.job.lifecycle import rare_collections
from asyncrl.journal.journal import Journal
from asyncrl.launch.processes import ChildProcess
from asyncrl.messages.engine_api import EngineHealth
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.tokens import SegmentPart
from asyncrl.messages.trainer_api import ExportResponse, TrainResponse
from asyncrl.observe.metrics import SpecialTokens, batch_metrics
from asyncrl.observe.run_dir import Recorder
from asyncrl.observe.watchdog import Reported, Watchdog
from asyncrl.rollouts.late_rewards import LateRewards
from asyncrl.rollouts.producers import Producers
from asyncrl.rollouts.rollout import RolloutRunner, SingleTurn
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.sync.push import PushLoop
from asyncrl.tasks.prompt_source import PromptSource, TaskPrompts
from asyncrl.tasks.scorer import Scorers
from asyncrl.tasks.toy import Letters
from asyncrl.trainer.trainer_client import TrainerClient

ENGINES, GROUP, MEAN_TOKENS, MAX_TOKENS = 4, 8, 32, 256
PER_BATCH = 4
RATE = 500
"""Rollouts a second that the engines are set to end, at any size: what the machine can
keep up with.
"""
BEAT_S = 0.005
MIN_UPDATES = 2
SIZES = (1_000, 10_000, 100_000)


@dataclass
class Measured:
    in_flight: int
    counts: dict[str, float]
    """Increases of Controller.totals() in the window."""
    rss_bytes: int
    engines_rss_bytes: int
    update_ms: list[float]
    else_ms: list[float]


class Heartbeat:
    """Stalls of a timer of BEAT_S, by whether an update was under way."""

    def __init__(self, is_update: Callable[[], bool]) -> None:
        self._is_update = is_update
        self.stalls_ms: dict[bool, list[float]] = {True: [], False: []}

    async def run(self) -> None:
        while True:
            was_update = self._is_update()
            began = time.perf_counter()
            cpu = time.thread_time()
            await asyncio.sleep(BEAT_S)
            late_s = max(0.0, time.perf_counter() - began - BEAT_S)
            # At most the CPU time of the loop's thread: the rest is other processes'
            # time.
            busy_s = min(late_s, time.thread_time() - cpu)
            self.stalls_ms[was_update or self._is_update()].append(1e3 * busy_s)


class StandIn:
    """The worker behind TrainerClient: a step and an export take no time."""

    name = "trainer-0"

    def __init__(self, folder: Path) -> None:
        self.folder, self.version = folder, 0

    async def post(
        self, path: str, _: object, answer: type[Any], *, timeout_s: float | None
    ) -> Any:
        if path == "/train":
            self.version += 1
            return TrainResponse(
                policy_version=self.version, metrics={"policy/loss": 0.0}
            )
        assert path == "/export", path
        weights = {"w": np.full(4, self.version, np.float32)}
        file = self.folder / f"weights-{self.version % 2}.safetensors"
        save_file(weights, file)
        digest = "a digest"
        return ExportResponse(
            version=self.version,
            path=str(file),
            digest=digest,
            num_tensors=1,
            num_bytes=16,
        )

    async def aclose(self) -> None:
        pass


class Trainer(TrainerClient):
    """Never down."""

    is_up, num_restarts = True, 0

    async def wait_up(self) -> None:
        pass

    async def begin_export(self, above: int) -> int:
        return self.policy_version


class CountingServer(EngineServer):
    """Counts the interruptions that were handled."""

    num_interrupted = 0

    async def generate_segment(
        self,
        request: SamplingRequest,
        *,
        on_chunk: OnChunk | None = None,
        on_interrupted: OnInterrupted | None = None,
    ) -> SegmentPart:
        assert on_interrupted is not None
        tell = on_interrupted

        def counted(part: SegmentPart) -> bool:
            self.num_interrupted += 1
            return tell(part)

        return await super().generate_segment(
            request, on_chunk=on_chunk, on_interrupted=counted
        )


class Controller:
    """The parts of a run with `num` rollouts in flight."""

    def __init__(self, num: int, folder: Path) -> None:
        self.num, self.folder = num, folder
        self.children: list[ChildProcess] = []
        self.servers: list[CountingServer] = []
        self.num_updates = self._due_interruptions = 0
        self._is_pushing = False

    @property
    def interruptions(self) -> int:
        return sum(server.num_interrupted for server in self.servers)

    @property
    def is_update(self) -> bool:
        """Weights are on their way, or interruptions by them are not handled yet."""
        return self._is_pushing or self.interruptions < self._due_interruptions

    async def open(
        self, stack: contextlib.AsyncExitStack, spawn: Callable[..., Any]
    ) -> None:
        """Start the engines and make the parts; nothing samples yet."""
        tokenizer = HFChatTokenizer(printable_tokenizer(self.folder))
        for index in range(ENGINES):
            await self._start_engine(f"engine-{index}", tokenizer.vocab_size, stack)
        journal = await asyncio.to_thread(
            Journal, self.folder / "journal.sqlite", run_id="a run"
        )
        stack.push_async_callback(journal.aclose)
        self.journal = journal
        num_groups = self.num // PER_BATCH // GROUP
        staleness = 3 * PER_BATCH
        self.buffer = Buffer(
            BufferConfig(max_staleness=staleness, look_ahead=staleness),
            num_groups=num_groups,
            num_batches=10**6,
        )
        self.pool = EnginePool(self.servers, slots=self.num // ENGINES)
        config = TaskConfig(python="asyncrl.tasks.toy:Letters", reward_pool="inline")
        task = Letters(size=100_000, seed=0)
        scorers = Scorers({"": task}, {"": config}, tokenizer, seed=0)
        generator = SingleTurn(
            self.pool,
            tokenizer,
            scorers,
            run_seed=0,
            max_tokens=MAX_TOKENS,
            max_prompt_tokens=64,
        )
        self.producers = Producers(
            sink=self.buffer,
            source=PromptSource(TaskPrompts(task, seed=0, shuffle=True)),
            runner=RolloutRunner(generator, timeout_s=3600.0, retries=0),
            spawn=spawn,
            scorers=scorers,
            config=RolloutConfig(group_size=GROUP),
            capacity=self.num,
            journal=journal,
            late=LateRewards(journal, timeout_s=None),
            on_failed=lambda *_: None,
            on_finished=lambda _: None,
        )
        self.trainer = Trainer(StandIn(self.folder))  # type: ignore[arg-type]
        self.publisher = PushLoop(
            self.trainer,
            self.servers,
            timeout_s=600.0,
            on_lost=print,
            on_served=self.buffer.set_served_nowait,
            on_published=self._published,
        )
        self.recorder = Recorder(self.folder)

    async def _start_engine(
        self, name: str, vocab_size: int, stack: contextlib.AsyncExitStack
    ) -> None:
        spec = {
            "slots": self.num // ENGINES,
            "max_length": 1024,
            "vocab_size": vocab_size,
            "mean_tokens": MEAN_TOKENS,
            "sigma": 0.5,
            "decode_step_s": self.num / RATE / MEAN_TOKENS,
        }
        child, caller = await stack.enter_async_context(
            child_server(name, "asyncrl_simulated.simulated_engine", spec, self.folder)
        )
        await caller.get("/health", EngineHealth, timeout_s=60)
        self.children.append(child)
        self.servers.append(CountingServer(caller))

    async def _published(self, manifest: ExportResponse) -> None:
        self.journal.add_push_nowait(manifest.version, manifest.digest)
        self._due_interruptions += self.publisher.report.num_interrupted
        self._is_pushing = False
        self.num_updates += 1

    async def train(self) -> None:
        while True:
            batch = await self.buffer.wait_batch()
            await self.journal.add_batch(batch)
            self._is_pushing = True
            report = await self.trainer.train(batch)
            self.journal.add_training_nowait(batch.version, report.metrics)
            measured = await run_in_thread(batch_metrics, batch, SpecialTokens())
            self.recorder.record_step({"step": batch.version + 1, **measured})

    async def report_status(self) -> None:
        """Once a second, as job/loop.py and job/reporter.py do."""

        async def none() -> Any:
            return ()

        watchdog = Watchdog(
            SupervisionConfig(),
            lambda: Reported(self._gauges(), tuple(self.producers.oldest())),
            log_path=self.folder / "controller.log",
            tell=print,
            way_out="",
            ask_children=none,
            restart=none,
            note=self.journal.add_event_nowait,
        )
        while True:
            waits = watchdog.look()
            self.recorder.write_status(
                {"state": "running", **self._gauges(), "waits": waits}
            )
            await asyncio.sleep(1.0)

    def _gauges(self) -> dict[str, float]:
        parts = (self.buffer, self.producers, self.pool, self.publisher)
        return {name: value for part in parts for name, value in part.gauges().items()}

    def totals(self) -> dict[str, float]:
        """Return counts and seconds so far."""
        engines = [psutil.Process(child.pid).cpu_times() for child in self.children]
        return {
            "rollouts": self.producers.gauges()["rollout/finished"],
            "tokens": self.pool.gauges()["tokens/generated"],
            "updates": self.num_updates,
            "interruptions": self.interruptions,
            "wall_s": time.perf_counter(),
            "cpu_s": time.process_time(),
            "engines_cpu_s": sum(times.user + times.system for times in engines),
        }

    def rss_bytes(self) -> tuple[int, int]:
        """Return the resident memory of this process and of all engines."""
        engines = [
            psutil.Process(child.pid).memory_info().rss for child in self.children
        ]
        return psutil.Process().memory_info().rss, sum(engines)


async def measure(num: int, seconds: float, folder: Path) -> Measured:
    """Measure one size in this process."""
    async with contextlib.AsyncExitStack() as stack:
        group = asyncio.TaskGroup()
        controller = Controller(num, folder)
        tasks: list[asyncio.Task[Any]] = []
        async with group:

            def spawn(coro: Any, *, name: str) -> asyncio.Task[Any]:
                return group.create_task(coro, name=name)

            await controller.open(stack, spawn)
            stack.enter_context(rare_collections())
            rss_bytes, engines_rss_bytes = controller.rss_bytes()
            heartbeat = Heartbeat(lambda: controller.is_update)
            for name, coro in (
                ("producers", controller.producers.run()),
                ("train loop", controller.train()),
                ("publisher", controller.publisher.run()),
                ("status", controller.report_status()),
                ("heartbeat", heartbeat.run()),
            ):
                tasks.append(spawn(coro, name=name))
            await until(lambda: controller.num_updates > 0 and not controller.is_update)
            heartbeat.stalls_ms = {True: [], False: []}
            began = controller.totals()
            deadline = time.perf_counter() + seconds
            await until(
                lambda: (
                    time.perf_counter() >= deadline
                    and controller.num_updates >= began["updates"] + MIN_UPDATES
                    and not controller.is_update
                )
            )
            ended = controller.totals()
            held_bytes, engines_held_bytes = controller.rss_bytes()
            for task in tasks:
                task.cancel()
            await controller.producers.aclose()
    return Measured(
        in_flight=num,
        counts={name: value - began[name] for name, value in ended.items()},
        rss_bytes=held_bytes - rss_bytes,
        engines_rss_bytes=engines_held_bytes - engines_rss_bytes,
        update_ms=sorted(heartbeat.stalls_ms[True]),
        else_ms=sorted(heartbeat.stalls_ms[False]),
    )


async def until(is_over: Callable[[], bool]) -> None:
    while not is_over():  # noqa: ASYNC110  of figures that wake no one
        await asyncio.sleep(0.05)


COLUMNS = (
    "in flight,kB each,engines,CPU ms,engines,us/token,rollouts,interr.,updates".split(
        ","
    )
)


def show(one: Measured) -> None:
    """Print the lines of one size."""
    counts = one.counts
    values = (
        f"{one.in_flight:,}",
        f"{1e-3 * one.rss_bytes / one.in_flight:.1f}",
        f"{1e-3 * one.engines_rss_bytes / one.in_flight:.1f}",
        f"{1e3 * counts['cpu_s'] / counts['rollouts']:.2f}",
        f"{1e3 * counts['engines_cpu_s'] / counts['rollouts']:.2f}",
        f"{1e6 * counts['cpu_s'] / counts['tokens']:.0f}",
        f"{counts['rollouts']:,.0f}",
        f"{counts['interruptions'] / counts['rollouts']:.1f}",
        f"{counts['updates']:.0f}",
    )
    print("".join(f"{value:>10}" for value in values))
    for name, stalls_ms in (("update", one.update_ms), ("else", one.else_ms)):
        places = [
            min(len(stalls_ms) - 1, int(part * len(stalls_ms)))
            for part in (0.5, 0.99, 1.0)
        ]
        shown = ", ".join(f"{stalls_ms[place]:.1f}" for place in places)
        print(
            f"{'':>10}stall, {name}: {shown} ms (median, p99, max of {len(stalls_ms):,})"
        )


def main() -> None:
    parser = options(__doc__, seconds=30.0)
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=SIZES, help="rollouts in flight"
    )
    parser.add_argument(
        "--only", type=int, help="measure this size here, and print the result"
    )
    given = parser.parse_args()
    if given.only:
        logging.disable(logging.WARNING)
        with tempfile.TemporaryDirectory(prefix="asyncrl-in-flight-") as name:
            print(
                json.dumps(
                    asdict(asyncio.run(measure(given.only, given.seconds, Path(name))))
                )
            )
        return
    with reported("in_flight", is_kept=given.write):
        print("".join(f"{column:>10}" for column in COLUMNS))
        cost = []
        for num in given.sizes:
            command = [
                sys.executable,
                __file__,
                "--only",
                str(num),
                "--seconds",
                str(given.seconds),
            ]
            done = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, check=True
            )
            one = Measured(**json.loads(done.stdout.splitlines()[-1]))
            show(one)
            cost.append(one.counts["cpu_s"] / one.counts["rollouts"])
        print(
            "goal: p99 of a stall during an update <= 50 ms; the same cost per rollout at each size"
        )
        print(f"ratio: {cost[-1] / cost[0]:.2f}")


if __name__ == "__main__":
    main()

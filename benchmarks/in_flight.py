"""A controller with 1,000, 10,000 and 100,000 rollouts in flight: memory, CPU, how long its loop stands
still.

    python benchmarks/in_flight.py [--seconds S] [--sizes N ...] [--write]

The parts of a run as they are, one loop, and no model: Producers, Buffer, RolloutRunner, SingleTurn with a
tokenizer of one token a character, EnginePool over the real link, Journal in an SQLite file, Publisher
(prepare, then commit with interrupt=abort, on all engines), TrainerClient, which packs each batch, the
step's metrics, and the watchdog's look and status.json once a second. The trainer alone is stood in for: it
answers at once. Engines: 4 processes with a latency model, a quarter of the slots each. N rollouts sample at
any moment, in groups of 8, answers of 32 tokens on average (lognormal, sigma 0.5); a batch has N / 4
rollouts, so that each rollout is interrupted some 4 times, whatever N is. Each size is a process of its own,
measured from its first weight update until about S seconds later, two more updates at least.

memory          RSS with N in flight less RSS before the first, over N; of the 4 engines beside it
CPU             of the controller's process, all its threads, over rollouts that ended and over tokens that
                were sampled meanwhile; of the engines beside it
stall           how much later than after 5 ms a timer of 5 ms comes: in CPU time of the loop's thread, which
                a busy machine does not lengthen, and in wall time, which has what other processes took.
                update: from the end of a batch's wait until the last interruption by its weights was handled;
                else: outside of that

Last line, ratio: CPU a rollout at the largest size over that at the smallest; 1 is linear.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from report import options, reported
from safetensors.numpy import save_file

from asyncrl.base.http import Caller
from asyncrl.base.waits import computed
from asyncrl.buffer.buffer import Buffer
from asyncrl.config import BufferConfig, SupervisionConfig, TaskConfig
from asyncrl.engines.engine import EngineServer
from asyncrl.engines.link import OnChunk, OnInterrupted
from asyncrl.engines.pool import EnginePool
from asyncrl.job.lifecycle import rare_collections
from asyncrl.journal.journal import Journal
from asyncrl.launch.processes import ChildProcess, ProcessSpec
from asyncrl.messages.digest import weights_digest
from asyncrl.messages.engine_api import EngineHealth, GenerateRequest, GenerateResponse
from asyncrl.messages.trainer_api import ExportResponse, TrainResponse
from asyncrl.observe.metrics import SpecialTokens, batch_metrics
from asyncrl.observe.run_dir import Recorder
from asyncrl.observe.watchdog import Reported, Watchdog
from asyncrl.rollouts.generators import EncodedPrompts, SingleTurn
from asyncrl.rollouts.producers import Producers
from asyncrl.rollouts.rollout import RolloutRunner
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.sync.publisher import PushLoop
from asyncrl.tasks.prompt_source import PromptSource, TaskPrompts
from asyncrl.tasks.scorer import TaskScorer
from asyncrl.tasks.toy import Letters
from asyncrl.trainer.model.random_init import make_character_tokenizer
from asyncrl.trainer.trainer_client import TrainerClient

ENGINES, GROUP, MEAN_TOKENS, MAX_TOKENS = 4, 8, 32, 256
PER_BATCH = 4
"""A batch has one of so many of the rollouts in flight."""
RATE = 500
"""Rollouts a second that the engines are set to end, at any size: what the machine can keep up with."""
BEAT_S = 0.005
MIN_UPDATES = 2
SIZES = (1_000, 10_000, 100_000)


@dataclass
class Measured:
    """Of one size. Stalls: sorted milliseconds."""

    in_flight: int
    rollouts: int
    tokens: int
    updates: int
    interruptions: int
    wall_s: float
    cpu_s: float
    loop_cpu_s: float
    engines_cpu_s: float
    rss_bytes: int
    engines_rss_bytes: int
    update_cpu_ms: list[float]
    update_wall_ms: list[float]
    else_cpu_ms: list[float]
    else_wall_ms: list[float]


class Heartbeat:
    """How late a timer of BEAT_S comes, beat after beat; `is_update` says which list a beat belongs to."""

    def __init__(self, is_update: Callable[[], bool]) -> None:
        self._is_update = is_update
        self.beats: dict[bool, list[tuple[float, float]]] = {True: [], False: []}

    async def run(self) -> None:
        while True:
            was_update, began, cpu = self._is_update(), time.perf_counter(), time.thread_time()
            await asyncio.sleep(BEAT_S)
            late_s = max(0.0, time.perf_counter() - began - BEAT_S)
            # No later than the loop's thread was busy: the rest is what others took of the machine.
            busy_s = min(late_s, time.thread_time() - cpu)
            self.beats[was_update or self._is_update()].append((1e3 * busy_s, 1e3 * late_s))

    def stalls(self, *, in_update: bool) -> tuple[list[float], list[float]]:
        cpu, wall = zip(*self.beats[in_update], strict=True) if self.beats[in_update] else ((0.0,), (0.0,))
        return sorted(cpu), sorted(wall)


class StandIn:
    """The worker behind TrainerClient: a step and an export take no time."""

    name = "trainer-0"

    def __init__(self, folder: Path) -> None:
        self.folder, self.version = folder, 0

    async def post(self, path: str, _: object, answer: type[Any], *, timeout_s: float | None) -> Any:
        if path == "/train":
            self.version += 1
            return TrainResponse(policy_version=self.version, metrics={"policy/loss": 0.0})
        assert path == "/export", path
        weights = {"w": np.full(4, self.version, np.float32)}
        file = self.folder / f"weights-{self.version % 2}.safetensors"
        save_file(weights, file)
        digest = weights_digest([("w", "float32", (4,), weights["w"].tobytes())])
        return ExportResponse(
            version=self.version, path=str(file), digest=digest, num_tensors=1, num_bytes=16
        )

    async def aclose(self) -> None:
        pass


class Trainer(TrainerClient):
    """Never down."""

    is_up, num_restarts = True, 0

    async def wait_up(self) -> None:
        pass

    async def begin_export(self) -> int:
        return self.policy_version


class CountingServer(EngineServer):
    """Counts the interruptions that were handled."""

    num_interrupted = 0

    async def generate_segment(
        self,
        request: GenerateRequest,
        *,
        on_chunk: OnChunk | None = None,
        on_interrupted: OnInterrupted | None = None,
    ) -> GenerateResponse:
        assert on_interrupted is not None
        tell = on_interrupted

        def counted(part: GenerateResponse) -> bool:
            self.num_interrupted += 1
            return tell(part)

        return await super().generate_segment(request, on_chunk=on_chunk, on_interrupted=counted)


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

    async def open(self, stack: contextlib.AsyncExitStack, spawn: Callable[..., Any]) -> None:
        """Start the engines and make the parts; nothing samples yet."""
        tokenizer = make_character_tokenizer("".join(map(chr, range(32, 127))) + "\n")
        tokenizer.save_pretrained(self.folder / "tokenizer")
        (self.folder / "tokenizer" / "config.json").write_text("{}")
        prompts = EncodedPrompts(HFChatTokenizer(self.folder / "tokenizer"))
        for index in range(ENGINES):
            await self._start_engine(f"engine-{index}", prompts.tokenizer.vocab_size, stack)
        journal = await asyncio.to_thread(Journal.open, self.folder / "journal.sqlite", run_id="a run")
        stack.push_async_callback(journal.aclose)
        self.journal = journal
        num_groups = self.num // PER_BATCH // GROUP
        staleness = 3 * PER_BATCH
        self.buffer = Buffer(
            BufferConfig(max_staleness=staleness, look_ahead=staleness),
            num_groups=num_groups,
            num_batches=10**6,
            on_requeued=lambda *group: self.producers.requeued(*group),
        )
        self.pool = EnginePool(self.servers, slots=self.num // ENGINES)
        config = TaskConfig(python="asyncrl.tasks.toy:Letters", reward_pool="inline")
        task = Letters(size=100_000, seed=0)
        generator = SingleTurn(
            self.pool,
            prompts,
            TaskScorer(task, config, seed=0),
            run_seed=0,
            max_tokens=MAX_TOKENS,
            max_prompt_tokens=64,
            temperature=1.0,
        )
        self.producers = Producers(
            self.buffer,
            PromptSource(TaskPrompts(task, seed=0, shuffle=True)),
            RolloutRunner(generator, timeout_s=3600.0, retries=0),
            spawn=spawn,
            group_size=GROUP,
            capacity=self.num,
            max_failed_groups=16,
            max_requeues=3,
            journal=journal,
        )
        self.trainer = Trainer(StandIn(self.folder))  # type: ignore[arg-type]
        self.publisher = PushLoop(
            self.trainer,
            self.servers,
            timeout_s=600.0,
            on_served=self.buffer.set_served_nowait,
            on_published=self._published,
        )
        self.recorder = Recorder(self.folder)
        stack.callback(self.recorder.close)

    async def _start_engine(self, name: str, vocab_size: int, stack: contextlib.AsyncExitStack) -> None:
        secret, step_s = secrets.token_hex(16), self.num / RATE / MEAN_TOKENS
        spec = {"name": name, "slots": self.num // ENGINES, "max_length": 1024, "vocab_size": vocab_size}
        spec |= {"mean_tokens": MEAN_TOKENS, "sigma": 0.5, "decode_step_s": step_s, "per_row_s": 0.0}
        module = "asyncrl_servers.simulated"
        child = ChildProcess(ProcessSpec(name, module, json.dumps(spec), self.folder, secret))
        await child.start()
        stack.push_async_callback(child.aclose)
        caller = Caller(name, child.url, secret)
        stack.push_async_callback(caller.aclose)
        await caller.get("/health", EngineHealth, timeout_s=60)
        self.children.append(child)
        self.servers.append(CountingServer(caller))

    async def _published(self, manifest: ExportResponse) -> None:
        self.journal.published_nowait(manifest.version, manifest.digest)
        self._due_interruptions += self.publisher.report.num_interrupted
        self._is_pushing = False
        self.num_updates += 1

    async def train(self) -> None:
        """The train loop, as job/loop.py has it."""
        while True:
            batch = await self.buffer.wait_batch()
            await self.journal.batch_taken(batch)
            self._is_pushing = True
            report = await self.trainer.train(batch)
            self.journal.trained_nowait(batch.version, report.metrics)
            measured = await computed(batch_metrics, batch, SpecialTokens())
            self.recorder.record_step({"step": batch.version + 1, **measured})

    async def report_status(self) -> None:
        """Once a second, as job/loop.py and job/report.py do."""

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
            note=self.journal.event_nowait,
        )
        while True:
            waits = list(map(asdict, watchdog.look()))
            self.recorder.write_status({"state": "running", **self._gauges(), "waits": waits})
            await asyncio.sleep(1.0)

    def _gauges(self) -> dict[str, float]:
        parts = (self.buffer, self.producers, self.pool, self.publisher)
        return {name: value for part in parts for name, value in part.gauges().items()}


def engines_of(controller: Controller) -> tuple[float, int]:
    """(CPU seconds, RSS bytes) of all engines."""
    processes = [psutil.Process(child.pid) for child in controller.children]
    times = [process.cpu_times() for process in processes]
    return sum(one.user + one.system for one in times), sum(one.memory_info().rss for one in processes)


async def measure(num: int, seconds: float, folder: Path) -> Measured:
    """One size in this process."""
    me = psutil.Process()
    async with contextlib.AsyncExitStack() as stack:
        group = asyncio.TaskGroup()
        controller = Controller(num, folder)
        tasks: list[asyncio.Task[Any]] = []
        async with group:

            def spawn(coro: Any, *, name: str) -> asyncio.Task[Any]:
                return group.create_task(coro, name=name)

            await controller.open(stack, spawn)
            stack.enter_context(rare_collections())
            rss, engines_rss = me.memory_info().rss, engines_of(controller)[1]
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
            heartbeat.beats = {True: [], False: []}
            began = Totals.of(controller)
            updates, deadline = controller.num_updates, time.perf_counter() + seconds
            await until(
                lambda: (
                    time.perf_counter() >= deadline
                    and controller.num_updates >= updates + MIN_UPDATES
                    and not controller.is_update
                )
            )
            ended = Totals.of(controller)
            in_flight_rss, in_flight_engines = me.memory_info().rss, engines_of(controller)[1]
            for task in tasks:
                task.cancel()
            await controller.producers.aclose()
    update_cpu, update_wall = heartbeat.stalls(in_update=True)
    else_cpu, else_wall = heartbeat.stalls(in_update=False)
    return Measured(
        in_flight=num,
        rollouts=ended.rollouts - began.rollouts,
        tokens=ended.tokens - began.tokens,
        updates=controller.num_updates - updates,
        interruptions=ended.interruptions - began.interruptions,
        wall_s=ended.wall_s - began.wall_s,
        cpu_s=ended.cpu_s - began.cpu_s,
        loop_cpu_s=ended.loop_cpu_s - began.loop_cpu_s,
        engines_cpu_s=ended.engines_cpu_s - began.engines_cpu_s,
        rss_bytes=in_flight_rss - rss,
        engines_rss_bytes=in_flight_engines - engines_rss,
        update_cpu_ms=update_cpu,
        update_wall_ms=update_wall,
        else_cpu_ms=else_cpu,
        else_wall_ms=else_wall,
    )


@dataclass
class Totals:
    """So far."""

    rollouts: int
    tokens: int
    interruptions: int
    wall_s: float
    cpu_s: float
    loop_cpu_s: float
    engines_cpu_s: float

    @classmethod
    def of(cls, controller: Controller) -> Totals:
        return cls(
            rollouts=int(controller.producers.gauges()["rollout/finished"]),
            tokens=int(controller.pool.gauges()["tokens/generated"]),
            interruptions=controller.interruptions,
            wall_s=time.perf_counter(),
            cpu_s=time.process_time(),
            loop_cpu_s=time.thread_time(),
            engines_cpu_s=engines_of(controller)[0],
        )


async def until(is_over: Callable[[], bool]) -> None:
    while not is_over():  # noqa: ASYNC110  of figures that wake no one
        await asyncio.sleep(0.05)


def at(values: Sequence[float], fraction: float) -> float:
    """That quantile of sorted values."""
    return values[min(len(values) - 1, int(fraction * len(values)))]


def show(one: Measured) -> None:
    """Three lines."""
    each, kb = 1e3 / one.rollouts, 1e-3 / one.in_flight
    print(
        f"{one.in_flight:>9,}{kb * one.rss_bytes:>9.1f}{kb * one.engines_rss_bytes:>9.1f}"
        f"{each * one.cpu_s:>12.2f}{each * one.loop_cpu_s:>9.2f}{each * one.engines_cpu_s:>9.2f}"
        f"{1e6 * one.cpu_s / one.tokens:>9.0f}{one.rollouts:>10,}{one.interruptions / one.rollouts:>8.1f}"
        f"{one.updates:>8}{one.wall_s:>8.0f}"
    )
    for what, cpu, wall in (
        ("update", one.update_cpu_ms, one.update_wall_ms),
        ("else", one.else_cpu_ms, one.else_wall_ms),
    ):
        shown = [f"{at(cpu, f):>8.1f}{at(wall, f):>9.1f}" for f in (0.5, 0.99, 1.0)]
        print(f"{'':>12}{what:<8}{'|'.join(shown)}   {len(cpu):,} beats")


def main() -> None:
    parser = options(__doc__, seconds=30.0)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="rollouts in flight")
    parser.add_argument("--only", type=int, help="measure this size here, and print what was measured")
    given = parser.parse_args()
    if given.only:
        logging.disable(logging.WARNING)
        with tempfile.TemporaryDirectory(prefix="asyncrl-in-flight-") as name:
            print(json.dumps(asdict(asyncio.run(measure(given.only, given.seconds, Path(name))))))
        return
    with reported("in_flight", is_kept=given.write):
        print(
            f"{'in':>9}{'kB a rollout':>18}{'ms CPU a rollout':>30}{'us CPU':>9}{'rollouts':>10}"
            f"{'interr.':>8}"
        )
        print(
            f"{'flight':>9}{'contr.':>9}{'engines':>9}{'controller':>12}{'loop':>9}{'engines':>9}"
            f"{'a token':>9}{'ended':>10}{'each':>8}{'updates':>8}{'wall s':>8}"
        )
        print(f"{'':>12}{'stall, ms':<8}: CPU and wall: median | p99 | max")
        cost = []
        for num in given.sizes:
            command = [sys.executable, __file__, "--only", str(num), "--seconds", str(given.seconds)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            one = Measured(**json.loads(done.stdout.splitlines()[-1]))
            show(one)
            cost.append(one.cpu_s / one.rollouts)
        print("goal: stall p99 of 50 ms or less during an update; a rollout costs the same at each size")
        print(f"ratio: {cost[-1] / cost[0]:.2f}")


if __name__ == "__main__":
    main()

"""Cost of colocation: handovers against a memory copy of the moved bytes, and peak memory against separate
processes.

One trainer and one embedded engine with a random model of 135 million parameters in float32. Each turn
samples a few completions, hands the device to the trainer, takes an optimizer step and hands the device back
with the new weights, through the product's own lease, pushes and clients. Repeated for each chunk size, and
once without sharing.

    python benchmarks/colocation.py [--seconds 60] [--chunk-mib 16 64 256] [--device cpu]

`moved`: bytes that a turn copies (optimizer and weights off the device and back, and the push). `copy`: a
copy of that size between warm buffers. `new pages`: a copy onto newly allocated memory. `cpu ratio`: CPU time
of the handovers over that of the copy. CPU memory is the sum of the processes' proportional set sizes. The
first turn is a warm-up and is not in the medians.

Last line: `ratio: X` = median seconds of both handovers over the memory copy, for the last chunk size.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch
from random_model import llama_135m
from report import options, reported
from transformers.utils.logging import disable_progress_bar

from asyncrl.base.staging import clear_stale_staging, new_staging_dir, remove_staging_dir
from asyncrl.config import RunConfig, SupervisionConfig
from asyncrl.engines.pool import EnginePool
from asyncrl.job.build import load_tokenizer
from asyncrl.job.colocate import Colocated, Disaggregated, WeightScheduler
from asyncrl.job.servers import Servers
from asyncrl.job.supervised_trainer import SupervisedTrainer
from asyncrl.launch.devices import place
from asyncrl.launch.launchers import LocalLauncher
from asyncrl.launch.nodes import single_node
from asyncrl.launch.server import Server, start_all
from asyncrl.launch.supervise import Supervision
from asyncrl.messages.records import Batch, Completion, Group, GroupId, Prompt, SamplingRequest, Trajectory
from asyncrl.sync.publisher import ColocatedPush, Publisher, PushLoop
from asyncrl.sync.push import PushReport

MIB = 2**20
SLOTS, MAX_TOKENS, MAX_PROMPT_TOKENS = 16, 480, 32
NUM_SAMPLES, NUM_TOKENS = 4, 16
MIN_TURNS = 3
SAMPLE_S = 0.05
COPY_BYTES = 512 * MIB


@dataclass
class Memory:
    """Bytes of the processes over time: (seconds, trainer, engine), sampled by a thread from their start
    on.
    """

    servers: Sequence[Server]
    device: str
    samples: list[tuple[float, int, int]] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)

    def peak(self, since_s: float = 0.0) -> int:
        """Of both together."""
        return max((trainer + engine for at_s, trainer, engine in self.samples if at_s >= since_s), default=0)

    def cpu_s(self) -> float:
        """CPU time of both so far: on a machine with other work the steadier figure."""
        spent = [psutil.Process(server.child.pid).cpu_times() for server in self.servers]
        return sum(times.user + times.system for times in spent)

    @contextlib.contextmanager
    def sampled(self) -> Any:
        """Sample as long as the block runs."""
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            thread.join()

    def _run(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            trainer, engine = (
                [server for server in self.servers if server.name.startswith(side)]
                for side in ("trainer", "engine")
            )
            if self.device == "cuda":
                held = _cuda_bytes()
                sizes = [
                    sum(held.get(server.child.pid or -1, 0) for server in side) for side in (trainer, engine)
                ]
                sizes = sizes if any(sizes) else [held[0], 0]
            else:
                sizes = [sum(_pss_bytes(server.child.pid) for server in side) for side in (trainer, engine)]
            self.samples.append((time.perf_counter(), *sizes))  # type: ignore[arg-type]


Spent = tuple[float, float]
"""Wall seconds and CPU seconds. CPU seconds are steadier on a busy machine."""


def spent(work: Callable[[], object]) -> Spent:
    started, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - started, time.process_time() - cpu


def copy_costs(num_bytes: int, device: torch.device) -> tuple[Spent, Spent]:
    """Return the cost of a copy onto warm memory and onto new pages; on CUDA, to pinned memory for both."""
    if device.type == "cuda":
        source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
        target = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=True)
    else:
        source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.ones(num_bytes, dtype=torch.uint8)

    def copy_to(target: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
        if source.is_cuda:
            torch.cuda.synchronize()

    warm = sorted(spent(lambda: copy_to(target)) for _ in range(3))[1]
    return warm, warm if device.type == "cuda" else spent(
        lambda: copy_to(torch.empty(num_bytes, dtype=torch.uint8))
    )


def _pss_bytes(pid: int | None) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _cuda_bytes() -> dict[int, int]:
    """By process, as nvidia-smi says; all of the device under 0, for containers, where it names none of our
    processes.
    """
    import subprocess

    def ask(query: str) -> list[list[str]]:
        command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        return [[cell.strip() for cell in line.split(",")] for line in lines]

    rows = ask("--query-compute-apps=pid,used_memory")
    held = {int(pid): int(used) * MIB for pid, used in rows if pid.isdigit() and used.isdigit()}
    return held | {0: sum(int(used) * MIB for (used,) in ask("--query-gpu=memory.used"))}


@dataclass
class Case:
    """What came of one way of running. Seconds and bytes of each turn; no bytes apart."""

    name: str
    memory: Memory
    to_trainer_s: list[float] = field(default_factory=list)
    to_engines_s: list[float] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)
    phases: list[Mapping[str, float]] = field(default_factory=list)
    ready_s: float = 0.0
    first_s: float = 0.0
    """Both handovers of the first turn, which is in no list."""
    cpu_s: list[float] = field(default_factory=list)
    """CPU time of both processes in both handovers, the kernel's for them included."""

    @property
    def handover_s(self) -> float:
        """Both ways, median of the turns."""
        return median(to + back for to, back in zip(self.to_trainer_s, self.to_engines_s, strict=True))


def make_config(model: Path, device: str, chunk_bytes: int, *, is_shared: bool) -> RunConfig:
    """One trainer, one engine."""
    placement = {"trainer": device, "rollout": "trainer" if is_shared else device}
    return RunConfig.model_validate(
        {
            "model": {"path": str(model), "dtype": "float32"},
            "task": {"python": "asyncrl.tasks.toy:Letters"},
            "rollout": {
                "slots": SLOTS,
                "max_tokens": MAX_TOKENS,
                "max_prompt_tokens": MAX_PROMPT_TOKENS,
                "threads": 1,
            },
            "buffer": {"max_staleness": 0},
            "trainer": {"threads": 1, "num_groups": 1, "num_steps": 100_000},
            "weight_sync": {"transport": "shm", "chunk_bytes": chunk_bytes},
            "placement": placement,
        }
    )


@dataclass
class House:
    """The rooms that a turn needs, over real processes."""

    trainer: SupervisedTrainer
    pool: EnginePool
    publisher: Publisher
    turns: WeightScheduler
    memory: Memory
    phases: dict[str, Mapping[str, Any]]
    """The last event of each phase of a handover, by the phase's name."""


@contextlib.asynccontextmanager
async def house(config: RunConfig, model: Path, folder: Path, device: str) -> AsyncIterator[House]:
    """Started as a run starts them, wired as a run wires them; ended at the end."""
    staging, tasks = new_staging_dir(), list[asyncio.Task[None]]()
    placement = place(config, single_node())
    is_shared = placement.mode == "colocated"
    launcher = LocalLauncher()
    servers = Servers(config, placement, model, folder, launcher)
    trainers = servers.trainers(staging)
    engines = servers.engines()
    tokenizer = load_tokenizer(config, model)
    targets = [servers.client(server, tokenizer, print) for server in engines]
    memory, phases = Memory((*trainers, *engines), device), dict[str, Mapping[str, Any]]()

    def on_event(what: str, detail: Mapping[str, Any]) -> None:
        if what == "handover phase":
            phases[detail["phase"]] = detail

    try:
        with memory.sampled():
            await start_all(engines)
            if is_shared:
                await asyncio.gather(*(target.sleep(["kv", "weights"]) for target in targets))
            await start_all(trainers)
            trainer = SupervisedTrainer(
                trainers,
                Supervision(SupervisionConfig(max_restarts=0), 600.0, print, lambda *_: None),
                before_start=_at_once,
                bring_back=_never,
            )
            common: dict[str, Any] = {"timeout_s": 600.0, "on_served": lambda _: None}
            publisher: Publisher
            turns: WeightScheduler
            if is_shared:
                publisher = push = ColocatedPush(trainer, targets, **common)
                turns = Colocated(
                    targets,
                    trainer,
                    push,
                    num_steps=config.trainer.num_steps,
                    timeout_s=600.0,
                    on_lost=None,
                    on_event=on_event,
                )
            else:
                publisher = loop = PushLoop(trainer, targets, interrupt="abort", **common)

                def spawn(coro: Any, *, name: str) -> None:
                    tasks.append(asyncio.create_task(coro, name=name))

                turns = Disaggregated(loop, num_steps=config.trainer.num_steps, spawn=spawn)
            await turns.start(0)
            yield House(trainer, EnginePool(targets, slots=SLOTS), publisher, turns, memory, phases)
    finally:
        for task in tasks:
            task.cancel()
        for server in (*trainers, *engines):
            await server.aclose()
        remove_staging_dir(staging)


async def _at_once() -> None:
    pass


async def _never(_: Any, version: int) -> None:
    raise AssertionError(f"nothing is started again here, so nobody goes back to {version}")


async def generate(pool: EnginePool, version: int) -> list[Completion]:
    """A few completions of made-up prompts."""
    requests = [
        SamplingRequest(
            f"v{version}s{index}", tuple(range(10, 26)), NUM_TOKENS, 1.0, seed=1000 * version + index
        )
        for index in range(NUM_SAMPLES)
    ]
    return list(await asyncio.gather(*(pool.generate(request) for request in requests)))


def make_batch(version: int, completions: Sequence[Completion]) -> Batch:
    """One group of them, with made-up rewards."""
    trajectories = []
    for index, completion in enumerate(completions):
        num_prompt, num_sampled = 16, len(completion.token_ids)
        trajectories.append(
            Trajectory(
                sample_index=index,
                token_ids=np.array([*range(10, 26), *completion.token_ids], np.int32),
                loss_mask=np.array([False] * num_prompt + [True] * num_sampled),
                behaviour_logprobs=np.array(
                    [0.0] * num_prompt + list(completion.behaviour_logprobs), np.float32
                ),
                version_spans=tuple(
                    type(span)(span.start + num_prompt, span.end + num_prompt, span.version)
                    for span in completion.version_spans
                ),
                reward=float(index % 2),
                is_truncated=True,
            )
        )
    return Batch(
        version=version,
        groups=(Group(GroupId(version), Prompt("p", ()), tuple(trajectories)),),
        min_version=version,
    )


async def measure(
    config: RunConfig, model: Path, name: str, device: str, seconds: float, folder: Path
) -> Case:
    """Turns until the time is over."""
    async with house(config, model, folder, device) as rooms:
        case = Case(name, rooms.memory, ready_s=time.perf_counter())
        version, end_s = 0, time.perf_counter() + seconds
        while time.perf_counter() < end_s or version <= MIN_TURNS:
            batch = make_batch(version, await generate(rooms.pool, version))
            before = rooms.memory.cpu_s()
            await rooms.turns.to_trainer()
            cpu_s = rooms.memory.cpu_s() - before
            report = await rooms.trainer.train(batch)
            version, before = report.policy_version, rooms.memory.cpu_s()
            await rooms.turns.to_engines(version)
            cpu_s += rooms.memory.cpu_s() - before
            if isinstance(rooms.turns, Colocated) and version == 1:
                case.first_s = rooms.turns.gauges()["perf/handover_s"]
            elif isinstance(rooms.turns, Colocated):
                case.cpu_s.append(cpu_s)
                note(case, rooms.turns, rooms.phases, rooms.publisher.report)
            else:
                await rooms.publisher.wait_announced(version)  # type: ignore[union-attr]
        await generate(rooms.pool, version)
    return case


def note(case: Case, turns: Colocated, phases: Mapping[str, Mapping[str, Any]], push: PushReport) -> None:
    """One turn: its seconds, and the bytes that were copied: by the trainer's moves of weights and optimizer,
    and by the push.
    """
    numbers = turns.gauges()
    case.to_trainer_s.append(numbers["perf/to_trainer_s"])
    case.to_engines_s.append(numbers["perf/to_engines_s"])
    case.phases.append(
        {name: phase["seconds"] for name, phase in phases.items()}
        | {
            "push: trainer writes": push.export_s,
            "push: engine loads": push.prepare_s,
            "push: commit": push.commit_s,
        }
    )
    onloaded = phases["trainer: onload weights and optimizer"]["num_bytes"]
    case.moved.append(2 * onloaded + phases["publisher: push weights"]["num_bytes"])


def show(
    apart: Case,
    cases: Sequence[Case],
    copy_s_per_byte: float,
    new_pages_s_per_byte: float,
    copy_cpu_s_per_byte: float,
) -> None:
    """The tables and the last line."""
    num_turns = min(len(case.moved) for case in cases)
    print(
        f"{num_turns} turns or more of {NUM_SAMPLES} completions of {NUM_TOKENS} tokens, medians; before "
        f"them one to warm up"
    )
    names = (
        "chunk",
        "to trainer s",
        "to engines s",
        "moved MB",
        "copy s",
        "new pages s",
        "ratio",
        "cpu ratio",
        "peak MB",
        "with start",
    )
    print("".join(f"{name:>14}" for name in names))
    for case in cases:
        moved, peaks = median(case.moved), (case.memory.peak(case.ready_s) / 1e6, case.memory.peak() / 1e6)
        copies = moved * copy_s_per_byte, moved * new_pages_s_per_byte
        times = f"{median(case.to_trainer_s):>14.3f}{median(case.to_engines_s):>14.3f}{moved / 1e6:>14.0f}"
        ratio = case.handover_s / copies[0]
        cpu_ratio = median(case.cpu_s) / (moved * copy_cpu_s_per_byte)
        print(
            f"{case.name:>14}{times}{copies[0]:>14.3f}{copies[1]:>14.3f}{ratio:>14.2f}{cpu_ratio:>14.2f}{peaks[0]:>14.0f}{peaks[1]:>14.0f}"
        )
    print(f"{'apart':>14}" + f"{'-':>14}" * 7, end="")
    print(f"{apart.memory.peak(apart.ready_s) / 1e6:>14.0f}{apart.memory.peak() / 1e6:>14.0f}")
    last = cases[-1]
    print(f"\nphases of chunk size {last.name}, seconds:")
    for name in last.phases[0]:
        print(f"  {name:44}{median(phase[name] for phase in last.phases):8.3f}")
    sides = [
        max(sample[index] for sample in last.memory.samples if sample[0] >= last.ready_s) / 1e6
        for index in (1, 2)
    ]
    print(f"most of one side alone, in turns: trainer {sides[0]:.0f} MB, engine {sides[1]:.0f} MB")
    print(f"both handovers of the first turn, which is in no median: {last.first_s:.3f} s")
    print(f"ratio: {last.handover_s / (median(last.moved) * copy_s_per_byte):.2f}")


def main() -> None:
    """Parse, measure, print."""
    parser = options(__doc__, seconds=60.0)
    parser.add_argument("--chunk-mib", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments: argparse.Namespace = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    clear_stale_staging()
    seconds = arguments.seconds / (len(arguments.chunk_mib) + 1)
    with tempfile.TemporaryDirectory(prefix="asyncrl-colocation-") as name:
        folder = Path(name)
        model = llama_135m(folder)
        copies, cases = [], []
        config = make_config(model, arguments.device, 256 * MIB, is_shared=False)
        apart = asyncio.run(measure(config, model, "apart", arguments.device, seconds, folder / "apart"))
        for chunk in arguments.chunk_mib:
            warm, new_pages = copy_costs(COPY_BYTES, torch.device(arguments.device))
            copies.append((warm[0] / COPY_BYTES, new_pages[0] / COPY_BYTES, warm[1] / COPY_BYTES))
            config = make_config(model, arguments.device, chunk * MIB, is_shared=True)
            cases.append(
                asyncio.run(
                    measure(
                        config, model, f"{chunk} MiB", arguments.device, seconds, folder / f"turns-{chunk}"
                    )
                )
            )
        with reported("colocation", is_kept=arguments.write):
            show(apart, cases, *(median(kind) for kind in zip(*copies, strict=True)))


if __name__ == "__main__":
    main()

"""Throughput of a real run against its engine and its trainer on the same work, without
a controller and without waiting for each other.

    python benchmarks/run_efficiency.py [--seconds 240] [--rounds 2] [--write]

Each case is an `asyncrl run` on two cores: controller, trainer and embedded engine,
with new weights pushed after every step. Then two peers begin at the same time: the
engine's decode loop in this process on the run's requests (prompts, seeds, limits) all
at once, and the trainer in a second process on the run's batches from its journal. Both
use the run's number of threads and its weights; the learning rate is 1e-12, so weights
and lengths stay the same. A run cannot be faster than its slower peer: `of bound` is
the run's tokens/s over that peer's. Only sampled tokens that were trained on count,
after the first fifth of the steps, while there is more to generate.

The peers share the machine because the two cores may share a physical core: beside a
busy one, the same code takes up to a third more CPU time. `of each by itself` is the
same ratio with peers that run one after the other, and includes that loss.

    generation-bound   long completions in 16 slots: the trainer has less than half the work
    training-bound     the quickstart, with 8 passes over each batch
    quickstart         as shipped, untrained: both sides have about the same work

The second table has shares of the wall time: training, waiting for generation,
stragglers and publishing, and other (perf/* of metrics.jsonl); `decodes`: time in which
the engine decodes (engine/decode_s, read once a second); CPU seconds of each process
per second of wall time; and CPU seconds per token of engine and trainer over the CPU
seconds of the peers.

Goals: 0.92 generation-bound, 0.98 training-bound. Last line: `ratio: X` = `of bound`,
generation-bound.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from common import ASYNCRL, CONFIGS, options, read_steps, reported, watched
from sync_run import SyncRun
from transformers.utils.logging import disable_progress_bar

from asyncrl.config import RunConfig, load_config
from asyncrl.journal.read import read_batch, reading
from asyncrl.launch.launchers import LocalLauncher
from asyncrl.launch.placement import place
from asyncrl.launch.plan import threads_on
from asyncrl.rollouts.rollout import derive_seed
from asyncrl.trainer.trainer_client import pack_groups

CONFIG = CONFIGS / "quickstart.yaml"
COMMON = [
    "trainer.learning_rate=1e-12",
    "journal.keep=all",
    "checkpoint.every=none",
    "observe.console=none",
]
ALPHABET = "abcdefghijkl0123456789 " + "".join(
    chr(0x100 + number) for number in range(94)
)
LONG = [
    f'model.scratch.characters="{ALPHABET}"',
    "model.scratch.architecture.max_position_embeddings=512",
    "rollout.max_tokens=256",
    "rollout.slots=16",
    "trainer.num_groups=4",
]
SHARES = ("train_s", "wait_generation_s", "wait_stragglers_s", "wait_publishing_s")


@dataclass(frozen=True)
class Case:
    """A kind of run. `step_s`: about so long a step takes, for the number of steps that
    fit in --seconds.
    """

    name: str
    overrides: list[str]
    step_s: float
    goal: float | None = None


CASES = [
    Case("generation-bound", LONG, step_s=0.8, goal=0.92),
    Case("training-bound", ["trainer.epochs=8"], step_s=0.7, goal=0.98),
    Case("quickstart", [], step_s=0.25),
]


@dataclass(frozen=True)
class Rate:
    tokens_per_s: float
    cpu_s_per_token: float


@dataclass(frozen=True)
class Round:
    """A run and its two peers, tokens/s; and `rest`, the figures of the second table."""

    run: float
    engine: float
    trainer: float
    rest: dict[str, float]

    @property
    def of_bound(self) -> float:
        """The run over its slower side."""
        return self.run / min(self.engine, self.trainer)


def engine_rate(peer: SyncRun, num_groups: int) -> Rate:
    group_size, seed = peer.config.rollout.group_size, peer.config.seed
    prompts = [peer.feed.next_nowait() for _ in range(num_groups)]
    requests = [
        (
            peer.tokenizer.encode_chat(prompt.messages),
            derive_seed(seed, prompt.prompt_id, sample, 0),
        )
        for prompt in prompts
        for sample in range(group_size)
    ]
    peer.generate(requests[: peer.config.rollout.slots])
    started_s, cpu_s = time.perf_counter(), time.process_time()
    completions = peer.generate(requests)
    wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
    num_tokens = sum(len(one.token_ids) for one in completions)
    return Rate(num_tokens / wall_s, cpu_s / num_tokens)


def threads_of(config: RunConfig) -> tuple[int, int]:
    return threads_on(config, place(config, LocalLauncher().nodes), 0)


class TrainerPeer:
    """The trainer of a run in a process of its own."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(
            target=train_batches, args=(config, folder, other)
        )
        self._process.start()
        other.close()
        self._pipe.recv()

    def begin(self, first: int, end: int) -> None:
        """Train the run's batches `first` to `end`, without `end`."""
        self._pipe.send((first, end))

    def rate(self) -> Rate:
        rate: Rate = self._pipe.recv()
        return rate

    def close(self) -> None:
        self._pipe.close()
        self._process.join()


def train_batches(config: RunConfig, folder: Path, pipe: Connection) -> None:
    """Answer ranges of batches with the rate of training, until the pipe closes."""
    disable_progress_bar()
    peer = SyncRun(config, folder / "trainer-peer")
    torch.set_num_threads(threads_of(peer.config)[1])
    pipe.send("ready")
    try:
        while True:
            first, end = pipe.recv()
            with reading(folder / "run" / "journal.sqlite") as journal:
                batches = [
                    pack_groups(read_batch(journal, version))
                    for version in range(first, end)
                ]
            num_tokens = sum(int(arrays.is_sampled.sum()) for _, arrays in batches)
            started_s, cpu_s = time.perf_counter(), time.process_time()
            for batch in batches:
                peer.trainer.train(*batch)
            wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
            pipe.send(Rate(num_tokens / wall_s, cpu_s / num_tokens))
    except EOFError:
        return
    finally:
        peer.close()


def measure(case: Case, num_steps: int, folder: Path) -> Round:
    config: RunConfig = load_config(
        CONFIG, [*COMMON, *case.overrides, f"trainer.num_steps={num_steps}"]
    )
    command = [
        *ASYNCRL,
        str(CONFIG),
        *COMMON,
        *case.overrides,
        f"trainer.num_steps={num_steps}",
    ]
    processes = watched(command, folder / "run")
    lines = read_steps(folder / "run")
    # the first steps fill the buffer; the last ones find it full, with nothing left to
    # generate
    first, last = max(1, num_steps // 5), num_steps - 1 - config.buffer.max_staleness
    window, before = lines[first : last + 1], lines[first - 1]
    wall_s = window[-1]["time_s"] - before["time_s"]
    tokens = sum(line["tokens/sampled"] for line in window)
    engine_peer = SyncRun(config, folder / "engine-peer")
    trainer_peer = TrainerPeer(config, folder)
    try:
        trainer_peer.begin(0, first)
        trainer_peer.rate()
        # The first half of the steps by themselves, the second half together.
        half = (first + last + 1) // 2
        trainer_peer.begin(first, half)
        separate = trainer_peer.rate().tokens_per_s
        num_groups = (last + 1 - half) * config.trainer.num_groups
        separate = min(separate, engine_rate(engine_peer, num_groups).tokens_per_s)
        trainer_peer.begin(half, last + 1)
        engine = engine_rate(engine_peer, num_groups)
        trainer = trainer_peer.rate()
    finally:
        engine_peer.close()
        trainer_peer.close()
    rest = {
        share: sum(line.get(f"perf/{share}", 0.0) for line in window) / wall_s
        for share in SHARES
    }
    rest["other"] = 1.0 - sum(rest.values())
    rest["decodes"] = (
        window[-1]["engine/decode_s"] - before["engine/decode_s"]
    ) / wall_s
    cpu = processes.cpu(first, last)
    rest |= {f"cpu {name}": value for name, value in cpu.items()}
    for name, alone in (("engine-0", engine), ("trainer-0", trainer)):
        rest[f"{name}, times the peer"] = (
            cpu[name] * wall_s / tokens / alone.cpu_s_per_token
        )
    interrupted = window[-1]["rollout/interrupted"] - before["rollout/interrupted"]
    rest["interrupted a step"] = interrupted / len(window)
    rest["tokens a step"] = tokens / len(window)
    run = tokens / wall_s
    rest["of each by itself"] = run / separate
    return Round(run, engine.tokens_per_s, trainer.tokens_per_s, rest)


def median_of(rounds: Iterable[Round]) -> Round:
    """Each figure's median; so the ratio is that of the medians."""
    every = list(rounds)
    rest = {
        name: statistics.median(one.rest.get(name, 0.0) for one in every)
        for name in every[0].rest
    }
    run, engine, trainer = (
        statistics.median(getattr(one, name) for one in every)
        for name in ("run", "engine", "trainer")
    )
    return Round(run, engine, trainer, rest)


def print_tables(found: dict[str, list[Round]]) -> None:
    """Rates and goals, then where the rest goes."""
    medians = {name: median_of(rounds) for name, rounds in found.items()}
    print(
        f"\n{'tokens/s':<18}{'run':>8}{'engine':>14}{'trainer':>15}{'of bound':>10}  goal"
    )
    for case in CASES:
        one = medians[case.name]
        ratio = statistics.median(each.of_bound for each in found[case.name])
        verdict = (
            ""
            if case.goal is None
            else f"{case.goal}: {'met' if ratio >= case.goal else 'missed'}"
        )
        rates = f"{one.run:>8.0f}{one.engine:>14.0f}{one.trainer:>15.0f}"
        print(f"{case.name:<18}{rates}{ratio:>10.2f}  {verdict}")
    print(f"\n{'where the rest is':<22}{''.join(f'{case.name:>18}' for case in CASES)}")
    for row in medians[CASES[0].name].rest:
        values = [medians[case.name].rest.get(row, 0.0) for case in CASES]
        form = "{:>18.0f}" if row.endswith("a step") else "{:>18.2f}"
        print(f"{row:<22}{''.join(form.format(value) for value in values)}")


def main() -> None:
    parser = options(__doc__, seconds=240.0)
    parser.add_argument(
        "--rounds", type=int, default=2, help="times that each case is run"
    )
    arguments = parser.parse_args()
    disable_progress_bar()
    # the other half is for the peers
    share_s = arguments.seconds / (arguments.rounds * len(CASES)) / 2
    found: dict[str, list[Round]] = {case.name: [] for case in CASES}
    with reported("run_efficiency", is_kept=arguments.write):
        for _ in range(arguments.rounds):
            for case in CASES:
                with tempfile.TemporaryDirectory() as folder:
                    num_steps = max(15, int(share_s / case.step_s))
                    one = measure(case, num_steps, Path(folder))
                found[case.name].append(one)
                print(
                    f"{case.name}: {num_steps} steps, {one.of_bound:.2f} of bound",
                    file=sys.stderr,
                )
        engine, trainer = threads_of(load_config(CONFIG))
        print(
            f"threads: engine {engine}, trainer {trainer}; {arguments.rounds} rounds, medians"
        )
        print_tables(found)
        ratio = statistics.median(one.of_bound for one in found["generation-bound"])
        print(f"ratio: {ratio:.2f}")


if __name__ == "__main__":
    main()

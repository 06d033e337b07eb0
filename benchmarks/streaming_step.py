"""How long the trainer waits between two steps, and within a step, on a device of its own.

    python benchmarks/streaming_step.py [--seconds 240] [--step-ms 100] [--write]

Each row is an `asyncrl run`. Its trainer has the real processes and protocol, but its
model sleeps for each token and takes no CPU (asyncrl_simulated.sleeping_trainer).

Between steps (the quickstart, max_staleness 4): `ahead` as shipped, `after` with each
batch formed only after the step before. A step takes about --step-ms. `computes`: share
of the time in steps, perf/train_s. `idle`: from the end of a step to the start of the
next one (perf/idle_s), of steps whose batch was ready (`ready`: their share), which
waited less than 1 ms for it.

Within a step (max_staleness 0, simulated engine, lognormal lengths with sigma 1, 32
groups of 16, training half as long as generation): trainer.stream=auto against off.
`real` rows have the quickstart's model and a trainer that computes.

Goals: median idle 2 ms; 1.3 within a step. Last line: `ratio: X` = speed of auto over
off with the trainer that sleeps.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from common import CONFIGS, options, read_steps, reported, watched

CONFIG = CONFIGS / "quickstart.yaml"
RUN = "from asyncrl.cli import main; main()"
AFTER = "from asyncrl.job.loop import Job; Job._is_ahead = False; "
COMMON = [
    "algorithm.kl_coefficient=0",  # else a second model sleeps, too
    "trainer.learning_rate=1e-12",
    "checkpoint.every=none",
    "observe.console=none",
]
READY_S = 1e-3
GOAL_MS = 2.0
TOKENS_A_STEP = 1200
"""Of the untrained quickstart, whose lengths stay."""
GROUPS, GROUP_SIZE = 32, 16
DECODE_S, MEAN_TOKENS, MAX_TOKENS = 2e-3, 64, 1024
TRAIN_OF_GENERATION = 0.5
LONG_TAILED = [
    "buffer.max_staleness=0",
    f"trainer.num_groups={GROUPS}",
    f"rollout.group_size={GROUP_SIZE}",
    f"rollout.slots={GROUPS * GROUP_SIZE}",
    "rollout.engine=simulated",
    f"rollout.simulated.decode_step_s={DECODE_S}",
    f"rollout.simulated.mean_tokens={MEAN_TOKENS}",
    "rollout.simulated.sigma=1.0",
    f"rollout.max_tokens={MAX_TOKENS}",
    f"model.scratch.architecture.max_position_embeddings={2 * MAX_TOKENS}",
]
NUM_FIRST = 3
"""Steps that fill the buffer and the caches."""

Line = Mapping[str, Any]


def steps_of(
    code: str, settings: Sequence[str], num_steps: int, *, sleep_us: float
) -> Sequence[Line]:
    """Run, and return the metrics of all steps, with the last of the first ones before
    them. `sleep_us`: per token; 0: the trainer computes.
    """
    os.environ["ASYNCRL_SLEEP_US"] = str(sleep_us)
    launcher = ["launcher=sleeping"] if sleep_us else []
    command = [sys.executable, "-c", code, "run", str(CONFIG), *COMMON, *launcher]
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        watched([*command, *settings, f"trainer.num_steps={num_steps}"], run_dir)
        return read_steps(run_dir)[NUM_FIRST - 1 :]


def wall_s(lines: Sequence[Line]) -> float:
    """Return the seconds of a step."""
    return float(lines[-1]["time_s"] - lines[0]["time_s"]) / (len(lines) - 1)


def train_s(lines: Sequence[Line]) -> float:
    return fmean(line["perf/train_s"] for line in lines[1:])


def between_steps(seconds: float, step_ms: float) -> float:
    """Print the rows of the first table; return how much faster `ahead` is."""
    num_steps = NUM_FIRST + max(20, int(seconds / 2 / (1.5e-3 * step_ms)))
    columns = "steps wall computes ready median mean all"
    print(f"{'between steps, ms':<20}", *(f"{name:>9}" for name in columns.split()))
    walls = list[float]()
    for name, code in (("ahead", RUN), ("after", AFTER + RUN)):
        sleep_us = 1e3 * step_ms / TOKENS_A_STEP
        lines = steps_of(code, [], num_steps, sleep_us=sleep_us)
        walls.append(wall_s(lines))
        kept = lines[1:]
        idle_ms = [1e3 * line["perf/idle_s"] for line in kept]
        ready_ms = [
            idle
            for idle, line in zip(idle_ms, kept, strict=True)
            if line["perf/wait_s"] < READY_S
        ]
        figures = (
            f"{len(kept)}",
            f"{1e3 * walls[-1]:.1f}",
            f"{train_s(lines) / walls[-1]:.0%}",
            f"{len(ready_ms) / len(kept):.0%}",
            f"{median(ready_ms):.2f}" if ready_ms else "-",
            f"{fmean(ready_ms):.2f}" if ready_ms else "-",
            f"{fmean(idle_ms):.2f}",
        )
        print(f"{name:<20}", *(f"{figure:>9}" for figure in figures), flush=True)
        if name == "ahead" and ready_ms:
            is_met = median(ready_ms) <= GOAL_MS
            goal = f"goal of {GOAL_MS:g} ms: {'met' if is_met else 'missed'}"
    print(f"median idle while a batch is ready, {goal}")
    return walls[1] / walls[0]


def generation_s() -> tuple[float, float]:
    """Return the expected seconds in which a batch is sampled, and its tokens."""
    normal = np.random.default_rng(0).standard_normal((1000, GROUPS * GROUP_SIZE))
    lengths = np.clip(MEAN_TOKENS * np.exp(normal - 0.5), 1, MAX_TOKENS)
    return DECODE_S * lengths.max(1).mean(), lengths.sum(1).mean()


def within_a_step(seconds: float) -> float:
    """Print the rows of the second table; return how much faster auto is."""
    expected_s, num_tokens = generation_s()
    sleep_us = 1e6 * TRAIN_OF_GENERATION * expected_s / num_tokens
    step_s = (1 + TRAIN_OF_GENERATION) * expected_s
    num_steps = NUM_FIRST + max(8, int(seconds / 4 / step_s))
    print(f"\n{'within a step, s':<20}{'steps':>9}{'wall':>9}{'train_s':>9}")
    ratios = list[float]()
    for name, us in (("sleeps", sleep_us), ("real", 0.0)):
        walls = list[float]()
        for stream in ("off", "auto"):
            settings = [*LONG_TAILED, f"trainer.stream={stream}"]
            lines = steps_of(RUN, settings, num_steps, sleep_us=us)
            walls.append(wall_s(lines))
            figures = f"{len(lines) - 1:>9}{walls[-1]:>9.3f}{train_s(lines):>9.3f}"
            print(f"{f'{name}, {stream}':<20}{figures}", flush=True)
        ratios.append(walls[0] / walls[1])
        print(f"{name}: {ratios[-1]:.2f} times the speed of off")
    print(f"expected: generation {expected_s:.2f} s, {num_tokens:.0f} tokens a step")
    return ratios[0]


def main() -> None:
    parser = options(__doc__, seconds=240.0)
    parser.add_argument(
        "--step-ms", type=float, default=100.0, help="sleep of a step (%(default)s)"
    )
    arguments = parser.parse_args()
    with reported("streaming_step", is_kept=arguments.write):
        ahead = between_steps(arguments.seconds / 2, arguments.step_ms)
        print(f"ahead: {ahead:.2f} times the steps of after")
        print(f"ratio: {within_a_step(arguments.seconds / 2):.2f}")


if __name__ == "__main__":
    main()

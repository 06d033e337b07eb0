"""Time that a save of the trainer's state holds up training, against a memory copy of
the same bytes.

A real TrainerRank of 69 M parameters: 277 MB of float32 weights and twice that of
AdamW's moments. Each repetition in the same run: a memory copy of that size (source and
target warm), one optimizer step, a save that is awaited, and a save with concurrent
optimizer steps. Files are synced to the disk of the temporary directory.

    python benchmarks/checkpoint.py [--seconds 60]

`held up` is the time in which a trainer neither computes nor steps: until a save
begins, and before the first step changes weights, until they are copied into host
buffers. `copy` is only that copy. The first copy also allocates these buffers and has
its own row. `step during a save` counts steps that ran entirely during the writing of
files.

Last line: `ratio: X` = held up over memory copy, medians of the same run.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from common import copy_costs, options, qwen3_69m, reported, trainer_spec
from trainer_case import Row, batch_of
from transformers.utils.logging import disable_progress_bar

from asyncrl.launch.processes import HUGE_PAGES
from asyncrl.trainer.ranks.rank import TrainerRank

VOCAB_SIZE, NUM_TOKENS, NUM_SEQUENCES = 16_384, 16, 4
MIN_REPETITIONS = 3


@dataclass(frozen=True)
class Repetition:
    """Seconds."""

    memcpy_s: float
    step_s: float
    copy_s: float
    held_s: float
    whole_s: float
    steps_beside_s: list[float]


def make_step(folder: Path) -> TrainerRank:
    """A random Qwen3 of 69 M parameters, in a trainer."""
    qwen3_69m(folder / "model", max_length=256)
    return TrainerRank(
        trainer_spec(folder / "model", folder, dtype="auto", device="auto")
    )


def as_a_child() -> None:
    """Start this process again, once, with the environment that a run gives a trainer
    of one thread.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        environ = {**os.environ, **HUGE_PAGES, "OMP_NUM_THREADS": "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], environ)


def train_once(step: TrainerRank) -> float:
    rng = np.random.default_rng(step.policy_version)
    is_sampled = np.arange(NUM_TOKENS) > 0
    rows = []
    for index in range(NUM_SEQUENCES):
        ids = rng.integers(0, VOCAB_SIZE, NUM_TOKENS)
        rows.append(Row(0, index, 0, ids, is_sampled, -9.7, float(index % 2)))
    return step.train(*batch_of(rows, step.policy_version))["perf/train_s"]


@contextmanager
def timed(step: TrainerRank) -> Iterator[list[float]]:
    """The seconds that steps within wait before they change weights."""
    before_change, waits = step.before_change, list[float]()

    def wait() -> None:
        start = time.perf_counter()
        before_change()
        waits.append(time.perf_counter() - start)

    step.before_change = wait  # type: ignore[method-assign]
    try:
        yield waits
    finally:
        step.before_change = before_change  # type: ignore[method-assign]


def save(
    step: TrainerRank, path: Path, *, is_beside: bool
) -> tuple[float, float, list[float]]:
    start = time.perf_counter()
    pending = step.begin_save_state(path)
    held_s = time.perf_counter() - start
    steps_s = []
    if not is_beside:
        step.before_change()
        held_s = time.perf_counter() - start
    while is_beside and not pending.done():
        with timed(step) as waits:
            seconds = train_once(step)
        held_s += sum(waits)
        if not pending.done():
            steps_s.append(seconds)
    pending.result()
    whole_s = time.perf_counter() - start
    shutil.rmtree(path)
    return held_s, whole_s, steps_s


def measure(seconds: float, folder: Path) -> tuple[list[Repetition], float, int]:
    """Repetitions until the time is over; seconds held up by the first save; bytes of a
    state.
    """
    step = make_step(folder)
    train_once(step)
    first_s, _, _ = save(step, folder / "state", is_beside=False)
    num_bytes = sum(3 * master.nbytes for master in step.masters.named.values())
    repetitions: list[Repetition] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(repetitions) < MIN_REPETITIONS:
        memcpy_s, step_s = (
            copy_costs(num_bytes, torch.device("cpu"))[0][0],
            train_once(step),
        )
        copy_s, whole_s, _ = save(step, folder / "state", is_beside=False)
        held_s, _, steps_beside_s = save(step, folder / "state", is_beside=True)
        repetitions.append(
            Repetition(memcpy_s, step_s, copy_s, held_s, whole_s, steps_beside_s)
        )
    return repetitions, first_s, num_bytes


def show(repetitions: list[Repetition], first_s: float, num_bytes: int) -> None:
    """The table and the last line."""
    memcpy_s = median(one.memcpy_s for one in repetitions)
    held_s, whole_s = (
        median(one.held_s for one in repetitions),
        median(one.whole_s for one in repetitions),
    )
    print(
        f"{num_bytes / 1e6:.0f} MB of weights and optimizer, {len(repetitions)} repetitions, medians"
    )
    print(f"{'':28}{'seconds':>10}{'GB/s':>8}{'of memcpy':>12}")
    copy_s = median(one.copy_s for one in repetitions)
    rows = {
        "memory copy": memcpy_s,
        "held up": held_s,
        "copy": copy_s,
        "first copy": first_s,
    }
    rows["whole save"] = whole_s
    for name, seconds in rows.items():
        print(
            f"{name:28}{seconds:10.4f}{num_bytes / seconds / 1e9:8.1f}{seconds / memcpy_s:12.2f}"
        )
    print(f"{'step':28}{median(one.step_s for one in repetitions):10.4f}")
    if beside := [seconds for one in repetitions for seconds in one.steps_beside_s]:
        print(
            f"{'step during a save':28}{median(beside):10.4f}   ({len(beside)} steps)"
        )
    print(f"held up for {held_s / whole_s:.1%} of the whole save")
    print(f"ratio: {held_s / memcpy_s:.2f}")


def main() -> None:
    """Parse, measure, print."""
    arguments = options(__doc__, seconds=60.0).parse_args()
    as_a_child()
    disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="asyncrl-checkpoint-") as folder:
        results = measure(arguments.seconds, Path(folder))
    with reported("checkpoint", is_kept=arguments.write):
        show(*results)


if __name__ == "__main__":
    main()

"""Cost of a group in the buffer, from 1,000 to 100,000 groups; and on_overdue=wait,
mask and drop simulated.

    python benchmarks/buffer.py [--seconds 30] [--write]

First table: the real Buffer (on_overdue=wait, max_staleness 8), every group admitted,
finished in random order with one straggler in fifty, and consumed. Microseconds of
buffer and driver, medians. Second table: runs of 400 batches of 16 groups in virtual
time, lognormal lengths with mean 1 s and sigma 1, a training step of 0.6 s, unlimited
slots, look_ahead = max_staleness.

Last line: `ratio: X` = cost per group at 1,000 groups over the cost at 100,000. 1 is
linear.
"""

from __future__ import annotations

import random
import time
from statistics import median

import numpy as np
from buffer_simulation import Lognormal, Simulation
from common import options, reported

from asyncrl.base.errors import WouldWait
from asyncrl.buffer.buffer import Buffer
from asyncrl.buffer.staleness import StalenessRule
from asyncrl.config import BufferConfig
from asyncrl.messages.records import Group, GroupId, Prompt, Trajectory, VersionSpan
from asyncrl.messages.tokens import Tokens

MAX_STALENESS = 8
NUM_GROUPS = 16
SIZES = (1_000, 10_000, 100_000)
NUM_BATCHES = 400
TRAIN_S = 0.6
ONE_TOKEN = np.zeros(1, np.int32)


def cost_us(num_total: int) -> float:
    """Return the microseconds per group of `num_total` groups."""
    num_batches = num_total // NUM_GROUPS
    config = BufferConfig(
        max_staleness=MAX_STALENESS, look_ahead=MAX_STALENESS, on_overdue="wait"
    )
    buffer = Buffer(
        config,
        num_groups=NUM_GROUPS,
        num_batches=num_batches,
    )
    draw = random.Random(0)
    running: list[tuple[GroupId, int]] = []
    stragglers: list[tuple[GroupId, int]] = []
    prompt = Prompt("p", ())
    version = 0
    started_s = time.process_time()  # of this process
    while version < num_batches:
        for _ in range(buffer.rule.num_open):
            ticket = buffer.admit_nowait()
            (stragglers if draw.random() < 0.02 else running).append(
                (ticket.group_id, ticket.start_version)
            )
        try:
            buffer.take_nowait()
        except WouldWait:
            pool = running or stragglers
            index = draw.randrange(len(pool))
            pool[index], pool[-1] = pool[-1], pool[index]
            group_id, oldest = pool.pop()
            span = VersionSpan(0, 1, oldest)
            buffer.finish_nowait(
                Group(
                    group_id, prompt, (Trajectory(0, Tokens(ONE_TOKEN, (span,)), 0.0),)
                )
            )  # type: ignore[arg-type]
            continue
        version += 1
        buffer.set_served_nowait(version)
        if version % (MAX_STALENESS - 1) == 0:
            running += stragglers
            stragglers.clear()
    return 1e6 * (time.process_time() - started_s) / (num_batches * NUM_GROUPS)


def main() -> None:
    """Print both tables."""
    arguments = options(__doc__, seconds=30.0).parse_args()
    costs: dict[int, list[float]] = {size: [] for size in SIZES}
    until_s = time.perf_counter() + arguments.seconds
    with reported("buffer", is_kept=arguments.write):
        while len(costs[SIZES[-1]]) < 3 or time.perf_counter() < until_s:
            for size in SIZES:
                costs[size] += [cost_us(size) for _ in range(max(1, 10_000 // size))]
        for size in SIZES:
            print(f"{size:>8} groups: {median(costs[size]):>6.1f} us per group")
        print(
            f"\n{'max_staleness':<14}{'on_overdue':<12}{'idle':>6}{'tokens masked':>15}{'dropped':>9}"
        )
        for max_staleness in (1, 2, 4, 8):
            for on_overdue in ("wait", "mask", "drop"):
                rule = StalenessRule(
                    num_groups=NUM_GROUPS,
                    num_batches=NUM_BATCHES,
                    max_staleness=max_staleness,
                    on_overdue=on_overdue,
                    look_ahead=max_staleness,
                )
                found = Simulation(
                    rule, Lognormal(sigma=1.0), slots=10**6, train_s=TRAIN_S
                ).run()
                dropped = found.num_requeued / (
                    found.num_requeued + NUM_BATCHES * NUM_GROUPS
                )
                print(
                    f"{max_staleness:<14}{on_overdue:<12}{found.trainer_idle:>6.0%}"
                    f"{found.masked_fraction:>15.1%}{dropped:>9.1%}"
                )
        print(f"ratio: {median(costs[SIZES[0]]) / median(costs[SIZES[-1]]):.2f}")


if __name__ == "__main__":
    main()

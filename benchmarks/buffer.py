"""What a group costs the buffer, from 1,000 to 100,000 groups; then the rule against the count-based one, in
simulation.

    python benchmarks/buffer.py [--seconds 60] [--write]

First table: the real Buffer (on_overdue=wait, max_staleness 8, look_ahead 8), every group admitted, finished
in random order with one group in fifty a straggler, and consumed. Second table: the same at 100,000 groups
with more and more of them in flight. Microseconds of the buffer and its driver, median of the repetitions,
which take turns over the sizes.

Third table: whole runs in virtual time (buffer_simulation), batches of 16 groups of lognormal length
with mean 1 s, a training step of 0.6 s, slots for all. `late`: groups older than max_staleness with a weight
in the loss. `count`: capacity (max_staleness + version + 1) * 16 - accepted - running, finished groups in
order of completion, or those that started first. `drop`: a prompt is drawn anew when it comes again, and
`given up` after the fourth time; `by prompt`: half of the variance of the logarithm of a length is the
prompt's own, so that a long one comes back long.

Last line: `ratio: X` = cost a group at 1,000 groups over cost a group at 100,000. About 1 is linear; well
below 1 is worse than linear.
"""

from __future__ import annotations

import random
import time
from statistics import median

import numpy as np
from buffer_simulation import Simulation
from buffer_workload import Lognormal, SimulatedMachine, SimulationResult
from count_rule import CountRule
from report import options, reported

from asyncrl.base.errors import WouldWait
from asyncrl.buffer.buffer import Buffer
from asyncrl.buffer.look_ahead import LookAhead
from asyncrl.buffer.staleness import StalenessRule
from asyncrl.config import BufferConfig
from asyncrl.config.generation import OnOverdue
from asyncrl.messages.records import Group, GroupId, Prompt, Trajectory, VersionSpan

MAX_STALENESS, NUM_GROUPS = 8, 16
SIZES = (1_000, 3_000, 10_000, 30_000, 100_000)
MACHINE = SimulatedMachine(slots=10**6, train_s=0.6)
BATCH_SIZES = (16, 64, 256, 1_024)
NO_TOKENS = np.zeros(0, np.int32)


def cost_us(num_total: int, num_groups: int) -> tuple[float, int]:
    """(microseconds a group, most groups in flight) of `num_total` groups in batches of `num_groups`."""
    num_batches = num_total // num_groups
    config = BufferConfig(max_staleness=MAX_STALENESS, look_ahead=MAX_STALENESS, on_overdue="wait")
    buffer = Buffer(config, num_groups=num_groups, num_batches=num_batches, on_requeued=lambda *_: None)
    draw = random.Random(0)
    running: list[tuple[GroupId, int]] = []
    stragglers: list[tuple[GroupId, int]] = []
    prompt, version, peak = Prompt("p", ()), 0, 0
    started_s = time.process_time()  # of this process alone: other work on the machine does not count
    while version < num_batches:
        for _ in range(buffer.rule.num_open):
            ticket = buffer.admit_nowait()
            (stragglers if draw.random() < 0.02 else running).append((ticket.group_id, ticket.start_version))
        peak = max(peak, len(running) + len(stragglers))
        try:
            buffer.take_nowait()
        except WouldWait:
            pool = running or stragglers
            index = draw.randrange(len(pool))
            pool[index], pool[-1] = pool[-1], pool[index]
            group_id, oldest = pool.pop()
            span = VersionSpan(0, 1, oldest)
            buffer.finish_nowait(
                Group(group_id, prompt, (Trajectory(0, NO_TOKENS, NO_TOKENS, NO_TOKENS, (span,), 0.0),))
            )  # type: ignore[arg-type]
            continue
        version += 1
        buffer.set_served_nowait(version)
        if version % (MAX_STALENESS - 1) == 0:
            running += stragglers
            stragglers.clear()
    return 1e6 * (time.process_time() - started_s) / (num_batches * num_groups), peak


def scaling(seconds: float) -> float:
    """Print the first two tables, return the ratio."""
    costs: dict[tuple[int, int], list[float]] = {}
    peaks: dict[tuple[int, int], int] = {}
    cases = [(size, NUM_GROUPS) for size in SIZES] + [
        (SIZES[-1], batch_size) for batch_size in BATCH_SIZES[1:]
    ]
    until_s = time.perf_counter() + seconds
    while len(next(iter(costs.values()), [])) < 3 or time.perf_counter() < until_s:
        for case in cases:
            for _ in range(max(1, 10_000 // case[0])):  # a small size is over in milliseconds: more of them
                cost, peaks[case] = cost_us(*case)
                costs.setdefault(case, []).append(cost)
    print(f"{'groups':>8} {'a batch':>8} {'in flight':>9} {'us a group':>11}")
    for case in cases:
        print(f"{case[0]:>8} {case[1]:>8} {peaks[case]:>9} {median(costs[case]):>11.1f}")
    return median(costs[cases[0]]) / median(costs[SIZES[-1], NUM_GROUPS])


def play(
    max_staleness: int,
    sigma: float,
    num_batches: int,
    on_overdue: OnOverdue,
    look_ahead: int | None,
    *,
    prompt_share: float = 0.0,
) -> SimulationResult:
    """One simulated run under our rule; look_ahead None is auto."""
    auto = LookAhead(max_staleness) if look_ahead is None else None
    rule = StalenessRule(
        num_groups=NUM_GROUPS,
        num_batches=num_batches,
        max_staleness=max_staleness,
        on_overdue=on_overdue,
        look_ahead=auto.current if auto is not None else look_ahead or 0,
    )
    workload = Lognormal(sigma=sigma, prompt_share=prompt_share)
    return Simulation(rule, workload, MACHINE, auto=auto).run()


def play_counted(
    max_staleness: int, sigma: float, num_batches: int, *, is_oldest_first: bool
) -> SimulationResult:
    """One simulated run under the count-based rule."""
    rule = CountRule(
        num_groups=NUM_GROUPS,
        num_batches=num_batches,
        max_staleness=max_staleness,
        order="oldest_first" if is_oldest_first else "completion",
    )
    return Simulation(rule, Lognormal(sigma=sigma), MACHINE).run()


def show(name: str, outcome: SimulationResult, fastest: float) -> None:
    """One row."""
    speed, idle, ahead = outcome.batches_per_s / fastest, outcome.trainer_idle, outcome.look_ahead_mean
    ages = f"{outcome.age_mean:>6.2f} {outcome.age_max:>5}"
    late, masked, dropped, given_up = (
        outcome.late_fraction,
        outcome.masked_fraction,
        outcome.num_requeued,
        outcome.num_given_up,
    )
    print(
        f"    {name:<22} {speed:>6.2f} {idle:>6.0%} {ahead:>6.1f} {ages} {late:>7.1%} {masked:>7.1%} "
        f"{dropped:>8} {given_up:>9}"
    )


def compare(num_batches: int) -> None:
    """Print the third table."""
    print(
        f"\n{num_batches} batches of {NUM_GROUPS}, simulated; speed is against a trainer that never waits; "
        f"ages in versions"
    )
    ages = f"{'age':>6} {'max':>5}"
    counts = f"{'late':>7} {'masked':>7} {'dropped':>8} {'given up':>9}"
    print(f"    {'rule, look_ahead':<22} {'speed':>6} {'idle':>6} {'ahead':>6} {ages} {counts}")
    for sigma in (0.5, 1.0):
        for max_staleness in (1, 2, 4, 8):
            print(f"  sigma {sigma}, max_staleness {max_staleness}")
            for on_overdue in ("wait", "mask", "drop"):
                fixed = [
                    play(max_staleness, sigma, num_batches, on_overdue, look_ahead)
                    for look_ahead in range(max_staleness + 1)
                ]
                best = max(range(len(fixed)), key=lambda index: fixed[index].batches_per_s)
                show(
                    f"{on_overdue}, auto", play(max_staleness, sigma, num_batches, on_overdue, None), 1 / 0.6
                )
                show(f"{on_overdue}, {best} (best)", fixed[best], 1 / 0.6)
                if best != max_staleness:
                    show(f"{on_overdue}, {max_staleness}", fixed[-1], 1 / 0.6)
            by_prompt = play(max_staleness, sigma, num_batches, "drop", None, prompt_share=0.5)
            show("drop, auto, by prompt", by_prompt, 1 / 0.6)
            show(
                "count, completion",
                play_counted(max_staleness, sigma, num_batches, is_oldest_first=False),
                1 / 0.6,
            )
            show(
                "count, oldest first",
                play_counted(max_staleness, sigma, num_batches, is_oldest_first=True),
                1 / 0.6,
            )


def main() -> None:
    """Run all three tables."""
    arguments = options(__doc__, seconds=60.0).parse_args()
    with reported("buffer", is_kept=arguments.write):
        ratio = scaling(arguments.seconds / 2)
        compare(int(min(400, max(60, 400 * arguments.seconds / 60))))
        print(f"\nratio: {ratio:.2f}")


if __name__ == "__main__":
    main()

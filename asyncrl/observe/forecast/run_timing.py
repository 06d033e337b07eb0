"""What a run directory says of the run's own lengths, waits and speeds, as a simulation takes them.

Each speed is a least-squares fit over requests, or over steps, with no coefficient below 0.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

from asyncrl.buffer.workload import RolloutPlan, SimulatedMachine
from asyncrl.errors import ConfigError, JournalError
from asyncrl.journal.read import reading
from asyncrl.observe.inspect import JOURNAL_FILE
from asyncrl.observe.recorder import METRICS_FILE, lines_of, metrics_of
from asyncrl.rollouts.timed import OLD_TIMES_FILE, TIMES_FILE, RolloutTimes

MIN_STEPS = 5
WINDOW = 64
"""Groups to each side of the place in the run where a simulated group is drawn: lengths change as a model
learns.
"""
NUM_ROUNDS = 3
"""Of the fit of how an engine slows down with its load."""
DRAGS = tuple(index / 25 for index in range(22))
"""Shares of its speed that one side may lose while the other works, tried one by one."""
LEAST_BESIDE, MOST_BESIDE = 0.05, 0.85
"""Shares of the training time with busy engines: below the first it is not known how fast each side is beside
the other, above the second how fast it is alone.
"""
NEVER_AT_ONCE = "the trainer and the engines never worked at once: how they slow each other down is not known"
ALWAYS_AT_ONCE = (
    "the trainer and the engines nearly always worked at once: where they share cores, what waits for the "
    "other side (max_staleness 0, turns) is faster than told"
)
_NEEDED = "step", "time_s", "perf/train_s", "tokens/sampled"
_CHECK = TypeAdapter(RolloutTimes)
Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RecordedRollouts:
    """A workload: the groups of a run, in the order in which they started, drawn around the same place."""

    groups: Sequence[Sequence[RolloutPlan]]
    group_size: int
    seed: int = 0

    def group(self, prompt: int, num_handed_back: int, progress: float) -> Sequence[RolloutPlan]:
        """One of them as a whole; where the size is another, its rollouts are drawn."""
        draw = random.Random(f"{self.seed}/{prompt}/{num_handed_back}")
        middle = int(progress * len(self.groups))
        first, end = max(0, middle - WINDOW), min(len(self.groups), middle + WINDOW)
        found = self.groups[draw.randrange(min(first, end - 1), end)]
        return found if len(found) == self.group_size else draw.choices(found, k=self.group_size)


@dataclass(frozen=True, slots=True)
class RunTiming:
    """What was measured. Steps and ages are of the steps that are counted: all but the first fifth."""

    machine: SimulatedMachine
    workload: RecordedRollouts
    num_steps: int
    steps_per_s: float
    age_mean: float
    handover_s: float
    notes: tuple[str, ...]


def read_timing(run_dir: Path, *, slots: int, num_engines: int, group_size: int) -> RunTiming:
    """`num_engines`: of the run. Raises ConfigError if the run has too few steps or rollouts on record."""
    problems, parse = list[str](), _CHECK.validate_json
    files = (run_dir / OLD_TIMES_FILE, run_dir / TIMES_FILE)
    lines = [line for path in files for _, line in lines_of(path, problems, lambda text: _valid(parse, text))]
    taken_s, first_s = _taken(run_dir), min((line["start_s"] for line in lines), default=0.0)
    newest = {int(step["step"]): step for step in metrics_of(run_dir / METRICS_FILE, problems, *_NEEDED)}
    steps = [step for number, step in newest.items() if taken_s.get(number, -1.0) >= first_s]
    if len(steps) < MIN_STEPS or not any(line["turns"] for line in lines):
        raise ConfigError(
            f"{run_dir} has {len(steps)} steps whose rollouts are on record, and {len(lines)} rollouts in "
            f"{TIMES_FILE}{''.join(f'; {problem}' for problem in problems[:1])}",
            rule=f"a forecast of a run takes {MIN_STEPS} steps and their rollouts at least",
            way_out="let it run on for a while, or give `asyncrl simulate` a config instead.",
        )
    workload = RecordedRollouts(_groups(lines), group_size)
    began = np.array([taken_s[int(step["step"])] for step in steps])
    requests = _Requests(lines, num_engines)
    timing = _timing(steps, began, requests, workload, slots=slots, num_engines=num_engines)
    return replace(timing, notes=(*timing.notes, *(f"problem: {problem}" for problem in problems)))


def _valid(parse: Callable[[bytes], RolloutTimes], text: bytes) -> RolloutTimes | None:
    try:
        return parse(text)
    except ValidationError:
        return None


def _taken(run_dir: Path) -> dict[int, float]:
    """By version, when its batch was taken: seconds since the epoch. {} without a journal that reads."""
    try:
        with reading(run_dir / JOURNAL_FILE) as connection:
            return dict(connection.execute("SELECT version, taken_s FROM batches"))
    except (JournalError, OSError):
        return {}


def _groups(lines: Sequence[RolloutTimes]) -> list[list[RolloutPlan]]:
    """The rollouts by group. One that was cut short takes as long as one of those that took longer, for what
    is too late is what takes long (redistribution to the right: Efron 1967, the product-limit estimate).
    """
    by_time = sorted(lines, key=lambda line: line["end_s"])
    times = [line["end_s"] for line in by_time]
    draw = random.Random(0)

    def whole(line: RolloutTimes) -> RolloutTimes:
        while line["how"] == "cut" and (first := bisect_right(times, line["end_s"])) < len(times):
            line = by_time[draw.randrange(first, len(times))]
        return line

    groups: dict[int, dict[int, RolloutTimes]] = {}
    for line in lines:  # of a rollout that was tried again the last attempt counts
        groups.setdefault(line["group"], {})[line["sample"]] = line
    return [[_plan(whole(line)) for line in groups[number].values()] for number in sorted(groups)]


def _plan(line: RolloutTimes) -> RolloutPlan:
    turns, then_s = list[tuple[float, float]](), 0.0
    for asked_s, answered_s, _, num_sampled in line["turns"]:
        turns.append((max(0.0, asked_s - then_s), float(num_sampled)))
        then_s = answered_s
    held_s = max(0.0, line["held_s"] - then_s)
    return RolloutPlan(tuple(turns), held_s, max(0.0, line["end_s"] - line["held_s"]))


# ---- speeds


class _Integral:
    """Of a function of time that is constant between its changes."""

    def __init__(self, times: Array, values: Array) -> None:
        self._times, spans = times, values[:-1] * np.diff(times)
        self._sums = np.concatenate([[0.0], np.cumsum(spans)])

    def over(self, start: Array, end: Array) -> Array:
        """One number for each interval."""
        at_end: Array = np.interp(end, self._times, self._sums)
        at_start: Array = np.interp(start, self._times, self._sums)
        return at_end - at_start


class _Requests:
    """Those that engines have answered, and how many ran at each time, an engine."""

    def __init__(self, lines: Sequence[RolloutTimes], num_engines: int) -> None:
        turns = [
            (line["start_s"] + asked_s, line["start_s"] + answered_s, num_sampled)
            for line in lines
            for asked_s, answered_s, _, num_sampled in line["turns"]
        ]
        self.asked, self.answered, self.tokens = np.array(turns, dtype=np.float64).T
        self.seconds = np.maximum(self.answered - self.asked, 1e-9)
        both, steps = np.concatenate([self.asked, self.answered]), np.ones(len(turns))
        order = np.argsort(both, kind="stable")
        self.times = both[order]
        self.running = np.cumsum(np.concatenate([steps, -steps])[order]) / num_engines

    def over(self, values: Array) -> Array:
        """Integral over each request of what depends on how many run."""
        return _Integral(self.times, values).over(self.asked, self.answered)

    def fit(self, training: _Integral) -> tuple[list[float], float]:
        """[step_s, row_s, request_s] of SimulatedMachine, and train_drag.

        The load of a request is that at its mean token, not at its mean moment: where more run, a token takes
        longer. So each round takes the speeds of the one before.
        """
        beside = training.over(self.asked, self.answered) / self.seconds
        rate, found, drag = np.ones(len(self.running)), [0.0, 0.0, 0.0], 0.0
        for _ in range(NUM_ROUNDS):
            load = self.over(self.running * rate) / np.maximum(self.over(rate), 1e-12)
            columns = (self.tokens, self.tokens * load, np.ones(len(load)))
            found, drag = _fit_beside(self.seconds, beside, *columns)
            rate = 1.0 / np.maximum(found[0] + found[1] * self.running, 1e-9)
        return found, drag


def _column(steps: Sequence[Mapping[str, Any]], name: str) -> Array:
    return np.array([step.get(name, 0.0) for step in steps], dtype=np.float64)


def _timing(
    steps: Sequence[Mapping[str, Any]],
    began: Array,
    requests: _Requests,
    workload: RecordedRollouts,
    *,
    slots: int,
    num_engines: int,
) -> RunTiming:
    """`began`: when each step took its batch, seconds since the epoch."""
    train_s, later = _column(steps, "perf/train_s"), slice(1, None)  # the first step is slow
    is_training = np.tile([1.0, 0.0], len(began))
    training = _Integral(np.stack([began, began + train_s], 1).ravel(), is_training)
    (step_s, row_s, request_s), train_drag = requests.fit(training)
    is_busy = (requests.running > 0).astype(np.float64)
    busy = _Integral(requests.times, is_busy).over(began, began + train_s) / train_s
    sampled = _column(steps, "tokens/sampled")
    (fixed_s, token_s), decode_drag = _fit_beside(
        train_s[later], busy[later], np.ones(len(steps) - 1), sampled[later]
    )
    num_first = max(1, len(steps) // 5)
    first, counted = steps[num_first - 1], steps[num_first:]
    wall_s = counted[-1]["time_s"] - first["time_s"]
    parts = ("perf/train_s", "perf/wait_s", "perf/handover_s")
    known_s = sum(float(_column(counted, name).sum()) for name in parts)
    machine = SimulatedMachine(
        slots=slots,
        num_engines=num_engines,
        step_s=step_s,
        row_s=row_s,
        request_s=request_s,
        train_s=fixed_s,
        train_token_s=token_s,
        overhead_s=max(0.0, wall_s - known_s) / len(counted),
        publish_s=float(_column(counted, "perf/weight_sync_s").mean()),
        pause_s=float(_column(counted, "perf/weight_sync_pause_s").mean()),
        train_drag=train_drag,
        decode_drag=decode_drag,
    )
    return RunTiming(
        machine,
        workload,
        num_steps=len(steps),
        steps_per_s=len(counted) / wall_s,
        age_mean=float(_column(counted, "sample/staleness_mean").mean()),
        handover_s=float(_column(counted, "perf/handover_s").mean()),
        notes=_notes(float(busy.mean())),
    )


def _notes(busy: float) -> tuple[str, ...]:
    found = {NEVER_AT_ONCE: busy < LEAST_BESIDE, ALWAYS_AT_ONCE: busy > MOST_BESIDE}
    return tuple(words for words, is_so in found.items() if is_so)


def _fit_beside(seconds: Array, share: Array, *columns: Array) -> tuple[list[float], float]:
    """The coefficients of `seconds` = columns / (1 - drag * share), and the drag: what is lost of the speed
    during the `share` of the time in which the other side works. The drag that leaves least over is taken.
    """
    tried = []
    for drag in DRAGS:
        slower = 1.0 - drag * share
        found, left_over = _fit(seconds, *(column / slower for column in columns))
        tried.append((left_over, drag, found))
    _, drag, found = min(tried)
    return found, drag


def _fit(target: Array, *columns: Array) -> tuple[list[float], float]:
    """Least squares, and the sum of squares that is left; a column that would get less than 0 is left out,
    the worst one first.
    """
    kept, found = list(range(len(columns))), np.zeros(len(columns))
    while kept:
        matrix = np.stack([columns[index] for index in kept], 1)
        scale = np.maximum(np.abs(matrix).max(0), 1e-12)
        solved = np.linalg.lstsq(matrix / scale, target, rcond=None)[0]
        if solved.min() >= 0:
            found[kept] = solved / scale
            break
        kept.pop(int(solved.argmin()))
    left = target - sum(value * column for value, column in zip(found, columns, strict=True))
    return [float(value) for value in found], float(left @ left)

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

from asyncrl.buffer.workload import RolloutPlan, SimulatedMachine, TurnPlan
from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError, JournalError
from asyncrl.journal.read import reading
from asyncrl.messages.base import Interrupt
from asyncrl.observe.inspect import JOURNAL_FILE
from asyncrl.observe.recorder import METRICS_FILE, lines_of, metrics_of
from asyncrl.rollouts.timed import OLD_TIMES_FILE, TIMES_FILE, RolloutTimes

MIN_STEPS = 5
WINDOW = 64
"""Groups to each side of the place in the run where a simulated group is drawn: lengths change as a model
learns.
"""
NUM_ROUNDS = 8
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
ALL_FOR_TOKENS = (
    "the requests on record are too few, or too much alike, to tell the time of a token from that of a "
    "request: all of it is taken for tokens"
)
PACKED = "perf/packed_tokens"
_NEEDED = PACKED, "step", "time_s", "perf/train_s", "tokens/sampled"
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
    """What was measured. Steps and ages are of the steps that are counted: all but the first fifth, and the
    last ones, beside which no group starts any more.
    """

    machine: SimulatedMachine
    workload: RecordedRollouts
    num_steps: int
    steps_per_s: float
    age_mean: float
    handover_s: float
    notes: tuple[str, ...]


def read_timing(run_dir: Path, own: RunConfig, *, slots: int, group_size: int) -> RunTiming:
    """`own`: the run's config. Raises ConfigError if the run has too few steps or rollouts on record."""
    problems, parse = list[str](), _CHECK.validate_json
    files = (run_dir / OLD_TIMES_FILE, run_dir / TIMES_FILE)
    lines = [line for path in files for _, line in lines_of(path, problems, lambda text: _valid(parse, text))]
    taken_s, served_s = _versions(run_dir)
    first_s = min((line["start_s"] for line in lines), default=0.0)
    newest = {int(step["step"]): step for step in metrics_of(run_dir / METRICS_FILE, problems, *_NEEDED)}
    steps = [step for number, step in newest.items() if taken_s.get(number - 1, -1.0) >= first_s]
    if len(steps) < MIN_STEPS or not any(line["turns"] for line in lines):
        raise ConfigError(
            f"{run_dir} has {len(steps)} steps whose rollouts are on record, and {len(lines)} rollouts in "
            f"{TIMES_FILE}{''.join(f'; {problem}' for problem in problems[:1])}",
            rule=f"a forecast of a run takes {MIN_STEPS} steps and their rollouts at least",
            way_out="let it run on for a while, or give `asyncrl simulate` a config instead.",
        )
    samples: dict[int, set[int]] = {}
    for line in lines:
        samples.setdefault(line["group"], set()).add(line["sample"])
    sizes = {group: len(found) for group, found in samples.items()}
    trained = _column(steps, PACKED) / np.maximum(_column(steps, "tokens/sampled"), 1.0)
    workload = RecordedRollouts(_groups(lines, sizes, trained), group_size)
    began = np.array([taken_s[int(step["step"]) - 1] for step in steps])
    requests = Requests(lines, sizes, sorted(served_s.values()), own.rollout.max_engines, own.interrupt)
    later = np.array([served_s.get(int(step["step"]), np.nan) for step in steps])
    timing = _timing(steps, began, later, requests, workload, own, slots)
    return replace(timing, notes=(*timing.notes, *(f"problem: {problem}" for problem in problems)))


def _valid(parse: Callable[[bytes], RolloutTimes], text: bytes) -> RolloutTimes | None:
    try:
        return parse(text)
    except ValidationError:
        return None


def _versions(run_dir: Path) -> tuple[dict[int, float], dict[int, float]]:
    """By version, when its batch was taken, and when it was served: seconds since the epoch. Nothing without
    a journal that reads.
    """
    try:
        with reading(run_dir / JOURNAL_FILE) as connection:
            taken_s = dict(connection.execute("SELECT version, taken_s FROM batches"))
            return taken_s, dict(connection.execute("SELECT version, served_s FROM publishes"))
    except (JournalError, OSError):
        return {}, {}


def _groups(
    lines: Sequence[RolloutTimes], sizes: Mapping[int, int], trained: Array
) -> list[list[RolloutPlan]]:
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
    found = list[list[RolloutPlan]]()
    for place, number in enumerate(sorted(groups)):
        share = float(trained[place * len(trained) // len(groups)])
        found.append([_plan(whole(line), sizes, share) for line in groups[number].values()])
    return found


def _plan(line: RolloutTimes, sizes: Mapping[int, int], trained: float) -> RolloutPlan:
    turns, then_s = list[TurnPlan](), 0.0
    for (asked_s, answered_s, _, num_sampled), num_read in zip(
        line["turns"], _reads(line, sizes), strict=True
    ):
        turns.append(TurnPlan(max(0.0, asked_s - then_s), num_read, float(num_sampled)))
        then_s = answered_s
    held_s = max(0.0, line["held_s"] - then_s)
    return RolloutPlan(tuple(turns), held_s, max(0.0, line["end_s"] - line["held_s"]), trained)


def _reads(line: RolloutTimes, sizes: Mapping[int, int]) -> list[float]:
    """Tokens that each turn adds to what was read: the first a share of the prompt, which an engine reads
    once for the group; a later one what its tools said.
    """
    reads, num_held = list[float](), 0
    for _, _, num_prompt, num_sampled in line["turns"]:
        reads.append(float(max(0, num_prompt - num_held)) if reads else num_prompt / sizes[line["group"]])
        num_held = num_prompt + num_sampled
    return reads


# ---- speeds


class Integral:
    """Of a function of time that is constant between its changes."""

    def __init__(self, times: Array, values: Array) -> None:
        self._times, spans = times, values[:-1] * np.diff(times)
        self._sums = np.concatenate([[0.0], np.cumsum(spans)])

    def over(self, start: Array, end: Array) -> Array:
        """One number for each interval."""
        at_end: Array = np.interp(end, self._times, self._sums)
        at_start: Array = np.interp(start, self._times, self._sums)
        return at_end - at_start


class Requests:
    """Those that engines have answered, how many ran at each time, and what was read when, an engine."""

    def __init__(
        self,
        lines: Sequence[RolloutTimes],
        sizes: Mapping[int, int],
        served_s: Sequence[float],
        num_engines: int,
        interrupt: Interrupt,
    ) -> None:
        self.reads_again = interrupt == "abort"  # where they are kept, the pause is for that
        turns, served = list[tuple[float, ...]](), np.array(served_s, dtype=np.float64)
        for line in lines:
            num_held, then_s = 0.0, line["start_s"]
            for (asked_s, answered_s, _, sampled), num_new in zip(
                line["turns"], _reads(line, sizes), strict=True
            ):
                start_s, num_held = line["start_s"] + asked_s, num_held + num_new
                is_stale = bisect_right(served_s, start_s) > bisect_right(served_s, then_s)
                num_read = num_held if is_stale and self.reads_again else num_new
                turns.append((start_s, line["start_s"] + answered_s, sampled, num_held, num_read))
                num_held, then_s = num_held + sampled, line["start_s"] + answered_s
        self.asked, self.answered, self.tokens, num_before, num_read = np.array(turns, dtype=np.float64).T
        self.seconds = np.maximum(self.answered - self.asked, 1e-9)
        both, ones = np.concatenate([self.asked, self.answered]), np.ones(len(turns))
        order = np.argsort(both, kind="stable")
        self.times = both[order]
        self.running = np.cumsum(np.concatenate([ones, -ones])[order]) / num_engines
        self.num_admitted = self._within(self.asked, ones / num_engines)
        rate = self.tokens / self.seconds
        now = served - self.asked[0]
        had = self._ran(num_before - rate * (self.asked - self.asked[0]), served)
        held = (had + self._ran(rate, served) * now) * self.reads_again
        # It was served after the pause: what begins then has not paused.
        self.num_swaps = self._within(served - 1e-6, np.ones(len(served)))
        self.num_read = self._within(
            np.concatenate([self.asked, served]), np.concatenate([num_read, held]) / num_engines
        )

    def _within(self, times: Array, values: Array) -> Array:
        """Sum of what happens at these times, over each request."""
        return _before(times, values, self.answered) - _before(times, values, self.asked)

    def _ran(self, values: Array, at: Array) -> Array:
        """Sum over the requests that run at these times."""
        return _before(self.asked, values, at) - _before(self.answered, values, at)

    def over(self, values: Array) -> Array:
        """Integral over each request of what depends on how many run."""
        return Integral(self.times, values).over(self.asked, self.answered)

    def fit(self, training: Integral, pause_s: float) -> tuple[list[float], float]:
        """[step_s, row_s, request_s, admit_s, read_s] of SimulatedMachine, and train_drag. `pause_s`: of each
        swap. A token always takes time: where the fit finds none, it takes all that requests took.

        The load of a request is that at its mean token, not at its mean moment: where more run, a token takes
        longer. So each round takes the speeds of the one before.
        """
        beside = training.over(self.asked, self.answered) / self.seconds
        seconds = self.seconds - self.num_swaps * pause_s
        rate, found, drag = np.ones(len(self.running)), [0.0] * 5, 0.0
        for _ in range(NUM_ROUNDS):
            load = self.over(self.running * rate) / np.maximum(self.over(rate), 1e-12)
            columns = (self.tokens, self.tokens * load, np.ones(len(load)), self.num_admitted, self.num_read)
            found, drag = _fit_beside(seconds, beside, *columns)
            rate = 1.0 / np.maximum(found[0] + found[1] * self.running, 1e-9)
        if not found[0] + found[1]:
            return [float(self.seconds.sum() / max(self.tokens.sum(), 1.0)), *[0.0] * 4], 0.0
        return found, drag


def _before(times: Array, values: Array, at: Array) -> Array:
    """Sum of the values whose time is before each of these."""
    order = np.argsort(times, kind="stable")
    sums = np.concatenate([[0.0], np.cumsum(values[order])])
    found: Array = sums[np.searchsorted(times[order], at)]
    return found


def _column(steps: Sequence[Mapping[str, Any]], name: str) -> Array:
    return np.array([step.get(name, 0.0) for step in steps], dtype=np.float64)


def _timing(
    steps: Sequence[Mapping[str, Any]],
    began: Array,
    served: Array,
    requests: Requests,
    workload: RecordedRollouts,
    own: RunConfig,
    slots: int,
) -> RunTiming:
    """`began`: when each step took its batch, `served`: when its weights were, seconds since the epoch."""
    train_s, later = _column(steps, "perf/train_s"), slice(1, None)  # the first step is slow
    is_training = np.tile([1.0, 0.0], len(began))
    training = Integral(np.stack([began, began + train_s], 1).ravel(), is_training)
    pause_s = float(_column(steps, "perf/weight_sync_pause_s").mean())
    (step_s, row_s, request_s, admit_s, read_s), train_drag = requests.fit(training, pause_s)
    is_busy = (requests.running > 0).astype(np.float64)
    busy = Integral(requests.times, is_busy).over(began, began + train_s) / train_s
    packed = _column(steps, PACKED)
    (fixed_s, token_s), decode_drag = _fit_beside(
        train_s[later], busy[later], np.ones(len(steps) - 1), packed[later]
    )
    num_first = max(1, len(steps) // 5)
    end = max(num_first + 1, len(steps) - own.buffer.max_staleness - 1)
    first, counted = steps[num_first - 1], steps[num_first:end]
    wall_s = counted[-1]["time_s"] - first["time_s"]
    parts = ("perf/train_s", "perf/wait_s", "perf/handover_s")
    known_s = sum(float(_column(counted, name).sum()) for name in parts)
    overhead_s = max(0.0, wall_s - known_s) / len(counted)
    handover_s = float(_column(counted, "perf/handover_s").mean())
    publish_s = float(_column(counted, "perf/weight_sync_s").mean())
    since_s = served - began - train_s - overhead_s / 2
    if not handover_s and np.isfinite(since_s).any():  # with all that the controller does around it
        publish_s = max(publish_s, float(np.nanmean(since_s)))
    machine = SimulatedMachine(
        slots=slots,
        num_engines=own.rollout.max_engines,
        step_s=step_s,
        row_s=row_s,
        request_s=request_s,
        admit_s=admit_s,
        read_s=read_s,
        train_s=fixed_s,
        train_token_s=token_s,
        overhead_s=overhead_s,
        publish_s=publish_s,
        pause_s=pause_s,
        reads_again=requests.reads_again,
        train_drag=train_drag,
        decode_drag=decode_drag,
    )
    return RunTiming(
        machine,
        workload,
        num_steps=len(steps),
        steps_per_s=len(counted) / wall_s,
        age_mean=float(_column(counted, "sample/staleness_mean").mean()),
        handover_s=handover_s,
        notes=_notes(float(busy.mean()), is_split=any((row_s, request_s, admit_s, read_s))),
    )


def _notes(busy: float, *, is_split: bool) -> tuple[str, ...]:
    found = {
        NEVER_AT_ONCE: busy < LEAST_BESIDE,
        ALWAYS_AT_ONCE: busy > MOST_BESIDE,
        ALL_FOR_TOKENS: not is_split,
    }
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

"""Data of the page as plain JSON values. Text of models, tasks and users is text, never HTML."""

from __future__ import annotations

from typing import Any, NotRequired

from typing_extensions import TypedDict

from asyncrl.observe.samples import ShownRollout


class Curve(TypedDict):
    """A metric: one entry for each bucket of neighboring steps, null without a value. `low` and `high` are
    the extremes of a bucket; absent if each bucket is one step.
    """

    mean: list[float | None]
    low: NotRequired[list[float | None]]
    high: NotRequired[list[float | None]]


class Timeline(TypedDict):
    """Spans of all processes. Times are seconds since `start_s` (seconds since the epoch).

    `lanes`: names from the top: the trainer, weight sync, one or more for each engine, checkpoints,
    restarts.
    `kinds`: kinds of spans, each with a `name` and a `meaning`. `spans`: [lane, kind, start, end, text]
    by number of lane and kind; an instant has start = end. `slots`: engine -> [time, busy requests], busy
    over time, of the `num_slots` that each engine has. `is_thinned`: some spans are omitted.
    """

    start_s: float
    lanes: list[str]
    kinds: list[dict[str, str]]
    spans: list[tuple[int, int, float, float, str]]
    slots: dict[str, list[tuple[float, float]]]
    num_slots: int
    is_thinned: bool


class Share(TypedDict):
    """Part of the time: its name, total seconds, and its fraction of the run."""

    name: str
    seconds: float
    fraction: float


class Failure(TypedDict):
    """Failures of one cause: number of rollouts, and one full message."""

    cause: str
    count: int
    example: str


class Setting(TypedDict):
    """A key of the config as text; `default` is null for a required key."""

    key: str
    value: str
    default: str | None
    differs: bool


class Tile(TypedDict):
    """A number at the top of the page: `label`, `value` with its unit, and `note`, a line below."""

    label: str
    value: str
    note: str


class ShownVerdict(TypedDict):
    """Sentences of the verdict. `ended`: how the run ended, if not well; else ''.
    `health`: null before the first step, empty for a healthy run. The rewards
    are means of the first and of the recent steps; `reward_noise`: standard error of the recent mean;
    `num_recent`: its number of steps.
    """

    ended: str
    headline: str
    learning: list[str]
    health: list[str] | None
    speed: list[str]
    reward_first: float | None
    reward_last: float | None
    reward_noise: float | None
    num_recent: int
    trend: str


class RunView(TypedDict):
    """A run. `window`: points of a curve for the recent steps of the verdict. `step` and `time_s`: the x
    values of the curves; `evaluations`: policy_version, time_s and metrics of each. `step_times`: parts of
    perf/step_s. `gauges`: unit and meaning of each metric.
    """

    name: str
    run_dir: str
    state: str
    why: str
    started_s: float
    num_steps: int
    max_staleness: int
    verdict: ShownVerdict
    window: int
    tiles: list[Tile]
    step: list[float]
    time_s: list[float]
    curves: dict[str, Curve]
    step_times: dict[str, list[float | None]]
    evaluations: list[dict[str, Any]]
    gauges: dict[str, dict[str, str]]
    shares: list[Share]
    timeline: Timeline
    samples: list[ShownRollout]
    failures: list[Failure]
    warnings: list[str]
    settings: list[Setting]
    problems: list[str]


class Difference(TypedDict):
    """A setting or result in which runs differ: a text for each run, in their order."""

    key: str
    values: list[str]


class Page(TypedDict):
    """The page of one run or several. `is_live`: the page asks for changes."""

    asyncrl: str
    made_s: float
    is_live: bool
    runs: list[RunView]
    differences: list[Difference]

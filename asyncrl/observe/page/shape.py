"""What the page of a run shows, as plain JSON values: made by this folder's Python, drawn by its JavaScript.

Everything that a model, a task or a user wrote is text in here, never HTML.
"""

from __future__ import annotations

from typing import Any, NotRequired

from typing_extensions import TypedDict

from asyncrl.observe.samples import ShownRollout


class Curve(TypedDict):
    """One metric, thinned: one entry a bucket of neighbouring steps; low and high are the bucket's extremes,
    left out where no bucket has more than one step. null where a bucket has no value.
    """

    mean: list[float | None]
    low: NotRequired[list[float | None]]
    high: NotRequired[list[float | None]]


class Timeline(TypedDict):
    """What ran when. Times are seconds since `start_s` (seconds since the epoch).

    `lanes`: names from the top: the trainer, weight sync, one or more for each engine, checkpoints,
    restarts.
    `kinds`: what a span can be, each with a `name` and a `meaning`. `spans`: [lane, kind, start, end, text]
    by number of lane and kind; an instant has start = end. `slots`: engine -> [time, busy requests], busy
    over time, of the `num_slots` that each engine has. `is_thinned`: spans were left out, the shortest first,
    or only the newest are shown.
    """

    start_s: float
    lanes: list[str]
    kinds: list[dict[str, str]]
    spans: list[tuple[int, int, float, float, str]]
    slots: dict[str, list[tuple[float, float]]]
    num_slots: int
    is_thinned: bool


class Share(TypedDict):
    """Where time went: `name` in words, seconds in all, and of the run's time 0..1."""

    name: str
    seconds: float
    fraction: float


class Failure(TypedDict):
    """Failures of one cause: how many rollouts, and one message in full."""

    cause: str
    count: int
    example: str


class Setting(TypedDict):
    """One key of the config as text; `default` as text, null where the key has none."""

    key: str
    value: str
    default: str | None
    differs: bool


class Tile(TypedDict):
    """A number at the head of the page: `label`, `value` in words with its unit, and `note`, a line below."""

    label: str
    value: str
    note: str


class ShownVerdict(TypedDict):
    """Did it learn, is it healthy, how fast was it: sentences, as verdict.py makes them. `ended`: how the run
    ended, if not well; else ''. `health`: null before the first step, empty for a healthy run. The rewards
    are means of the first and of the recent steps; `reward_noise`: standard error of the recent mean;
    `num_recent`: how many steps it is over.
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
    """One run. `window`: the number of points of a curve that the verdict's recent steps are. `step` and
    `time_s`: the x values of the curves; `evaluations`: policy_version, time_s and metrics of each.
    `step_times`: seconds of a step by what they went on, which add up to perf/step_s. `gauges`: unit and
    meaning of each metric.
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
    """The page: one run, or several that are compared. `is_live`: the page is told of changes."""

    asyncrl: str
    made_s: float
    is_live: bool
    runs: list[RunView]
    differences: list[Difference]

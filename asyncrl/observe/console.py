"""The live panel, as a function of what was reported so far. Fits 80 columns. Knows metrics; knows no rooms,
no clock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TextIO

from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncrl.observe.run_numbers import Steps
from asyncrl.observe.text import duration, outliving, skipped_text, sparkline, time_parts

# What a person sees while a run goes on: a live panel on a terminal, else one plain line a step. Knows
# metrics; knows no rooms.


Kind = Literal["auto", "live", "plain", "none"]


class Console:
    """Shows progress. Life: silent until start(); live until close(). A context manager does both.

    live repaints one panel; plain prints a line a step; none prints nothing at all; auto is live on a
    terminal, else plain. The live panel has a thread of rich's own that repaints, so the clock goes on while
    nothing happens. A run outlives whoever reads it: once the file cannot be written any more, nothing is
    shown, and nothing raises, in either thread.
    """

    def __init__(
        self,
        kind: Kind,
        *,
        run_name: str,
        num_steps: int,
        max_staleness: int,
        file: TextIO | None = None,
        width: int | None = None,
    ) -> None:
        self._rich = RichConsole(
            file=outliving(file), width=width, highlight=False
        )  # rich itself ends the process on a closed pipe
        self.kind: Kind = ("live" if self._rich.is_terminal else "plain") if kind == "auto" else kind
        self._state = PanelState(
            run_name=run_name, num_steps=num_steps, max_staleness=max_staleness, started_s=time.monotonic()
        )
        self._live: Live | None = None

    def __repr__(self) -> str:
        return f"<Console {self.kind}, step {self._state.steps_done}>"

    def __enter__(self) -> Console:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Begin to show."""
        self._state.started_s = time.monotonic()
        if self.kind == "live" and self._live is None:
            self._live = Live(get_renderable=self._render, console=self._rich, refresh_per_second=4)
            self._live.start()

    def goes_on(self, steps: Steps) -> None:
        """Steps that were taken before this process began: the panel counts on from them."""
        for metrics in steps.rows():
            self._state.add_step(metrics)

    def show_step(self, metrics: Mapping[str, float]) -> None:
        """The metrics of one optimizer step."""
        self._state.add_step(metrics)
        if self.kind == "plain":
            self._print(
                plain_line(metrics, num_steps=self._state.num_steps, max_staleness=self._state.max_staleness)
            )

    def show_activity(self, text: str) -> None:
        """What the run does right now ("waiting for stragglers"); shown by the live panel alone."""
        self._state.activity = text

    def say(self, text: str) -> None:
        """A line that stays, above the live panel."""
        if self.kind != "none":
            self._print(text)

    def show(self, renderable: RenderableType) -> None:
        """Anything rich can draw (the summary at the end); stays."""
        if self.kind != "none":
            self._rich.print(renderable)

    def close(self) -> None:
        """Stop repainting, leave the last picture; idempotent."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, text: str) -> None:
        self._rich.print(escape(text), soft_wrap=True)

    def _render(self) -> RenderableType:
        return live_panel(self._state, now_s=time.monotonic())


def plain_line(metrics: Mapping[str, float], *, num_steps: int, max_staleness: int) -> str:
    """One step on one line: `step  12/300  reward 0.413  staleness 1.2 (max 3 of 4)  0.41 s/step  train 71%
    wait 24%`.

    From a wait of 10 % on, the largest part of it is named.
    """
    width = len(str(num_steps))
    parts = [f"step {steps_done(metrics):>{width}}/{num_steps}"]
    if (reward := metrics.get("reward/mean")) is not None:
        parts.append(f"reward {reward:.3f}")
    if (age := metrics.get("sample/staleness_mean")) is not None:
        parts.append(
            f"staleness {age:.1f} (max {metrics.get('sample/staleness_max', age):.0f} of {max_staleness})"
        )
    if (masked := metrics.get("sample/masked_fraction", 0.0)) > 0:
        parts.append(f"masked {masked:.1%}")
    if skipped := skipped_text(metrics):
        parts.append(skipped)
    if (step_s := metrics.get("perf/step_s")) is not None:
        parts.append(f"{step_s:.2f} s/step")
        parts.append(_time_words(dict(time_parts(metrics))))
    return "  ".join(parts)


def _time_words(shares: dict[str, float]) -> str:
    waits = {name: share for name, share in shares.items() if name.startswith("wait ")}
    if not waits:
        return ""
    words = f"train {shares['train']:.0%} wait {sum(waits.values()):.0%}"
    largest = max(waits, key=lambda name: waits[name])
    return f"{words} ({largest.removeprefix('wait ')})" if sum(waits.values()) >= 0.1 else words


_RECENT = 20
_MOST_REWARDS = 1024
_COLOURS = {
    "train": "green",
    "wait gen": "yellow",
    "wait stragglers": "red",
    "wait publish": "magenta",
    "other": "bright_black",
}


@dataclass(slots=True)
class PanelState:
    """What the panel shows: the last metrics, rewards of all the run, and the last steps for means. Times in
    seconds of one clock.

    `rewards` has each `reward_every`-th of `num_rewards`, so that it stays short however long the run is.
    `num_skipped`: optimizer steps skipped so far, `last_skipped` the newest of them in words.
    """

    run_name: str
    num_steps: int
    max_staleness: int
    started_s: float
    steps_done: int = 0
    activity: str = "starting"
    last: Mapping[str, float] = field(default_factory=dict)
    num_skipped: int = 0
    last_skipped: str = ""
    rewards: list[float] = field(default_factory=list)
    num_rewards: int = 0
    reward_every: int = 1
    recent: deque[Mapping[str, float]] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def add_step(self, metrics: Mapping[str, float]) -> None:
        """Take in one step."""
        self.steps_done = steps_done(metrics)
        self.last = metrics
        self.recent.append(metrics)
        self.num_skipped += int(metrics.get("trainer/skipped_steps", 0))
        self.last_skipped = skipped_text(metrics) or self.last_skipped
        if "reward/mean" in metrics:
            if self.num_rewards % self.reward_every == 0:
                self.rewards.append(metrics["reward/mean"])
            self.num_rewards += 1
            if len(self.rewards) == _MOST_REWARDS:
                self.rewards, self.reward_every = (
                    self.rewards[::2],
                    2 * self.reward_every,
                )  # one list for another: it may be being shown

    def recent_total(self, name: str) -> float:
        """Sum of a metric over the last steps."""
        return sum(
            step.get(name, 0.0) for step in tuple(self.recent)
        )  # a copy: the repainting thread asks too


def steps_done(metrics: Mapping[str, float]) -> int:
    """Optimizer steps taken once this one is: its number `step` counts from 0."""
    return int(metrics["step"]) + 1


def live_panel(state: PanelState, *, now_s: float) -> RenderableType:
    """The whole panel at time `now_s`."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold", width=9, no_wrap=True)
    rows.add_column(ratio=1, overflow="fold")
    rows.add_row("progress", _progress(state, now_s))
    rows.add_row("now", Text(state.activity, overflow="ellipsis", no_wrap=True))
    if state.last:
        rows.add_row("reward", _reward(state))
        rows.add_row("staleness", _staleness(state))
        rows.add_row("speed", _speed(state))
        rows.add_row("time", _time(state))
        rows.add_row("rollouts", _rollouts(state.last))
        if state.num_skipped:
            rows.add_row("skipped", Text(f"{state.last_skipped}, {state.num_skipped} in all", style="red"))
    return Panel(
        rows,
        title=Text.assemble(("asyncrl ", "bold"), state.run_name),
        title_align="left",
        border_style="blue",
    )


def _progress(state: PanelState, now_s: float) -> RenderableType:
    elapsed_s = now_s - state.started_s
    words = f"{state.steps_done}/{state.num_steps}  {duration(elapsed_s)}"
    if state.recent and state.steps_done < state.num_steps:
        step_s = state.recent_total("perf/step_s") / len(state.recent)
        words += f", {duration(step_s * (state.num_steps - state.steps_done))} to go"
    line = Table.grid(padding=(0, 1), expand=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True, justify="right")
    line.add_row(ProgressBar(total=state.num_steps, completed=state.steps_done), words)
    return line


def _reward(state: PanelState) -> RenderableType:
    if not state.rewards:
        return Text("-")
    line = sparkline(state.rewards, width=32)
    return Text.assemble(
        (f"{state.last.get('reward/mean', state.rewards[-1]):.3f}  ", "bold"),
        (line, "cyan"),
        f"  from {state.rewards[0]:.3f}",
    )


def _staleness(state: PanelState) -> RenderableType:
    mean, largest = state.last.get("sample/staleness_mean"), state.last.get("sample/staleness_max")
    if mean is None or largest is None:
        return Text("no token in the loss")
    text = Text(f"{mean:.1f} on average, {largest:.0f} at most of {state.max_staleness} allowed")
    if (masked := state.last.get("sample/masked_fraction", 0.0)) > 0:
        text.append(f", {masked:.1%} of the tokens masked")
    return text


def _speed(state: PanelState) -> RenderableType:
    seconds = state.recent_total("perf/step_s")
    if seconds <= 0:
        return Text("-")
    tokens = state.recent_total("tokens/trained") / seconds
    length = state.last.get("sample/length_mean", 0.0)
    return Text(
        f"{seconds / len(state.recent):.2f} s a step, {tokens:,.0f} trained tokens/s, {length:.0f} tokens a "
        f"rollout"
    )


def _time(state: PanelState) -> RenderableType:
    names = (
        "perf/step_s",
        "perf/train_s",
        "perf/wait_generation_s",
        "perf/wait_stragglers_s",
        "perf/wait_publishing_s",
    )
    parts = time_parts({name: state.recent_total(name) for name in names})
    shown = [(f"{name} {share:.0%}", _COLOURS[name]) for name, share in parts if share >= 0.005]
    words: list[tuple[str, str] | str] = []
    for part in shown:
        words += [", ", part] if words else [part]
    return Text.assemble(*words)


def _rollouts(last: Mapping[str, float]) -> RenderableType:
    parts = [
        ("in flight", "inflight"),
        ("interrupted", "interrupted"),
        ("retried", "retried"),
        ("failed", "failed"),
        ("dropped", "dropped"),
        ("filtered", "filtered"),
    ]
    words = [f"{last[f'rollout/{key}']:.0f} {name}" for name, key in parts if f"rollout/{key}" in last]
    return Text(", ".join(words) or "-")

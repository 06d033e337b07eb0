"""What a person sees while a run goes on: a live panel on a terminal, else one plain line a step. Knows
metrics.

Standard output that is not read (a closed pipe, a stopped terminal, a full disk) neither ends a run nor holds
it.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import select
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TextIO, cast

from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncrl.observe.run_numbers import TIME_METRICS, Steps, TimeShares, duration, skipped_text, sparkline

Kind = Literal["auto", "live", "plain", "none"]


class Console:
    """Shows progress. Life: silent until start(); live until close().

    live repaints one panel, from a thread of rich's own, so the clock goes on while nothing happens; plain
    prints a line a step; none prints nothing at all; auto is live on a terminal, else plain. Once the file
    cannot be written any more nothing is shown, and nothing raises, in either thread.
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
        # rich itself ends the process on a closed pipe
        self._rich = RichConsole(file=outliving(file), width=width, highlight=False)
        self.kind: Kind = ("live" if self._rich.is_terminal else "plain") if kind == "auto" else kind
        self._state = PanelState(run_name, num_steps, max_staleness, started_s=time.monotonic())
        self._live: Live | None = None

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
        state = self._state
        state.add_step(metrics)
        if self.kind == "plain":
            self._print(plain_line(metrics, num_steps=state.num_steps, max_staleness=state.max_staleness))

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
    wait 24%`. From a wait of 10 % on, the largest part of it is named.
    """
    parts = [f"step {int(metrics['step']) + 1:>{len(str(num_steps))}}/{num_steps}"]
    if (reward := metrics.get("reward/mean")) is not None:
        parts.append(f"reward {reward:.3f}")
    if (age := metrics.get("sample/staleness_mean")) is not None:
        largest = metrics.get("sample/staleness_max", age)
        parts.append(f"staleness {age:.1f} (max {largest:.0f} of {max_staleness})")
    if (masked := metrics.get("sample/masked_fraction", 0.0)) > 0:
        parts.append(f"masked {masked:.1%}")
    if skipped := skipped_text(metrics):
        parts.append(skipped)
    if (step_s := metrics.get("perf/step_s")) is not None:
        parts.append(f"{step_s:.2f} s/step")
        if (shares := TimeShares.of(metrics)) is not None:
            waits = {
                "gen": shares.generation,
                "stragglers": shares.stragglers,
                "publish": shares.publishing,
            }
            longest = max(waits, key=lambda name: waits[name])
            named = f" ({longest})" if shares.waiting >= 0.1 else ""
            parts.append(f"train {shares.training:.0%} wait {shares.waiting:.0%}{named}")
    return "  ".join(parts)


_RECENT = 20
_MOST_REWARDS = 1024
_TIME_WORDS = {
    "training": ("train", "green"),
    "generation": ("wait gen", "yellow"),
    "stragglers": ("wait stragglers", "red"),
    "publishing": ("wait publish", "magenta"),
    "turns": ("turns", "cyan"),
    "other": ("other", "bright_black"),
}


@dataclass(slots=True)
class PanelState:
    """What the panel shows, from the thread that repaints. `started_s`: of the clock that it is given.

    `num_skipped`: optimizer steps skipped so far, `last_skipped` the newest of them in words.
    """

    run_name: str
    num_steps: int
    max_staleness: int
    started_s: float
    activity: str = "starting"
    steps: Steps = field(default_factory=Steps)
    num_skipped: int = 0
    last_skipped: str = ""

    def add_step(self, metrics: Mapping[str, float]) -> None:
        """Take in one step."""
        self.steps.add(metrics)
        self.num_skipped += int(metrics.get("trainer/skipped_steps", 0))
        self.last_skipped = skipped_text(metrics) or self.last_skipped

    @property
    def steps_done(self) -> int:
        """The number `step` counts from 0."""
        return int(self.steps.last.get("step", -1)) + 1

    def rewards(self) -> list[float]:
        """Of all the run, evenly spread and not many: the panel is drawn often."""
        rewards = self.steps.column("reward/mean")
        return [reward for reward in rewards[:: 1 + len(rewards) // _MOST_REWARDS] if reward == reward]

    def recent_total(self, name: str) -> float:
        """Sum of a metric over the last steps."""
        return sum(value for value in self.steps.column(name)[-_RECENT:] if value == value)


def live_panel(state: PanelState, *, now_s: float) -> RenderableType:
    """The whole panel at time `now_s`; fits 80 columns."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold", width=9, no_wrap=True)
    rows.add_column(ratio=1, overflow="fold")
    rows.add_row("progress", _progress(state, now_s))
    rows.add_row("now", Text(state.activity, overflow="ellipsis", no_wrap=True))
    if last := state.steps.last:
        rows.add_row("reward", reward_text(state.rewards(), last.get("reward/mean")))
        rows.add_row("staleness", Text(staleness_text(last, state.max_staleness)))
        rows.add_row("speed", _speed(state))
        rows.add_row("time", _time(state))
        rows.add_row("rollouts", _rollouts(last))
        if state.num_skipped:
            rows.add_row("skipped", Text(f"{state.last_skipped}, {state.num_skipped} in all", style="red"))
    title = Text.assemble(("asyncrl ", "bold"), state.run_name)
    return Panel(rows, title=title, title_align="left", border_style="blue")


def reward_text(rewards: list[float], last: float | None) -> Text:
    """The last reward, a line of all of them, and the first."""
    if not rewards:
        return Text("-")
    shown = rewards[-1] if last is None else last
    line = sparkline(rewards, width=32)
    return Text.assemble((f"{shown:.3f}  ", "bold"), (line, "cyan"), f"  from {rewards[0]:.3f}")


def staleness_text(metrics: Mapping[str, float], max_staleness: int) -> str:
    """How old the tokens of a step were."""
    mean, largest = metrics.get("sample/staleness_mean"), metrics.get("sample/staleness_max")
    if mean is None or largest is None:
        return "no token in the loss"
    masked = metrics.get("sample/masked_fraction", 0.0)
    words = f", {masked:.1%} of the tokens masked" if masked > 0 else ""
    return f"{mean:.1f} on average, {largest:.0f} at most of {max_staleness} allowed{words}"


def _progress(state: PanelState, now_s: float) -> RenderableType:
    words = f"{state.steps_done}/{state.num_steps}  {duration(now_s - state.started_s)}"
    if state.steps and state.steps_done < state.num_steps:
        step_s = state.recent_total("perf/step_s") / min(_RECENT, len(state.steps))
        words += f", {duration(step_s * (state.num_steps - state.steps_done))} to go"
    line = Table.grid(padding=(0, 1), expand=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True, justify="right")
    line.add_row(ProgressBar(total=state.num_steps, completed=state.steps_done), words)
    return line


def _speed(state: PanelState) -> RenderableType:
    seconds = state.recent_total("perf/step_s")
    if seconds <= 0:
        return Text("-")
    tokens = state.recent_total("tokens/trained") / seconds
    length = state.steps.last.get("sample/length_mean", 0.0)
    step_s = seconds / min(_RECENT, len(state.steps))
    return Text(f"{step_s:.2f} s a step, {tokens:,.0f} trained tokens/s, {length:.0f} tokens a rollout")


def _time(state: PanelState) -> RenderableType:
    names = ("perf/step_s", *TIME_METRICS.values())
    shares = TimeShares.of({name: state.recent_total(name) for name in names})
    words = Text()
    for name, (word, colour) in _TIME_WORDS.items():
        share = 0.0 if shares is None else getattr(shares, name)
        if share >= 0.005:
            words.append(", " if words else "").append(f"{word} {share:.0%}", colour)
    return words


def _rollouts(last: Mapping[str, float]) -> RenderableType:
    names = ("inflight", "interrupted", "retried", "failed", "dropped", "filtered")
    words = [
        f"{last[f'rollout/{name}']:.0f} {'in flight' if name == 'inflight' else name}"
        for name in names
        if f"rollout/{name}" in last
    ]
    return Text(", ".join(words) or "-")


PATIENCE_S = 1.0
"""How long a reader that is behind is waited for, once, until it has read on."""

logger = logging.getLogger(__name__)
_PIECE = 1000
"""Characters at a time: at most 4 KB, which a pipe that has any room takes whole (pipe(7), PIPE_BUF)."""


def outliving(file: TextIO | None = None) -> TextIO:
    """`file` (default: standard output), to write to as long as that works; then to nowhere, without an
    error.

    The file itself leads nowhere then, so that a flush at the end of the process cannot fail either. What a
    pipe or terminal has no room for, because it is not read, is left out, and the reader told how much once
    it reads on. In the log both are told once.
    """
    return cast("TextIO", _outliving(file or sys.stdout))


@functools.lru_cache(maxsize=4)  # one for a file: it knows that the reader is behind
def _outliving(file: TextIO | None) -> _Outliving:
    return _Outliving(file)


class _Outliving:
    """Looks like the file that it writes to.

    Life:       writes there until an OSError -> drops what it is given. Behind, from a write without room
                until one that does.
    Waits:      write waits PATIENCE_S for room, but not while it is behind: the event loop of a run calls it.
    """

    def __init__(self, file: TextIO | None) -> None:
        self._file = file  # None: the process was started without a standard output
        self._is_lost = file is None
        self._is_behind = False
        self._num_left_out = self._num_told = 0  # pieces of text
        self._poll = None if file is None else _poll(file)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)  # encoding, isatty: what it is decides how it is written to

    def isatty(self) -> bool:
        return self._file is not None and not self._is_lost and self._file.isatty()

    def write(self, text: str) -> int:
        for start in range(0, len(text), _PIECE):
            if self._has_room():
                self._write(self._note_of_gap() + text[start : start + _PIECE])
            else:
                self._num_left_out += 1
        return len(text)

    def flush(self) -> None:
        """Each piece is flushed already: what Python holds back would hold the process when it ends."""

    def _write(self, text: str) -> None:
        if self._file is not None and not self._is_lost:
            try:
                self._file.write(text)
                self._file.flush()
            except OSError as error:
                self._lose(self._file, error)

    def _has_room(self) -> bool:
        patience_ms = 0 if self._is_behind else PATIENCE_S * 1000
        if self._poll is None or self._is_lost or self._poll.poll(patience_ms):
            self._is_behind = False
            return True
        if not self._is_behind and not self._num_left_out:
            logger.warning(
                "standard output is not read: what finds no room there is not shown; the run goes on, and "
                "its files have all"
            )
        self._is_behind = True
        return False

    def _note_of_gap(self) -> str:
        gap, self._num_told = self._num_left_out - self._num_told, self._num_left_out
        return f"\n[{gap} pieces of output are left out here: nobody read them]\n" if gap else ""

    def _lose(self, file: TextIO, error: OSError) -> None:
        self._is_lost = True
        logger.warning("nothing is shown from here on, standard output cannot be written: %s", error)
        with contextlib.suppress(OSError):  # a file without a descriptor has nothing that could fail later
            descriptor = file.fileno()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)  # what the file still holds goes there, too
            os.close(nowhere)


def _poll(file: TextIO) -> select.poll | None:
    """Asks whether there is room; None for what has no descriptor, in memory."""
    try:
        descriptor = file.fileno()
    except (OSError, io.UnsupportedOperation):
        return None
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return poll

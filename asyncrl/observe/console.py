"""What a person sees while a run goes on: a live panel on a terminal, else one plain line a step. Knows metrics; knows no rooms."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Literal, TextIO

from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.live import Live
from rich.markup import escape

from asyncrl.observe.live_panel import PanelState, live_panel, steps_done
from asyncrl.observe.run_numbers import Steps
from asyncrl.observe.text import skipped_text, time_parts
from asyncrl.observe.unread import outliving

Kind = Literal["auto", "live", "plain", "none"]


class Console:
    """Shows progress. Life: silent until start(); live until close(). A context manager does both.

    live repaints one panel; plain prints a line a step; none prints nothing at all; auto is live on a terminal, else plain.
    The live panel has a thread of rich's own that repaints, so the clock goes on while nothing happens.
    A run outlives whoever reads it: once the file cannot be written any more, nothing is shown, and nothing raises, in either thread.
    """

    def __init__(
        self, kind: Kind, *, run_name: str, num_steps: int, max_staleness: int, file: TextIO | None = None, width: int | None = None
    ) -> None:
        self._rich = RichConsole(file=outliving(file), width=width, highlight=False)  # rich itself ends the process on a closed pipe
        self.kind: Kind = ("live" if self._rich.is_terminal else "plain") if kind == "auto" else kind
        self._state = PanelState(run_name=run_name, num_steps=num_steps, max_staleness=max_staleness, started_s=time.monotonic())
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
            self._print(plain_line(metrics, num_steps=self._state.num_steps, max_staleness=self._state.max_staleness))

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
    """One step on one line: `step  12/300  reward 0.413  staleness 1.2 (max 3 of 4)  0.41 s/step  train 71% wait 24%`.

    From a wait of 10 % on, the largest part of it is named.
    """
    width = len(str(num_steps))
    parts = [f"step {steps_done(metrics):>{width}}/{num_steps}"]
    if (reward := metrics.get("reward/mean")) is not None:
        parts.append(f"reward {reward:.3f}")
    if (age := metrics.get("sample/staleness_mean")) is not None:
        parts.append(f"staleness {age:.1f} (max {metrics.get('sample/staleness_max', age):.0f} of {max_staleness})")
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

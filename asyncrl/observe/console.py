"""Console of a run: a live panel on a terminal, else a plain line every few seconds.

Standard output that nobody reads (a closed pipe, a stopped terminal, a full disk) does not stop a run.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import math
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, Literal, TextIO, cast

from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncrl.observe.run_numbers import (
    SHARES,
    Steps,
    TimeShares,
    boxed,
    duration,
    recent,
    seconds_left,
    several,
    sparkline,
)
from asyncrl.observe.sample_text import sample_text
from asyncrl.observe.samples import ShownRollout

Kind = Literal["auto", "live", "plain", "none"]
_RECENT = slice(-20, None)
LINE_EVERY_S, LATER_LINE_EVERY_S, LATER_S = 5.0, 10.0, 60.0
"""Seconds between two plain lines: in the first LATER_S, and later."""
SAMPLE_EVERY_S, LATER_SAMPLE_EVERY_S = 20.0, 300.0
"""Seconds between two samples, likewise, unless the config sets a number of steps."""
MAX_SAMPLE_CHARS = 300
"""Characters of each part of a sample."""


class Console:
    """Shows progress. Life: silent until start(); live until close().

    live repaints one panel in a thread of rich; plain prints a line every few seconds with the means of its
    steps; none prints nothing; auto is live on a terminal and in a notebook, else plain. A file that cannot
    be written raises nothing. `health` returns sentences about faults of the run.
    """

    def __init__(
        self,
        kind: Kind,
        *,
        run_name: str,
        num_steps: int,
        max_staleness: int,
        samples_every: Literal["auto"] | int | None = None,
        health: Callable[[Steps], Sequence[str]] = lambda steps: (),
        file: TextIO | None = None,
    ) -> None:
        # rich itself ends the process on a closed pipe
        self._rich = RichConsole(
            file=outliving(file), highlight=False, quiet=kind == "none", force_jupyter=False
        )
        # not asked of rich, which takes a pipe for a terminal where FORCE_COLOR is set: CI, notebooks
        is_seen = self._rich.file.isatty() or is_in_notebook()
        self.kind: Kind = ("live" if is_seen else "plain") if kind == "auto" else kind
        self._run_name, self._num_steps, self._max_staleness = run_name, num_steps, max_staleness
        self._samples_every, self._has_failed, self._sample_at_s = samples_every, False, -math.inf
        self._steps, self._activity, self._started_s = Steps(), "starting", time.monotonic()
        self._health_of, self._health = health, (0, tuple[str, ...]())
        """Number of steps, and the sentences about them."""
        self._line_at_s, self._num_unshown = -math.inf, 0
        self._of_tasks = dict[str, list[float]]()
        """Rewards of each task since the last line."""
        self._live: Live | NotebookLive | None = None

    def start(self) -> None:
        """Start to show."""
        self._started_s = time.monotonic()
        if self.kind == "live" and is_in_notebook():
            self._live = NotebookLive(self.panel)
        elif self.kind == "live":
            self._live = Live(get_renderable=self.panel, console=self._rich, refresh_per_second=4)
        if self._live is not None:
            self._live.start()

    def goes_on(self, steps: Steps) -> None:
        """Continue from the steps of earlier processes."""
        self._steps = steps

    def show_step(self, metrics: Mapping[str, float]) -> None:
        """Show the metrics of one optimizer step."""
        self._steps.add(metrics)
        self._num_unshown += 1
        for name in filter(is_of_task, metrics):
            self._of_tasks.setdefault(name, []).append(metrics[name])
        now_s = time.monotonic()
        every_s = LINE_EVERY_S if now_s - self._started_s < LATER_S else LATER_LINE_EVERY_S
        if now_s - self._line_at_s >= every_s or metrics["step"] >= self._num_steps:
            self._show_line(now_s)

    def _show_line(self, now_s: float) -> None:
        """Print a plain line on the steps since the last line."""
        if self.kind == "plain" and self._num_unshown:
            of_tasks = tasks_text({name: fmean(rewards) for name, rewards in self._of_tasks.items()})
            numbers = {"num_steps": self._num_steps, "max_staleness": self._max_staleness}
            self.say(plain_line(self._steps, self._num_unshown, **numbers, of_tasks=of_tasks))
            self._of_tasks.clear()
        self._line_at_s, self._num_unshown = now_s, 0

    def show_samples(self, step: int, samples: Sequence[ShownRollout]) -> None:
        """Show the last sample of a step, a random one, if it is due; and the first failed one."""
        for sample in samples[-1:]:
            is_first_failed = sample["kind"] == "failed" and not self._has_failed
            self._has_failed |= is_first_failed
            is_due = is_first_failed or (sample["kind"] != "failed" and self._is_sample_due(step))
            if self._samples_every is not None and is_due:
                text = sample_text(sample, most=MAX_SAMPLE_CHARS)
                encoding = self._rich.encoding  # of a terminal that may not know the model's characters
                text = text.encode(encoding, "backslashreplace").decode(encoding)
                self._rich.print(Text(text, style="dim" if self.kind == "live" else ""), soft_wrap=True)

    def _is_sample_due(self, step: int) -> bool:
        if self._samples_every != "auto":
            return self._samples_every is not None and step % self._samples_every == 0
        now_s = time.monotonic()
        every_s = SAMPLE_EVERY_S if now_s - self._started_s < LATER_S else LATER_SAMPLE_EVERY_S
        if now_s - self._sample_at_s < every_s:
            return False
        self._sample_at_s = now_s
        return True

    def show_activity(self, text: str) -> None:
        """Set the present activity ("waiting for stragglers") in the live panel."""
        self._activity = text

    def say(self, text: str) -> None:
        """Print a line, above the live panel."""
        self._rich.print(escape(text), soft_wrap=True)

    def show(self, renderable: RenderableType) -> None:
        """Print anything that rich can draw."""
        self._rich.print(renderable)

    def close(self) -> None:
        """Stop repainting, or print the last plain line; idempotent."""
        self._show_line(time.monotonic())
        if self._live is not None:
            self._live.stop()
            self._live = None

    def panel(self) -> RenderableType:
        """Draw the panel; fits 80 columns."""
        activity = Text(self._activity, overflow="ellipsis", no_wrap=True)
        rows: list[tuple[str, RenderableType]] = [("progress", self._progress()), ("now", activity)]
        steps, last = self._steps, self._steps.last
        if last:
            names = ("inflight", "interrupted", "retried", "failed", "dropped", "filtered")
            rollouts = [
                f"{last[f'rollout/{name}']:.0f} {name}" for name in names if f"rollout/{name}" in last
            ]
            rows += [
                ("reward", reward_text(steps)),
                *([("by task", of_tasks)] if (of_tasks := tasks_text(last)) else []),
                *([("answers", answers)] if (answers := answers_text(steps)) else []),
                *([("health", Text("\n".join(health), "red"))] if (health := self._health_now()) else []),
                ("speed", self._speed()),
                ("time", shares_text(TimeShares.of(lambda metric: steps.total(metric, _RECENT)))),
                ("staleness", staleness_text(last, self._max_staleness)),
                ("rollouts", ", ".join(rollouts)),
            ]
        return boxed(rows, Text(f"asyncrl {self._run_name}"))

    def _health_now(self) -> tuple[str, ...]:
        """Judge once a step, as the panel is drawn often."""
        num = len(self._steps)
        if num != self._health[0]:
            self._health = num, tuple(self._health_of(self._steps))
        return self._health[1]

    def _progress(self) -> RenderableType:
        done = int(self._steps.last.get("step", 0))
        words = f"{done}/{self._num_steps}  {duration(time.monotonic() - self._started_s)}"
        if left_s := seconds_left(self._steps, self._num_steps):
            words += f", {duration(left_s)} left"
        line = Table.grid(padding=(0, 1), expand=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True, justify="right")
        line.add_row(ProgressBar(total=self._num_steps, completed=done), words)
        return line

    def _speed(self) -> str:
        steps, step_s = self._steps, self._steps.mean("perf/step_s", _RECENT)
        if not step_s:
            return "-"
        tokens = steps.total("tokens/trained", _RECENT) / steps.total("perf/step_s", _RECENT)
        mfu = f", MFU {steps.last['perf/mfu']:.1%}" if "perf/mfu" in steps.last else ""
        return f"{step_s:.2f} s a step, {tokens:,.0f} trained tokens/s{mfu}"


def plain_line(steps: Steps, num: int, *, num_steps: int, max_staleness: int, of_tasks: str = "") -> str:
    """Describe the newest `num` steps: `step  12/300  reward 0.413  staleness 1.2 (max 3 of 4)
    0.41 s/step  train 71% wait 24%  1 min 58 s left`.
    """
    part, last = slice(-num, None), steps.last
    parts = [f"step {int(last['step']):>{len(str(num_steps))}}/{num_steps}"]
    if (reward := steps.mean("reward/mean", part)) is not None:
        parts.append(f"reward {reward:.3f}" + (of_tasks and f" ({of_tasks})"))
    if (age := steps.mean("sample/staleness_mean", part)) is not None:
        largest = max(steps.values("sample/staleness_max", part), default=age)
        parts.append(f"staleness {age:.1f} (max {largest:.0f} of {max_staleness})")
    if sampled := steps.total("tokens/sampled", part):
        masked = 1 - steps.total("tokens/trained", part) / sampled
        parts += [f"masked {masked:.1%}"] if masked > 0 else []
    if skipped := steps.total("trainer/skipped_steps", part):
        parts.append(f"{several(skipped, 'update')} skipped: not finite")
    if (step_s := steps.mean("perf/step_s", part)) is not None:
        shares = TimeShares.of(lambda metric: steps.total(metric, part))
        parts.append(f"{step_s:.2f} s/step  train {shares.training:.0%} wait {shares.waiting:.0%}")
    if left_s := seconds_left(steps, num_steps):
        parts.append(f"{duration(left_s)} left")
    return "  ".join(parts)


def reward_text(steps: Steps) -> Text:
    """Show the mean reward of the recent steps, a sparkline of all steps, the first and the last reward."""
    rewards = steps.values("reward/mean")
    if not rewards:
        return Text("-")
    mean = fmean(rewards[recent(len(rewards))])
    line = sparkline(rewards[:: 1 + len(rewards) // 1024], width=24)  # the panel is drawn often
    ends = f"  from {rewards[0]:.3f}, last step {rewards[-1]:.3f}"
    return Text.assemble((f"{mean:.3f}  ", "bold"), (line, "cyan"), (ends, "dim"))


def shares_text(shares: TimeShares) -> Text:
    """Show where the time went: `training 71%, waiting for generation 17%`."""
    words = Text()
    for name, (word, colour, _) in SHARES.items():
        if (share := getattr(shares, name)) >= 0.005:
            words.append(", " if words else "").append(f"{word} {share:.0%}", colour)
    return words


def answers_text(steps: Steps) -> str:
    """Describe the answers of the recent steps: length, truncation, entropy."""
    part = recent(len(steps))
    length, cut = steps.mean("sample/length_mean", part), steps.mean("sample/truncated_fraction", part)
    words = [] if length is None else [f"{length:.0f} tokens on average"]
    words += [] if cut is None else [f"{cut:.0%} cut off"]
    entropy = steps.mean("policy/entropy", part)
    return ", ".join(words + ([] if entropy is None else [f"entropy {entropy:.2g}"]))


def tasks_text(metrics: Mapping[str, float]) -> str:
    """Show the reward of each of several tasks: `sums 0.413, words 0.250`; else ''."""
    return ", ".join(f"{n.split('/', 2)[2]} {num:.3f}" for n, num in metrics.items() if is_of_task(n))


def is_of_task(name: str) -> bool:
    """Return whether the metric is the mean reward of a single task in a run of several."""
    return name.startswith("reward/mean/")


def staleness_text(metrics: Mapping[str, float], max_staleness: int) -> str:
    """Describe the age of the tokens of a step."""
    mean, largest = metrics.get("sample/staleness_mean"), metrics.get("sample/staleness_max")
    if mean is None or largest is None:
        return "no token in the loss"
    masked = metrics.get("sample/masked_fraction", 0.0)
    words = f", {masked:.1%} of the tokens masked" if masked > 0 else ""
    return f"{mean:.1f} on average, {largest:.0f} at most of {max_staleness} allowed{words}"


PATIENCE_S = 1.0
"""Seconds to wait, once, for a slow reader."""
_PIECE = 1000
"""Characters per write: at most 4 KB, so that a writable pipe takes them whole (pipe(7), PIPE_BUF)."""

logger = logging.getLogger(__name__)


def outliving(file: TextIO | None = None) -> TextIO:
    """Return `file` (default: standard output) without its errors: after one, nothing is written; text that
    a full pipe or terminal does not take is dropped. Both are logged once.
    """
    return cast("TextIO", _Outliving(file or sys.stdout or io.StringIO()))


@functools.lru_cache(maxsize=4)  # one object for each file
class _Outliving:
    """A file that drops text after an OSError, and while its reader is behind.

    write() waits PATIENCE_S for a reader that falls behind, then not again until it reads: the event loop of
    a run calls it.
    """

    def __init__(self, file: TextIO) -> None:
        self._file, self._is_lost, self._is_behind, self._is_told = file, False, False, False
        self._poll: select.poll | None = None
        with contextlib.suppress(OSError):  # a file in memory has no descriptor and never blocks
            descriptor = file.fileno()
            self._poll = select.poll()
            self._poll.register(descriptor, select.POLLOUT)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)  # encoding, isatty

    def write(self, text: str) -> int:
        for start in range(0, len(text), _PIECE):
            if not self._is_lost and self._has_room():
                try:
                    self._file.write(text[start : start + _PIECE])
                    self._file.flush()
                except OSError as error:
                    self._is_lost = True
                    logger.warning("nothing is shown from here on, standard output fails: %s", error)
                    # at /dev/null a flush at the end of the process cannot fail
                    with contextlib.suppress(OSError), open(os.devnull, "w") as nowhere:  # noqa: PTH123
                        os.dup2(nowhere.fileno(), self._file.fileno())
        return len(text)

    def flush(self) -> None:
        """Do nothing: each piece is flushed when written, so no buffer blocks the end of the process."""

    def _has_room(self) -> bool:
        if self._poll is not None and not self._poll.poll(0 if self._is_behind else PATIENCE_S * 1000):
            if not self._is_told:
                logger.warning("standard output is not read: lines that it does not take are left out")
            self._is_behind = self._is_told = True
            return False
        self._is_behind = False
        return True


# ---- in the output of a notebook's cell

REPAINT_S = 1.0
_WIDTH = 100
_HTML = '<pre style="line-height: 1.2; white-space: pre">{code}</pre>'


def is_in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class NotebookLive:
    """Shows the result of `get_renderable`, as rich's Live does on a terminal.

    Life: silent until start(); repaints in its thread until stop(), which leaves the last picture.
    """

    def __init__(self, get_renderable: Callable[[], RenderableType]) -> None:
        self._get_renderable = get_renderable
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._repaint, name="notebook panel", daemon=True)

    def start(self) -> None:
        """Show the panel."""
        from IPython.display import display

        self._handle = display(self._picture(), raw=True, display_id=True)
        self._thread.start()

    def stop(self) -> None:
        """Paint once more, and no more after that."""
        self._stopped.set()
        self._thread.join()
        self._handle.update(self._picture(), raw=True)

    def _repaint(self) -> None:
        while not self._stopped.wait(REPAINT_S):
            self._handle.update(self._picture(), raw=True)

    def _picture(self) -> dict[str, str]:
        """Return the panel by MIME type."""
        console = RichConsole(file=io.StringIO(), record=True, width=_WIDTH, force_jupyter=False)
        console.print(self._get_renderable())
        html = console.export_html(inline_styles=True, code_format=_HTML, clear=False)
        return {"text/html": html, "text/plain": console.export_text()}

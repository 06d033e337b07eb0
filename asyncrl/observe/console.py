"""Console and log of a run: a live panel on a terminal, else plain lines;
logs/controller.log.

Unread standard output (a closed pipe, a full disk) does not stop a run.
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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal, TextIO, cast

from rich.columns import Columns
from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.text import Text

from asyncrl.base.errors import AsyncrlError
from asyncrl.base.host import LOG_FORMAT
from asyncrl.observe import run_numbers as numbers
from asyncrl.observe.run_dir import LOG_FILE
from asyncrl.observe.run_numbers import Steps, recent, time_shares, waiting_share
from asyncrl.observe.samples import ShownRollout, sample_text

Kind = Literal["auto", "live", "plain", "none"]
RECENT = slice(-20, None)
LINE_EVERY_S = 5.0
FILLING_EVERY_S = 15.0
"""Period of lines about the first batch, which a slow model fills for minutes."""
SAMPLE_EVERY_S = (20.0, 300.0)
"""Periods of samples: in the first minute, and later."""
MAX_SAMPLE_CHARS = 300
MAX_WARNINGS = 100
TRAINING = "training"
"""The stage of a run after its start."""
BY_TASK = "reward/mean/"


@dataclass
class Console:
    """Shows progress.

    live repaints a panel in a thread of rich; plain prints a line every few seconds;
    auto is live on a terminal, else plain. Output errors raise nothing. `health_of`
    returns sentences about problems.
    """

    kind: Kind
    run_name: str
    num_steps: int
    max_staleness: int
    health_of: Callable[[Steps], Sequence[str]] = lambda steps: ()
    file: TextIO | None = None

    def __post_init__(self) -> None:
        # rich itself ends the process on a closed pipe
        self._rich = RichConsole(
            file=outliving(self.file),
            highlight=False,
            quiet=self.kind == "none",
            force_jupyter=False,
        )
        # rich takes a pipe for a terminal if FORCE_COLOR is set (CI)
        if self.kind == "auto":
            self.kind = "live" if self._rich.file.isatty() else "plain"
        self._health: Sequence[str] = ()
        self._steps = Steps()
        self._activity = "starting"
        self._started_s = time.monotonic()
        self._sample_at_s = -math.inf
        self._line_at_s = -math.inf
        self._num_unshown = 0
        self._filling = ""
        self._live: Live | None = None

    def start(self) -> None:
        self._started_s = time.monotonic()
        if self.kind == "live":
            self._live = Live(
                get_renderable=self.panel, console=self._rich, refresh_per_second=4
            )
            self._live.start()

    def resume_from(self, steps: Steps) -> None:
        """Show no lines until training_starts(): batches trained again have no wait and
        no pace.
        """
        self._steps = steps
        # Later than any time, so that no line is due.
        self._line_at_s = math.inf

    def training_starts(self) -> None:
        self._line_at_s = -math.inf
        self._num_unshown = 0

    def show_step(self, metrics: Mapping[str, float]) -> None:
        self._steps.add(metrics)
        self._activity = TRAINING
        self._num_unshown += 1
        now_s = time.monotonic()
        if now_s - self._line_at_s >= LINE_EVERY_S or metrics["step"] >= self.num_steps:
            self._show_line(now_s)

    def _show_line(self, now_s: float) -> None:
        if self.kind == "live":
            # It reads all steps, 25 ms in 1,000 of them, so not after each one. Plain
            # lines do not show it.
            self._health = self.health_of(self._steps)
        if self.kind == "plain" and self._num_unshown:
            self.say(
                plain_line(
                    self._steps, self._num_unshown, self.num_steps, self.max_staleness
                )
            )
        self._line_at_s = now_s
        self._num_unshown = 0

    def show_samples(self, samples: Sequence[ShownRollout]) -> None:
        now_s = time.monotonic()
        every_s = SAMPLE_EVERY_S[now_s - self._started_s >= 60.0]
        if samples and now_s - self._sample_at_s >= every_s:
            self._sample_at_s = now_s
            text = sample_text(samples[-1], most=MAX_SAMPLE_CHARS)
            self._rich.print(
                Text(text, style="dim" if self.kind == "live" else ""), soft_wrap=True
            )

    def show_filling(self, text: str) -> None:
        """Show how full a batch is: in a plain line only what has changed."""
        self._activity = text
        now_s = time.monotonic()
        if (
            self.kind == "plain"
            and text != self._filling
            and now_s - max(self._line_at_s, self._started_s) >= FILLING_EVERY_S
        ):
            self.say(text)
            self._filling = text
            self._line_at_s = now_s

    def show_activity(self, text: str, line: str) -> None:
        """Show a stage: its text in the live panel, or its line. The lines of steps show
        the training.
        """
        self._activity = text
        if self.kind == "plain" and text != TRAINING:
            self.say(line)

    def say(self, text: str) -> None:
        self._rich.print(escape(text), soft_wrap=True)

    def show(self, renderable: RenderableType) -> None:
        self._rich.print(renderable)

    def close(self) -> None:
        """Stop repainting, or print the last plain line. Idempotent."""
        self._show_line(time.monotonic())
        if self._live is not None:
            self._live.stop()
            self._live = None

    def panel(self) -> RenderableType:
        """Fits 80 columns."""
        steps = self._steps
        activity = Text(self._activity, overflow="ellipsis", no_wrap=True)
        rows: list[tuple[str, RenderableType]] = [
            ("progress", self._progress()),
            ("now", activity),
        ]
        if steps:
            rows += [
                *metric_rows(steps, RECENT, self.max_staleness),
                ("health", Text("\n".join(self._health), "red")),
                ("speed", self._speed()),
            ]
        return numbers.boxed(
            [row for row in rows if row[1]], f"asyncrl {self.run_name}"
        )

    def _progress(self) -> RenderableType:
        done = int(self._steps.last.get("step", 0))
        words = f"{done}/{self.num_steps}  {numbers.duration(time.monotonic() - self._started_s)}"
        if left_s := numbers.seconds_left(self._steps, self.num_steps):
            words += f", {numbers.duration(left_s)} left"
        return Columns(
            [ProgressBar(total=self.num_steps, completed=done, width=20), words]
        )

    def _speed(self) -> str:
        step_s = self._steps.mean("perf/step_s", RECENT) or math.inf
        tokens = self._steps.mean("perf/tokens_per_s", RECENT) or 0.0
        mfu = self._steps.last.get("perf/mfu")
        return f"{step_s:.2f} s a step, {tokens:,.0f} trained tokens/s" + (
            f", MFU {mfu:.1%}" if mfu else ""
        )


def plain_line(steps: Steps, num: int, num_steps: int, max_staleness: int) -> str:
    """Format as `step 12/300 reward 0.413 staleness 1.2 (max 3 of 4) 0.41 s/step train
    71% wait 24% 1 min 58 s left`.
    """
    part = slice(-num, None)
    parts = [f"step {int(steps.last['step']):>{len(str(num_steps))}}/{num_steps}"]
    if (reward := steps.mean("reward/mean", part)) is not None:
        by_task = tasks_text(steps, part)
        parts.append(f"reward {reward:.3f}" + (by_task and f" ({by_task})"))
    elif (loss := steps.mean("policy/loss", part)) is not None:
        parts.append(f"loss {loss:.4f}")
    if age := staleness_text(steps, part, max_staleness):
        parts.append(f"staleness {age}")
    if num_awaited := steps.last.get("reward/awaited"):
        parts.append(f"{num_awaited:.0f} await rewards")
    if skipped := steps.total("trainer/skipped_steps", part):
        parts.append(f"{numbers.several(skipped, 'update')} skipped: not finite")
    if (step_s := steps.mean("perf/step_s", part)) is not None:
        shares = time_shares(lambda metric: steps.total(metric, part))
        parts.append(
            f"{step_s:.2f} s/step  train {shares['training']:.0%} wait {waiting_share(shares):.0%}"
        )
    if left_s := numbers.seconds_left(steps, num_steps):
        parts.append(f"{numbers.duration(left_s)} left")
    return "  ".join(parts)


def metric_rows(
    steps: Steps, part: slice, max_staleness: int
) -> list[tuple[str, RenderableType]]:
    shares = time_shares(lambda metric: steps.total(metric, part))
    num = len(steps.column("step")[part])
    has_reward = bool(steps.values("reward/mean"))
    return [
        ("reward", curve_text(steps, "reward/mean")),
        ("loss", "" if has_reward else curve_text(steps, "policy/loss")),
        ("by task", tasks_text(steps, part)),
        (
            "time",
            numbers.shares_text(shares).append(
                f" (last {numbers.several(num, 'step')})"
            ),
        ),
        ("staleness", staleness_text(steps, part, max_staleness)),
    ]


def curve_text(steps: Steps, name: str) -> RenderableType:
    """Draw a metric; '' without a value."""
    values = steps.values(name)
    if not values:
        return ""
    mean = fmean(values[recent(len(values))])
    # the panel is drawn often
    line = numbers.sparkline(values[:: 1 + len(values) // 1024], width=24)
    ends = f"  first step {values[0]:.3f}, last step {values[-1]:.3f}"
    return Text.assemble((f"{mean:.3f}  ", "bold"), (line, "cyan"), (ends, "dim"))


def tasks_text(steps: Steps, part: slice) -> str:
    """Format as `sums 0.413, words 0.250`; '' for a single task."""
    names = [name for name in steps.names if name.startswith(BY_TASK)]
    return ", ".join(
        f"{name.removeprefix(BY_TASK)} {steps.mean(name, part) or 0.0:.3f}"
        for name in names
    )


def staleness_text(steps: Steps, part: slice, max_staleness: int) -> str:
    """Format as `1.2 (max 3 of 4), 2.0% masked`; '' without a token in the loss."""
    if (age := steps.mean("sample/staleness_mean", part)) is None:
        return ""
    largest = max(steps.values("sample/staleness_max", part), default=age)
    sampled = steps.total("tokens/sampled", part)
    masked = 1 - steps.total("tokens/trained", part) / sampled if sampled else 0.0
    of_masked = f", {masked:.1%} masked" if masked > 0 else ""
    return f"{age:.1f} (max {largest:.0f} of {max_staleness}){of_masked}"


PIECE = 1000
"""Characters per write: at most 4 KB, which a writable pipe takes whole (pipe(7),
PIPE_BUF).
"""

logger = logging.getLogger(__name__)


def outliving(file: TextIO | None = None) -> TextIO:
    """Return `file` (default: standard output) without its errors, which are logged
    once.
    """
    return cast("TextIO", _Outliving(file or sys.stdout or io.StringIO()))


@functools.lru_cache(maxsize=4)  # one object for each file
class _Outliving:
    """Drops text after an OSError, and while its reader is behind: the event loop calls
    write().
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._warned = set[str]()

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)  # encoding, isatty

    def write(self, text: str) -> int:
        # ascii lacks the ± of a verdict
        encoding = getattr(self._file, "encoding", None) or "utf-8"
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        for start in range(0, len(text), PIECE):
            try:
                if self._has_room():
                    self._file.write(text[start : start + PIECE])
                    self._file.flush()
                else:
                    self._warn(
                        "standard output is not read: dropping lines that it does not take"
                    )
            except OSError as error:
                self._warn(f"no more output is shown, standard output fails: {error}")
                # a flush at the end of the process cannot fail at /dev/null
                with contextlib.suppress(OSError), open(os.devnull, "w") as nowhere:  # noqa: PTH123
                    os.dup2(nowhere.fileno(), self._file.fileno())
        return len(text)

    def flush(self) -> None:
        """Do nothing: each piece is flushed when written."""

    def _has_room(self) -> bool:
        try:
            return bool(select.select([], [self._file], [], 0.0)[1])
        except ValueError:  # a file in memory never blocks
            return True

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("%s", text)


class RunLog:
    """Messages to the user, also in logs/controller.log."""

    def __init__(
        self,
        write: Callable[[str], None] = lambda text: print(text, file=outliving()),
        show_activity: Callable[[str, str], None] | None = None,
    ) -> None:
        self.print_secret = write
        """Print a line with a key; do not log it."""
        self._show_activity = show_activity or (lambda _, line: write(line))
        self.current_activity = ""
        self._started_s = time.monotonic()
        self.warnings: list[str] = []
        """At most MAX_WARNINGS; the log file has all."""
        self._warned = set[str]()

    def info(self, text: str) -> None:
        logger.info("%s", text)
        self.print_secret(text)

    def activity(self, text: str) -> None:
        """Begin a stage, or repeat it, with a line that has the seconds so far."""
        self.current_activity = text
        spent = numbers.duration(time.monotonic() - self._started_s)
        line = f"after {spent}: {text} ..."
        logger.info("%s", line)
        self._show_activity(text, line)

    def warn(self, text: str) -> None:
        self.warnings.append(text)
        # Each status.json contains all of them.
        del self.warnings[MAX_WARNINGS:]
        logger.warning("%s", text)
        self.print_secret(f"WARNING: {text}")

    def warn_once(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self.warn(text)


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Ignore the error: a full disk must not hide the error being reported."""


@contextlib.contextmanager
def logging_to(folder: Path) -> Iterator[None]:
    """Write the log of the run to logs/controller.log, also an internal error that ends it
    outside of its lifecycle.
    """
    handler = _LogFile(folder / LOG_FILE, encoding="utf-8")
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    root = logging.getLogger("asyncrl")
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    # Otherwise the log would also reach the handlers of a program that calls
    # asyncrl.run.
    root.propagate = False
    try:
        yield
    except AsyncrlError:
        raise  # The lifecycle has logged it, or it is a refusal.
    except Exception:
        root.exception("ended by an internal error")
        raise
    finally:
        root.removeHandler(handler)
        with contextlib.suppress(OSError):
            handler.close()

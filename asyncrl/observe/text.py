"""Standard output that nobody reads (a closed pipe, a stopped terminal, a full disk) neither ends a run nor
holds it. Knows no rooms.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import select
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO, cast

# Small pieces of text that console, status and inspect share: sparklines, durations, shares of time. Knows
# numbers alone.


_BLOCKS = "▁▂▃▄▅▆▇█"

_PARTS = (
    ("train", "perf/train_s"),
    ("wait gen", "perf/wait_generation_s"),
    ("wait stragglers", "perf/wait_stragglers_s"),
    ("wait publish", "perf/wait_publishing_s"),
)


def sparkline(values: Sequence[float], *, width: int) -> str:
    """The values as at most `width` block characters, each the mean of its stretch, from their smallest to
    their largest.
    """
    if not values:
        return ""
    num = min(width, len(values))
    edges = [round(index * len(values) / num) for index in range(num + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in zip(edges, edges[1:], strict=False)]
    low, high = min(means), max(means)
    if high <= low:
        return _BLOCKS[0] * num
    return "".join(_BLOCKS[round((value - low) / (high - low) * (len(_BLOCKS) - 1))] for value in means)


def duration(seconds: float) -> str:
    """8.3 s, 4 min 05 s, 2 h 10 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def several(num: float, noun: str) -> str:
    """`1 group`, `3 groups`."""
    return f"{num:.0f} {noun if num == 1 else f'{noun}s'}"


def time_parts(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    """(name, share 0..1) of where a step's time went; `other` is the rest. Empty without perf/step_s."""
    known = [(name, seconds.get(key, 0.0)) for name, key in _PARTS]
    whole = max(seconds.get("perf/step_s", 0.0), sum(value for _, value in known))
    if whole <= 0:
        return []
    shares = [(name, value / whole) for name, value in known]
    return [*shares, ("other", max(0.0, 1 - sum(share for _, share in shares)))]


def skipped_text(metrics: Mapping[str, float]) -> str:
    """`step skipped: not finite (batch 11, counted from 0)`; '' where no optimizer step of the batch was.

    Whoever reads it beside `step 12/300` learns that both are the same: files and logs name the batch.
    """
    num = metrics.get("trainer/skipped_steps", 0.0)
    what = "step" if num == 1 else several(num, "step")
    return f"{what} skipped: not finite (batch {metrics['step']:.0f}, counted from 0)" if num else ""


def evaluation_text(metrics: Mapping[str, float]) -> str:
    """One evaluation on a line: `v40 reward 0.413 ± 0.031  12.3 tokens, 2.0% truncated  3.2 s`; what went
    wrong is told at the end.
    """
    parts = [f"v{metrics['eval/version']:.0f}"]
    if "eval/reward_mean" in metrics:
        error = f" ± {metrics['eval/standard_error']:.3f}" if "eval/standard_error" in metrics else ""
        parts[0] += f" reward {metrics['eval/reward_mean']:.3f}{error}"
        parts.append(
            f"{metrics['eval/length_mean']:.1f} tokens, {metrics['eval/truncated_fraction']:.1%} truncated"
        )
    parts.append(f"{metrics['eval/seconds']:.1f} s")
    words = [
        ("eval/failed", "samples failed"),
        ("eval/skipped", "skipped so far"),
        ("eval/abandoned", "abandoned so far"),
        ("eval/abandoned_calls", "reward calls abandoned so far"),
    ]
    parts += [f"{what}: {metrics[name]:.0f}" for name, what in words if metrics.get(name)]
    return "  ".join(parts)


PATIENCE_S = 1.0
"""How long a reader that is behind is waited for, once, until it has read on."""

logger = logging.getLogger(__name__)
_PIECE = 1000
"""Characters at a time: at most 4 KB, which a pipe that has any room takes whole (pipe(7), PIPE_BUF)."""


def outliving(file: TextIO | None = None) -> TextIO:
    """`file` (default: standard output), to write to as long as that works; from then on what is written goes
    nowhere, and raises nothing.

    The file itself leads nowhere then, so that a flush at the end of the process cannot fail either. What a
    pipe or terminal has no room for, because it is not being read, is left out, and the reader told how much
    once it reads on. In the log both are told once.
    """
    return cast("TextIO", _outliving(file or sys.stdout))


@functools.lru_cache(maxsize=4)  # one for a file: it knows that the reader is behind
def _outliving(file: TextIO | None) -> _Outliving:
    return _Outliving(file)


class _Outliving:
    """Looks like the file that it writes to.

    Life:       writes there until an OSError -> drops what it is given. Behind, from a write that found no
    room until one that does. Waits:      write waits PATIENCE_S for room, but not while it is behind: the
    event loop of a run is what calls it.
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
        """Nothing is left to do: each piece is flushed, for what Python holds back would hold the process
        when it ends.
        """

    def _write(self, text: str) -> None:
        if self._file is not None and not self._is_lost:
            try:
                self._file.write(text)
                self._file.flush()
            except OSError as error:
                self._lose(self._file, error)

    def _has_room(self) -> bool:
        if (
            self._poll is None
            or self._is_lost
            or self._poll.poll(0 if self._is_behind else PATIENCE_S * 1000)
        ):
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

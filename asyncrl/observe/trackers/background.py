"""Tells a tracker of a run from a thread of its own: what a client does with a server far away neither holds
up nor ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrl.observe.samples import ShownRollout
from asyncrl.observe.trackers.tracker import TrackedRun, Tracker

MAX_WAITING = 256
"""Most calls that wait for a tracker. One more, and the oldest is dropped."""
FOLDER = "trackers"
"""In the run directory: of each tracker a file with what start() returned, and how far it was told."""
SOON_S = 1.0
"""Seconds after which a tracker that is not closed yet is said to be waited for."""
LEFT: list[str] = []
"""Trackers that were turned off or not closed in time. Their clients may hold up the end of the process
(atexit): the command leaves without them.
"""


class Background:
    """A Tracker that tells another one what it is told, later.

    Life: made -> start() begins the thread, which makes the tracker -> any calls -> close() -> wait_closed().
    Waits: the thread sleeps until there is a call. Nobody waits for the thread but wait_closed, with a limit.
    Invariant: a call returns at once and raises nothing; at most MAX_WAITING wait, in their order, without
        the oldest. No step, evaluation or samples are told that were told before the run was resumed.
    """

    def __init__(
        self, name: str, make: Callable[[], Tracker], warn: Callable[[str], None], *, later: str = ""
    ) -> None:
        """`warn` is called by whoever calls, never by the thread. `later`: how to send what was not sent."""
        self.name, self.later = name, later
        self.closed: Future[None] = Future()
        """Done once the thread has told all, or the tracker is turned off."""
        self.num_dropped, self.is_started = 0, False
        self._make, self._warn = make, warn
        self._waiting: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._has_call = threading.Condition()
        self._news: deque[str] = deque()
        self._told_before: dict[str, int] = {}
        self._told: dict[str, int] = {}
        self._kept_in = -1
        """A file descriptor."""

    def start(self, run: TrackedRun) -> None:
        """Begin the thread: a daemon, which does not outlive the process."""
        self._path = run.run_dir / FOLDER / f"{self.name}.json"
        self.is_started = True
        threading.Thread(target=self._work, args=(run,), name=f"tracker {self.name}", daemon=True).start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Later."""
        self._put("step", step, _plain(metrics))

    def evaluation(self, version: int, metrics: Mapping[str, float]) -> None:
        """Later."""
        self._put("evaluation", version, _plain(metrics))

    def samples(self, step: int, samples: Sequence[ShownRollout]) -> None:
        """Later."""
        self._put("samples", step, samples)

    def weights(self, version: int, digest: str) -> None:
        """Later."""
        self._put("weights", version, digest)

    def picture(self, name: str, path: Path) -> None:
        """Later."""
        self._put("picture", name, path)

    def close(self, state: str) -> None:
        """After all that waits."""
        self._put("close", state)

    def say_news(self) -> None:
        """Warn of what the thread has to say."""
        while self._news:
            self._warn(f"tracker {self.name}: {self._news.popleft()}")

    def _put(self, method: str, *arguments: Any) -> None:
        self.say_news()
        with self._has_call:
            if self.closed.done():
                return
            if is_full := len(self._waiting) == MAX_WAITING:
                self._waiting.popleft()
                self.num_dropped += 1
            self._waiting.append((method, arguments))
            self._has_call.notify()
        if is_full and self.num_dropped == 1:
            what = f"tracker {self.name} is slow: {MAX_WAITING} calls wait for it"
            self._warn(f"{what}, and from here on the oldest is left out for each new one")

    def _work(self, run: TrackedRun) -> None:
        doing = "making it"
        try:
            tracker, kept = self._make(), _read(self._path)
            doing = "start()"
            run = replace(run, kept_id=kept.pop("id", ""), warn=self._news.append)
            self._shown_at = tracker.start(run) or self.name
            self._told_before = kept if self._shown_at == run.kept_id else {}
            self._told = dict(self._told_before)
            self._path.parent.mkdir(exist_ok=True)
            self._kept_in = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._keep()
            while doing != "close()":
                with self._has_call:
                    self._has_call.wait_for(lambda: self._waiting)
                    method, arguments = self._waiting.popleft()
                doing = f"{method}()"
                self._tell(tracker, method, arguments)
        except BaseException as error:  # of a client, or the user's own: SystemExit, too
            LEFT.append(self.name)
            raised = f"{doing} raised {type(error).__name__}: {error!s:.500}"
            self._news.append(f"turned off, the run goes on without it: {raised}. {self.later}")
        finally:
            if self._kept_in >= 0:
                os.close(self._kept_in)
            with self._has_call, contextlib.suppress(InvalidStateError):  # it was not waited for any longer
                self._waiting.clear()
                self.closed.set_result(None)

    def _tell(self, tracker: Tracker, method: str, arguments: tuple[Any, ...]) -> None:
        is_numbered = method in ("step", "evaluation", "samples")
        if is_numbered and arguments[0] <= self._told_before.get(method, -1):
            return
        getattr(tracker, method)(*arguments)
        if is_numbered:
            self._told[method] = arguments[0]
            self._keep()

    def _keep(self) -> None:
        """In one write, which a kill leaves whole; not synced, as this happens with every step."""
        text = (json.dumps({"id": self._shown_at, **self._told}) + "\n").encode()
        os.ftruncate(self._kept_in, os.pwrite(self._kept_in, text, 0))


async def wait_closed(
    trackers: Sequence[Background], limit_s: float, say: Callable[[str], None], warn: Callable[[str], None]
) -> None:
    """Give trackers that were told to close so many seconds to tell all that waits. Those that are late are
    left to themselves, and named.
    """
    closing = {asyncio.wrap_future(one.closed): one for one in trackers if one.is_started}
    try:
        _, left = await asyncio.wait(closing, timeout=min(SOON_S, limit_s)) if closing else (set(), set())
        if left:
            names = ", ".join(closing[one].name for one in left)
            say(f"waiting for {names}, {limit_s:g} s at most (Ctrl-C: no longer)")
            await asyncio.wait(left, timeout=max(0.0, limit_s - SOON_S))
    finally:
        for future, tracker in closing.items():
            tracker.say_news()
            if not future.done():
                future.cancel()
                LEFT.append(tracker.name)
                what = f"not done in time (observe.tracker_close_s={limit_s:g}), and left to itself"
                warn(f"tracker {tracker.name}: {what}: the rest may not be shown there. {tracker.later}")
            if tracker.num_dropped:
                what = f"{tracker.num_dropped} calls were left out, as it was slow"
                warn(f"tracker {tracker.name}: {what}; metrics.jsonl and samples.jsonl have all of them")


def _plain(metrics: Mapping[str, float]) -> dict[str, float]:
    """A copy, without numpy's numbers."""
    return {name: float(value) for name, value in metrics.items()}


def _read(path: Path) -> dict[str, Any]:
    """{} where there is nothing, or half of it after a power cut."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}

"""Calls all trackers of a run from one background thread, so that no client delays or ends the run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrl.observe.trackers.tracker import TrackedRun, Tracker

MAX_WAITING = 256
"""Most calls in the queue; a full queue drops its oldest call."""
POLL_S, SOON_S = 0.05, 1.0
"""Seconds between two looks at the thread, and until the console names trackers that still send."""
LEFT: list[str] = []
"""Names of trackers that failed or did not close in time. Their clients may block the exit of the process,
so the command then exits at once.
"""


class Background:
    """Calls trackers in a thread.

    Life: made -> start() starts the thread, which makes the trackers -> tell() -> tell("close", state) ->
        wait_closed(). Only `callbacks` are called at once, and may raise.
    """

    def __init__(
        self,
        makers: Mapping[str, Callable[[], Tracker]],
        warn: Callable[[str], None],
        callbacks: Sequence[Tracker] = (),
    ) -> None:
        self.makers = makers
        self.warn = warn
        self.callbacks = callbacks
        self.num_dropped = 0
        self._calls = queue.Queue[tuple[str, tuple[Any, ...]]](MAX_WAITING)
        self._news = deque[str]()
        self._live: dict[str, Tracker] = {}
        self._kept: dict[str, dict[str, Any]] = {}
        """Id and last numbers of each tracker, also in its file, so that no number repeats after a resume."""
        self._thread: threading.Thread | None = None

    def start(self, run: TrackedRun) -> None:
        """Start the thread, a daemon."""
        run = replace(run, warn=self._news.append)
        self._thread = threading.Thread(target=self._work, args=(run,), name="trackers", daemon=True)
        self._thread.start()

    def tell(self, method: str, *arguments: Any) -> None:
        """Queue a call of a method of every tracker."""
        for callback in self.callbacks:
            getattr(callback, method)(*arguments)
        self._say_news()
        if self._calls.full():
            with contextlib.suppress(queue.Empty):
                self._calls.get_nowait()
            if self.num_dropped == 0:
                self.warn(f"slow trackers ({', '.join(self._live)}): {MAX_WAITING} calls wait, the oldest go")
            self.num_dropped += 1
        self._calls.put((method, arguments))

    async def wait_closed(self, limit_s: float, say: Callable[[str], None]) -> None:
        """Wait until the queue is sent, `limit_s` at most; name the trackers that are late."""
        waited_s = 0.0
        is_said = False
        try:
            while self._is_sending() and waited_s < limit_s:
                await asyncio.sleep(POLL_S)
                waited_s += POLL_S
                if not is_said and waited_s >= SOON_S:
                    is_said = True
                    say(f"waiting {limit_s:g} s at most for {', '.join(self._live)} (Ctrl-C: stop waiting)")
        finally:
            self._say_news()
            if self._is_sending():
                LEFT.extend(self._live)
                late = ", ".join(self._live)
                self.warn(f"trackers not done within {limit_s:g} s: {late}")
            if self.num_dropped:
                self.warn(f"slow trackers: {self.num_dropped} calls dropped; metrics.jsonl has all steps")

    def _is_sending(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _say_news(self) -> None:
        while self._news:
            self.warn(self._news.popleft())

    def _work(self, run: TrackedRun) -> None:
        for name in self.makers:
            self._try(name, "start", run)
        method = ""
        while self._live and method != "close":
            method, arguments = self._calls.get()
            for name in [*self._live]:
                self._try(name, method, *arguments)

    def _try(self, name: str, method: str, *arguments: Any) -> None:
        try:
            if method == "start":
                self._open(name, *arguments)
            elif method not in ("step", "evaluation", "samples"):
                getattr(self._live[name], method)(*arguments)
            elif arguments[0] > self._kept[name].get(method, -1):
                getattr(self._live[name], method)(*arguments)
                self._keep(name, {**self._kept[name], method: arguments[0]})
        except BaseException as error:  # a client's or the user's own, SystemExit included
            self._live.pop(name, None)
            LEFT.append(name)
            raised = f"{method}() raised {type(error).__name__}: {error!s:.500}"
            self._news.append(f"tracker {name} is turned off, the run continues: {raised}")

    def _open(self, name: str, run: TrackedRun) -> None:
        self._folder = run.run_dir / "trackers"
        self._folder.mkdir(exist_ok=True)
        kept = _read(self._folder / f"{name}.json")
        self._live[name] = tracker = self.makers[name]()
        shown_at = tracker.start(replace(run, kept_id=kept.get("id", ""))) or name
        self._keep(name, kept if shown_at == kept.get("id") else {"id": shown_at})

    def _keep(self, name: str, kept: dict[str, Any]) -> None:
        unfinished = self._folder / f".{name}.new"
        unfinished.write_text(json.dumps(kept) + "\n", encoding="utf-8")
        unfinished.replace(self._folder / f"{name}.json")
        self._kept[name] = kept


def _read(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} if it is absent or torn by a power cut."""
    with contextlib.suppress(OSError, ValueError):
        kept = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(kept, dict):
            return kept
    return {}

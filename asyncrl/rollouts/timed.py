"""What each rollout spent its time on, as `asyncrl simulate RUN_DIR` reads it: RUN_DIR/rollouts.jsonl.

The newest rollouts alone: a full file becomes rollouts.old.jsonl, and the one before that is gone.
"""

from __future__ import annotations

import json
import logging
import time
from collections import defaultdict, deque
from dataclasses import replace
from pathlib import Path
from typing import Literal

from typing_extensions import TypedDict

from asyncrl.engines.pool import EnginePool
from asyncrl.errors import RolloutFailure
from asyncrl.messages.records import Rollout, SamplingRequest
from asyncrl.rollouts.rollout import Generator, RolloutAttempt

log = logging.getLogger(__name__)

TIMES_FILE, OLD_TIMES_FILE = "rollouts.jsonl", "rollouts.old.jsonl"
MAX_BYTES = 8 * 2**20
"""Of each of the two files: some 60,000 rollouts of one turn."""
GATHER_S, MAX_LINES = 0.5, 100_000


class RolloutTimes(TypedDict):
    """One attempt at a rollout. Times are seconds since `start_s` (seconds since the epoch), when it had its
    slot.

    `turns`: [asked, answered, tokens of the prompt, sampled tokens] of each request that was answered.
    `held_s`: until it gave its slot back. `end_s`: until it ended, with its reward. `how`: `cut` is one that
    was not waited for: its group was handed back, it met a limit, or the run ended.
    """

    group: int
    sample: int
    start_s: float
    turns: list[tuple[float, float, int, int]]
    held_s: float
    end_s: float
    how: Literal["done", "failed", "cut"]


class Timed:
    """Rollouts of another generator, each with a line of how long it took.

    A disk that refuses ends the lines, with a warning, and not the run: only forecasts need them.
    """

    def __init__(self, generator: Generator, engines: EnginePool, run_dir: Path) -> None:
        self._generator, self._run_dir = generator, run_dir
        self._turns = defaultdict[str, list[tuple[float, float, int, int]]](list)
        """Of rollouts that run."""
        self._lines = deque[str](maxlen=MAX_LINES)
        self._written_s, self._is_writing = -GATHER_S, True
        engines.on_sampled = self._sampled

    async def run_attempt(self, attempt: RolloutAttempt) -> Rollout:
        """What the generator returns or raises."""
        name, start_s = attempt.rollout_id, time.time()
        held_s, how = list[float](), "cut"

        def stopped() -> None:
            held_s.append(time.time())
            attempt.stopped_sampling()

        self._turns[name] = []
        try:
            rollout = await self._generator.run_attempt(replace(attempt, stopped_sampling=stopped))
            how = "done"
            return rollout
        except RolloutFailure:
            how = "failed"
            raise
        finally:
            ended_s = time.time()
            self._write(
                {
                    "group": attempt.group_id,
                    "sample": attempt.sample_index,
                    "start_s": round(start_s, 5),
                    "turns": [
                        (round(asked_s - start_s, 5), round(answered_s - start_s, 5), num_prompt, num_sampled)
                        for asked_s, answered_s, num_prompt, num_sampled in self._turns.pop(name)
                    ],
                    "held_s": round((held_s or [ended_s])[0] - start_s, 5),
                    "end_s": round(ended_s - start_s, 5),
                    "how": how,  # type: ignore[typeddict-item]
                }
            )

    def _sampled(self, request: SamplingRequest, num_sampled: int, asked_s: float) -> None:
        """A request was answered; its id begins with that of its rollout: g17/r3/..."""
        name = "/".join(request.request_id.split("/", 2)[:2])
        if name in self._turns:
            self._turns[name].append((asked_s, time.time(), len(request.prompt_ids), num_sampled))

    def _write(self, line: RolloutTimes) -> None:
        """Lines of GATHER_S are written together, and at once where no other rollout runs: the last ones of a
        run are not lost.
        """
        self._lines.append(json.dumps(line, separators=(",", ":")) + "\n")
        now_s = time.time()
        is_early = bool(self._turns) and abs(now_s - self._written_s) < GATHER_S
        if not self._is_writing or is_early:
            return
        path, self._written_s = self._run_dir / TIMES_FILE, now_s
        try:
            with path.open("a", encoding="utf-8") as file:
                file.writelines(self._lines)
                is_full = file.tell() > MAX_BYTES
            self._lines.clear()
            if is_full:
                path.replace(path.with_name(OLD_TIMES_FILE))
        except OSError as error:
            self._is_writing = False
            log.warning("%s is not written any more, and `asyncrl simulate` lacks it: %s", path, error)

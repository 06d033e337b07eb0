"""Producers with a harness, and groups of one engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fakes import FakeEngine, FakeSource, FakeTokenizer, MemoryJournal
from rollout_cases import (
    FakeSink,
    make_producers,
    one_token,
    single_turn,
)
from token_cases import completion_of

from asyncrl.base.errors import (
    RolloutFailure,
)
from asyncrl.messages.records import (
    Completion,
    GroupId,
    Outcome,
    Prompt,
    Rollout,
    Work,
)
from asyncrl.rollouts.rollout import (
    AnnotatedGenerator,
    Generator,
    HarnessGenerator,
    RolloutAttempt,
    RolloutRunner,
    Slots,
)
from asyncrl.testing.virtual_time import run_virtual

HARNESS_PROMPT = Prompt("e0/3", ({"role": "user", "content": "hi"},), answer="7")


class FakeHost:
    """A session host with one session at a time, its scorers, and a queue whose worker
    takes a work after `queued_s`, and `run_s` for it.
    """

    has_score = shows_special = True
    scores_groups = is_library = False
    weights: dict[str, float] = {}
    asked = None
    num_spent = num_calls = 1
    untrained: tuple[tuple[str, str], ...] = ()

    def __init__(
        self,
        outcome: Outcome | Exception,
        text: str | None = "the answer",
        *,
        overflow: str | None = None,
        queued_s: float = 0.0,
        run_s: float = 0.0,
    ) -> None:
        self._outcome, self._text, self.overflow = outcome, text, overflow
        self._queued_s, self._run_s = queued_s, run_s
        self.num_completions = int(text is not None)
        self.log, self.works = list[str](), list[Work]()

    def of(self, prompt: Prompt) -> FakeHost:
        return self

    async def score(self, prompt: Prompt, sampled: Completion) -> float:
        self.log.append(f"scored {FakeTokenizer().decode(sampled.token_ids)!r}")
        return 0.25

    def open_nowait(self, rollout_id: str, *, attempt: int, **about: Any) -> FakeHost:
        self.key = f"key-{attempt}"
        return self

    def end_nowait(self, reason: str) -> None:
        self.log.append(f"ended: {reason}")

    def while_open(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def last_completion(self) -> Completion:
        return completion_of([*map(ord, self._text or "")])

    def rollout(
        self,
        sample_index: int,
        outcome: Outcome,
        reward: float,
        *,
        by_turn: bool = False,
    ) -> Rollout:
        if self._text is None:
            raise RolloutFailure("nothing was sampled")
        self.by_turn = by_turn
        return (
            replace(one_token(sample_index, reward=reward), metrics=outcome.metrics),
        )

    async def run(self, work: Work, *, started: Callable[[], None]) -> Outcome:
        self.works.append(work)
        await asyncio.sleep(self._queued_s)
        started()
        await asyncio.sleep(self._run_s)
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


class LoggingSlots(Slots):
    def __init__(self, log: list[str]) -> None:
        super().__init__(1)
        self.log = log

    def give_back_nowait(self, name: str) -> None:
        self.log.append("slot is free")
        super().give_back_nowait(name)


def run_harness(host: FakeHost, *, retries: int = 0, **options: Any) -> Any:
    async def story() -> Any:
        generator = HarnessGenerator(host, host, host, **options)  # type: ignore[arg-type]
        runner = RolloutRunner(generator, timeout_s=10.0, retries=retries)
        attempt = RolloutAttempt("g4/r2", GroupId(4), HARNESS_PROMPT, 2)
        return await runner.run(attempt, slots=LoggingSlots(host.log), order=())

    return run_virtual(story())


class World:
    """Producers between a fake source, sink, engine and scorer, running within `async
    with`.
    """

    def __init__(
        self,
        *,
        engine: Any = None,
        scorer: Any = None,
        judge: Any = None,
        num_tickets: int = 100,
        **settings: Any,
    ) -> None:
        self.tasks, self.engine = asyncio.TaskGroup(), engine or FakeEngine()
        self.sink, self.source, self.journal = (
            FakeSink(num_tickets),
            FakeSource(),
            MemoryJournal(),
        )
        generator: Generator = single_turn(self.engine, scorer)
        if judge is not None:
            generator = AnnotatedGenerator(generator, judge)
        values = {
            "capacity": 4,
            "retries": 1,
            "source": self.source,
            "journal": self.journal,
        } | settings
        self.producers = make_producers(
            self.sink, self.tasks.create_task, generator, **values
        )

    async def __aenter__(self) -> World:
        await self.tasks.__aenter__()
        self.running = self.tasks.create_task(self.producers.run(), name="producers")
        return self

    async def __aexit__(
        self, kind: Any, error: BaseException | None, trace: Any
    ) -> None:
        """Cancel the producers; nothing may be left."""
        if error is None:
            self.running.cancel()
            await self.producers.aclose()
        await self.tasks.__aexit__(kind, error, trace)
        assert self.count("inflight") == self.producers.slots.num_held == 0

    def count(self, name: str) -> float:
        return self.producers.gauges()[f"rollout/{name}"]

    @property
    def trained(self) -> list[str]:
        return [group.prompt.prompt_id for group in self.sink.finished]

    @property
    def requeued(self) -> list[int | None]:
        """Return, for each failed group, the number of returns of its prompt."""
        return [
            event[4]
            for event in self.journal.named("end_group")
            if event[2] == "failed"
        ]

    @property
    def admitted(self) -> list[GroupId]:
        return [ticket.group_id for ticket in self.sink.admitted]
